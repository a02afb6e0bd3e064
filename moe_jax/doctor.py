"""What an installation runs the experts with, and whether that works: `moe-jax doctor`.

`examine` gathers it as data, `report_lines` puts it in words.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.errors import ConfigError
from moe_jax.hf import model_config_of
from moe_jax.kernels import choice, portable
from moe_jax.kernels.choice import Choice, Shape
from moe_jax.kernels.tiles import Tiles
from moe_jax.kernels.tuning import KNOWN_MODELS, MoEShape, describe, leg_shapes

PACKAGES = ("moe_jax", "jax", "jaxlib")
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
DEFAULT_MODELS = ("Mixtral-8x7B", "Qwen3-30B-A3B", "OLMoE-1B-7B")
DEFAULT_TOKENS = 16384
MAX_ERROR = 1e-2  # relative norm; rounding to bfloat16 is 2e-3
PROBE_SIZES, PROBE_ROWS, PROBE_WIDTH = (0, 40, 17, 163), 240, 256  # unaligned groups, one empty, rows of none


class Leg(NamedTuple):
    """What one leg of a model's grouped products takes. is_tuned: the tiles were measured."""

    model: str
    matrix: str
    shape: Shape
    choice: Choice
    is_tuned: bool


class Probe(NamedTuple):
    """A tiny product run by an implementation: its relative error, or the message of what it raised."""

    implementation: str
    error: float
    message: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it ran and is right."""
        return not self.message and self.error < MAX_ERROR


@dataclasses.dataclass(frozen=True)
class Report:
    """versions: of the packages, None for one that is not installed. devices: a line for each kind."""

    versions: Mapping[str, str | None]
    devices: tuple[str, ...]
    is_hopper: bool
    models: Mapping[str, MoEShape]
    legs: tuple[Leg, ...]
    probes: tuple[Probe, ...]

    @property
    def faults(self) -> list[str]:
        """What is wrong, in a sentence each."""
        slow = [leg for leg in self.legs if leg.choice.reason is not None]
        return [
            *(
                f"{leg.model}, {leg.matrix}, {leg.shape.leg}: the fast kernel is not used: {leg.choice.reason}"
                for leg in slow
            ),
            *(f"{probe.implementation} does not work: {_outcome(probe)}" for probe in self.probes if not probe.is_ok),
        ]


def find_model(model: str, tokens: int = 0) -> tuple[str, MoEShape]:
    """(name, shape) of a well-known model, a checkpoint folder or a config.json, for so many tokens of a device (0: a usual
    number)."""
    if model in KNOWN_MODELS:
        shape = KNOWN_MODELS[model]
        return model, shape._replace(tokens=tokens or shape.tokens)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = model_config_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(
            f"--model is {model!r}, but must be a checkpoint folder, a config.json or one of {', '.join(KNOWN_MODELS)}: "
            f"{error}"
        ) from None
    name = path.parent.name if path.name == "config.json" else path.name
    return name or model, MoEShape(
        tokens or DEFAULT_TOKENS, config.num_experts_per_tok, config.num_experts, config.hidden_size,
        config.moe_intermediate_size,
    )  # fmt: skip


def examine(
    models: Mapping[str, MoEShape], dtype: Any = jnp.bfloat16, probe: Callable[[str], Probe] | None = None
) -> Report:
    """Gathers everything. probe: runs an implementation, `run_probe` where None."""
    device = choice.device_kind()
    legs = []
    for name, model in models.items():
        for (matrix, _), shape in leg_shapes(model, dtype).items():
            taken = choice.choice_for(shape, device)
            tuned = taken.tiles is not None and choice.tuned_tiles(shape, device) is not None
            legs.append(Leg(name, matrix, shape, taken, tuned))
    implementations = ("mosaic_gpu", "portable") if choice.is_hopper(device) else ("portable",)
    return Report(
        versions={name: _version(name) for name in (*PACKAGES, *CUDA_PLUGINS)},
        devices=tuple(_device_lines()),
        is_hopper=choice.is_hopper(device),
        models=dict(models),
        legs=tuple(legs),
        probes=tuple((probe or run_probe)(name) for name in implementations),
    )


def report_lines(report: Report) -> list[str]:
    """The report in words; the last lines are the faults, or that there are none."""
    plugins = [f"{name} {report.versions[name]}" for name in CUDA_PLUGINS if report.versions[name]]
    versions = [f"{name} {report.versions[name] or 'not installed'}" for name in PACKAGES]
    lines = [", ".join([*versions, *(plugins or ["no CUDA plugin"])]), "devices: " + "; ".join(report.devices)]
    if os.environ.get(choice.TILES_VARIABLE):
        lines.append(f"{choice.TILES_VARIABLE}={os.environ[choice.TILES_VARIABLE]}")
    for name, model in report.models.items():
        legs = [leg for leg in report.legs if leg.model == name]
        dtype = jnp.dtype(legs[0].shape.dtype).name
        lines += [
            "",
            f"{name}: {model.tokens} tokens of a device, top {model.top_k} of {model.num_experts} experts, {dtype}",
            *(
                f"  {leg.matrix:8}{leg.shape.inner:6} x {leg.shape.out:<6}{leg.shape.leg:16} {_taken(leg)}"
                for leg in legs
            ),
        ]
    lines += ["", "a small product and its gradients, against float64:"]
    lines += [f"  {probe.implementation:12}{_outcome(probe)}" for probe in report.probes]
    lines.append("")
    if not report.is_hopper:
        lines.append("No Hopper GPU here: the products take the portable implementation.")
    return lines + ([f"WARNING: {fault}" for fault in report.faults] or ["No faults found."])


def run_probe(implementation: str) -> Probe:
    """Runs the three legs of a small product; whatever it raises is in the result."""
    sizes, width = np.array(PROBE_SIZES), PROBE_WIDTH
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, w, dy = draw(PROBE_ROWS, width), draw(len(sizes), width, width), draw(PROBE_ROWS, width)
    legs = {"mosaic_gpu": _hopper_legs, "portable": _portable_legs}[implementation]
    try:
        found = jax.device_get(jax.jit(legs)(x, w, dy, jnp.asarray(sizes, jnp.int32)))
    except Exception as error:  # whatever a driver, compiler or library may raise is what is asked for
        return Probe(implementation, float("nan"), f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    expected = _reference(x, w, dy, sizes)
    errors = [
        np.linalg.norm(f.astype(np.float64) - e) / np.linalg.norm(e) for f, e in zip(found, expected, strict=True)
    ]
    return Probe(implementation, float(np.max(errors)))


def _portable_legs(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    return (
        portable.rows_times_matrix(x, w, sizes, transpose=False),
        portable.rows_times_matrix(dy, w, sizes, transpose=True),
        portable.weight_gradient(x, dy, sizes, None),
    )


def _hopper_legs(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    from moe_jax.kernels import hopper  # here: a jaxlib without CUDA need not have what it imports

    tiles = Tiles()
    return (
        hopper.rows_times_matrix(x, w, sizes, transpose=False, tiles=tiles),
        hopper.rows_times_matrix(dy, w, sizes, transpose=True, tiles=tiles),
        hopper.weight_gradient(x, dy, sizes, out_dtype=jnp.float32, tiles=tiles),
    )


def _reference(x: np.ndarray, w: np.ndarray, dy: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Group by group."""
    y, dx, dw, start = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


def _taken(leg: Leg) -> str:
    if leg.choice.tiles is None:
        return leg.choice.implementation
    return f"{leg.choice.implementation}  {'tuned' if leg.is_tuned else 'default'}: {describe(leg.choice.tiles)}"


def _outcome(probe: Probe) -> str:
    return probe.message or f"{'ok' if probe.is_ok else 'WRONG'}, relative error {probe.error:.1e}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device_lines() -> list[str]:
    """The devices of this process, those alike in one line, with the memory that JAX may take."""
    alike: dict[str, int] = {}
    for device in jax.local_devices():
        memory = (device.memory_stats() or {}).get("bytes_limit")
        kind = device.device_kind + (f" with {memory / 2**30:.0f} GiB for JAX" if memory else "")
        alike[kind] = alike.get(kind, 0) + 1
    return [f"{count} x {kind}" for kind, count in alike.items()]
