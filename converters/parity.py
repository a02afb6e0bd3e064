"""Proofs that a conversion is right: the round trip byte by byte, and the logits against transformers."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import moe_jax
from converters.bridge import is_leftover
from converters.io import CheckpointReader, carried_files
from moe_jax.errors import ConfigError

# Only evaluation happens here, so nothing of the balancing takes part.
_EVALUATION = moe_jax.MoEConfig(moe_load_balancing="none", moe_aux_loss_coeff=0.0)
MAX_RELATIVE_NORM = 1e-5  # float32 logits of two implementations that differ in summation order only


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """What was compared, and one sentence for each difference."""

    num_tensors: int
    num_bytes: int
    num_files: int
    left_out: tuple[str, ...]
    differences: tuple[str, ...]


def compare_folders(source: str | Path, export: str | Path) -> RoundTrip:
    """Compares two checkpoint folders: tensors (bytes, dtype, shape, shard) and the other files.

    Buffers that conversions leave out on purpose are named in `left_out`.
    """
    a, b = CheckpointReader(source), CheckpointReader(export)
    left_out = tuple(name for name in a.tensors if is_leftover(name) and name not in b.tensors)
    differences = [f"tensor {name} is not in the export" for name in a.tensors.keys() - b.tensors.keys() - {*left_out}]
    differences += [f"tensor {name} is in the export only" for name in b.tensors.keys() - a.tensors.keys()]
    common = [name for name in a.tensors if name in b.tensors]
    for name in common:
        if a.tensors[name] != b.tensors[name]:
            differences.append(f"tensor {name} is {b.tensors[name]} in the export, was {a.tensors[name]}")
        elif not np.array_equal(_bytes(a.view(name)), _bytes(b.view(name))):
            differences.append(f"tensor {name} has other bytes in the export")
    files, written = carried_files(source), carried_files(export)
    differences += [
        f"file {n} differs or is in one folder only" for n in files | written if files.get(n) != written.get(n)
    ]
    size = sum(a.view(name).nbytes for name in common)
    return RoundTrip(len(common), size, len(files), left_out, tuple(sorted(differences)))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def round_trip(folder: str | Path, *, carry_unknown: bool = False) -> RoundTrip:
    """Converts a checkpoint, exports it to a temporary folder and compares the two; `moe_jax.init` comes first."""
    model = moe_jax.transform(str(folder), _EVALUATION, dtype="float32", carry_unknown=carry_unknown)
    with tempfile.TemporaryDirectory() as temporary:
        export = Path(temporary) / "export"
        moe_jax.save_pretrained(model, export)
        return compare_folders(folder, export)


@dataclasses.dataclass(frozen=True)
class Parity:
    """Logits of ours against the reference.

    relative_norm: norm of the difference over the norm of the reference. max_abs: its largest element.
    top1: share of tokens with the same most likely next token.
    num_tokens, num_differing: tokens, and those whose set of chosen experts differs in any layer.
    gaps: for each differing token, its smallest distance over the layers between the last chosen router logit and the
        first one not chosen.
    """

    relative_norm: float
    max_abs: float
    top1: float
    num_tokens: int
    num_differing: int
    gaps: tuple[float, ...]

    @property
    def ok(self) -> bool:
        return self.relative_norm < MAX_RELATIVE_NORM


def compare_outputs(ours: np.ndarray, ids: np.ndarray, reference: np.ndarray, router_logits: np.ndarray) -> Parity:
    """Compares logits [N, V] and chosen experts [L, N, K] with the reference's logits and router logits [L, N, E]."""
    k, num_experts = ids.shape[-1], router_logits.shape[-1]
    order = np.argsort(-router_logits, axis=-1, kind="stable")
    differs = (np.sort(order[..., :k], -1) != np.sort(ids, -1)).any(axis=(0, 2))
    gaps = np.full(router_logits.shape[1], np.inf)
    if k < num_experts:
        ranked = np.take_along_axis(router_logits, order, -1)
        gaps = (ranked[..., k - 1] - ranked[..., k]).min(axis=0)
    difference = ours.astype(np.float64) - reference
    return Parity(
        relative_norm=float(np.linalg.norm(difference) / np.linalg.norm(reference)),
        max_abs=float(np.abs(difference).max()),
        top1=float((ours.argmax(-1) == reference.argmax(-1)).mean()),
        num_tokens=len(ours),
        num_differing=int(differs.sum()),
        gaps=tuple(float(gap) for gap in gaps[differs]),
    )


def verify(
    folder: str | Path, *, num_tokens: int = 512, length: int = 300, seed: int = 0, carry_unknown: bool = False
) -> Parity:
    """Compares our logits of random tokens with transformers', in float32; `moe_jax.init` comes first.

    num_tokens: rounded up to whole rows of `length`; scaled rotary types show their faults only at length.
    """
    for name, value in (("tokens", num_tokens), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be positive")
    model = moe_jax.transform(str(folder), _EVALUATION, dtype="float32", carry_unknown=carry_unknown)
    shape = (-(-num_tokens // length), length)
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, shape, dtype=np.int32)
    output = jax.jit(lambda model, tokens: model(tokens, return_routing=True))(model, tokens)
    if output.routing_ids is None:
        raise AssertionError("the model returned no routing")
    ids = np.asarray(output.routing_ids).reshape(len(output.routing_ids), -1, output.routing_ids.shape[-1])
    ours = np.asarray(output.logits).reshape(-1, output.logits.shape[-1])
    return compare_outputs(ours, ids, *_reference(folder, tokens))


def _reference(folder: str | Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits [N, V], router logits [L, N, E]) of transformers, eager and float32."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"verify needs torch and transformers, but {error.name} is not installed") from None
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options).eval()
    with torch.no_grad():
        output = model(torch.from_numpy(tokens).long(), output_router_logits=True, use_cache=False)
    router = np.stack([layer.numpy() for layer in output.router_logits])
    return output.logits.reshape(-1, output.logits.shape[-1]).numpy(), router
