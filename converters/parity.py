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
# Router gap, in standard deviations of its layer's router logits, below which bfloat16 may choose another expert: a value
# is rounded by up to 2^-9, and a hidden state is a sum of some tens of rounded terms in both models. Measured where
# differences start: at most 0.026 (random models of 3 to 12 layers); with a rotary base that is 1.3 times too large, 0.29.
NEAR_TIE = 0.06


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
    gaps: for each token where a difference starts, the distance between the last chosen router logit and the first one not
        chosen, in the first layer where it differs and in standard deviations of that layer's router logits. The other
        differing tokens follow: they see one that went to other experts in a layer before.
    """

    relative_norm: float
    max_abs: float
    top1: float
    num_tokens: int
    num_differing: int
    gaps: tuple[float, ...]

    @property
    def logits_match(self) -> bool:
        """Whether the logits are equal but for float32 rounding."""
        return self.relative_norm < MAX_RELATIVE_NORM

    @property
    def largest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    @property
    def only_near_ties(self) -> bool:
        """Whether rounding explains every token that goes to other experts, by itself or because it sees such a one."""
        return self.largest_gap < NEAR_TIE


def relative_norm(ours: np.ndarray, reference: np.ndarray) -> float:
    """Norm of the difference over the norm of the reference, in float64."""
    difference = ours.astype(np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference.astype(np.float64)))


def differing_experts(ids: np.ndarray, router_logits: np.ndarray, length: int) -> tuple[int, tuple[float, ...]]:
    """(`Parity.num_differing`, `Parity.gaps`) of the experts chosen here, [L, N, K], beside router logits [L, N, E].

    length: tokens of a row; a token sees those before it in its row.
    """
    k = ids.shape[-1]
    order = np.argsort(-router_logits, axis=-1, kind="stable")
    differs_LN = (np.sort(order[..., :k], -1) != np.sort(ids, -1)).any(axis=-1)
    tokens = np.flatnonzero(differs_LN.any(axis=0))
    if not len(tokens):  # always so where every token goes to all experts, or no layer has any
        return 0, ()
    ever_LN = np.logical_or.accumulate(differs_LN, axis=0)
    seen_LN = np.logical_or.accumulate(ever_LN.reshape(len(ids), -1, length), axis=2).reshape(differs_LN.shape)
    first = differs_LN[:, tokens].argmax(axis=0)
    starts = (first == 0) | ~seen_LN[first - 1, tokens]
    first, tokens, num_differing = first[starts], tokens[starts], len(tokens)
    ranked = np.take_along_axis(router_logits, order, -1)[first, tokens]
    deviation = router_logits.std(axis=(1, 2))[first]
    return num_differing, tuple(((ranked[:, k - 1] - ranked[:, k]) / deviation).tolist())


def compare_outputs(ours: np.ndarray, ids: np.ndarray, reference: np.ndarray, router_logits: np.ndarray,
                    length: int) -> Parity:  # fmt: skip
    """Compares logits [N, V] and chosen experts [L, N, K] with the reference's logits and router logits [L, N, E].

    length: tokens of a row.
    """
    num_differing, gaps = differing_experts(ids, router_logits, length)
    return Parity(
        relative_norm=relative_norm(ours, reference),
        max_abs=float(np.abs(ours.astype(np.float64) - reference).max()),
        top1=float((ours.argmax(-1) == reference.argmax(-1)).mean()),
        num_tokens=len(ours),
        num_differing=num_differing,
        gaps=gaps,
    )


def verify(
    folder: str | Path, *, dtype: str = "float32", num_tokens: int = 512, length: int = 300, seed: int = 0,
    carry_unknown: bool = False,
) -> Parity:  # fmt: skip
    """Compares our logits of random tokens with transformers'; `moe_jax.init` comes first.

    dtype: what both sides compute in, "float32" or "bfloat16"; our routers are float32 always.
    num_tokens: rounded up to whole rows of `length`; scaled rotary types show their faults only at length.
    """
    for name, value in (("tokens", num_tokens), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be positive")
    model = moe_jax.transform(str(folder), _EVALUATION, dtype=dtype, carry_unknown=carry_unknown)
    shape = (-(-num_tokens // length), length)
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, shape, dtype=np.int32)
    num_moe_layers, num_experts_per_tok = model.config.num_moe_layers, model.config.num_experts_per_tok
    output = jax.jit(lambda model, tokens: model(tokens, return_routing=num_moe_layers > 0))(model, tokens)
    ids = np.zeros((0, tokens.size, num_experts_per_tok), np.int32)
    if output.routing_ids is not None:
        ids = np.asarray(output.routing_ids).reshape(num_moe_layers, tokens.size, num_experts_per_tok)
    ours = np.asarray(output.logits).reshape(tokens.size, -1)
    reference, router_logits = _reference(folder, tokens, dtype, has_routers=num_moe_layers > 0)
    return compare_outputs(ours, ids, reference, router_logits, length)


def warm_up_torch() -> None:
    """Calls torch's elementwise functions once on one element, in this thread; before a reference is computed.

    The MKL of torch's wheels chooses a function's kernel at its first call. When that call runs in several threads at once,
    one of them may use a kernel with half the digits: a rotary table off by 1e-4, once in some hundred processes
    (pytorch/pytorch issue 188792).
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in ("acos", "asin", "atan", "cos", "erf", "erfc", "exp", "expm1", "log", "log1p", "log2", "log10",
                         "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"):  # fmt: skip
            getattr(torch, function)(one)


def _reference(
    folder: str | Path, tokens: np.ndarray, dtype: str, *, has_routers: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(logits [N, V], router logits [L, N, E]) of transformers, eager, computed in `dtype` and given as float32."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"verify needs torch and transformers, but {error.name} is not installed") from None
    warm_up_torch()
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True, **options
    ).eval()
    with torch.no_grad():
        output = model(torch.from_numpy(tokens).long(), output_router_logits=has_routers, use_cache=False)
    logits = output.logits.float().numpy().reshape(tokens.size, -1)
    if not has_routers:
        return logits, np.zeros((0, tokens.size, 1), np.float32)
    return logits, np.stack([layer.float().numpy() for layer in output.router_logits])
