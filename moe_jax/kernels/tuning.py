"""Measures tiles of the Hopper kernels and keeps the best in a table: what `moe-jax tune` does.

M rows in E groups, D and F inner and outer width of a group's matrix.
"""

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.errors import ConfigError
from moe_jax.kernels import choice, portable
from moe_jax.kernels.choice import LEGS, Shape
from moe_jax.kernels.tiles import ROW_ALIGNMENT, Tiles

MATRICES = ("gate_up", "down")
MAX_WASTE = 0.2  # of the columns, beyond those that there are
ROUNDS, BURST_SECONDS = 7, 0.02
MAX_DIFFERENCE = 1e-2  # relative norm between a candidate's result and the portable one; rounding to bfloat16 is 2e-3

Seconds = dict[Tiles, list[float]]


class MoEShape(NamedTuple):
    """The expert layer of a model on one device: each token goes to `top_k` of `num_experts` experts, `width` wide."""

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    width: int

    @property
    def num_rows(self) -> int:
        """Rows of the grouped products."""
        return self.tokens * self.top_k


KNOWN_MODELS = {
    "Mixtral-8x7B": MoEShape(8192, 2, 8, 4096, 14336),
    "Qwen3-30B-A3B": MoEShape(16384, 8, 128, 2048, 768),
    "OLMoE-1B-7B": MoEShape(16384, 8, 64, 2048, 1024),
    "large": MoEShape(32768, 8, 128, 4096, 1024),
}


def leg_shapes(model: MoEShape, dtype: Any = jnp.bfloat16, legs: Iterable[str] = LEGS) -> dict[tuple[str, str], Shape]:
    """(matrix, leg) -> its shape, for gate and up in one matrix and for down."""
    sides = {"gate_up": (model.hidden, 2 * model.width), "down": (model.width, model.hidden)}
    return {
        (matrix, leg): Shape(leg, dtype, model.num_rows, model.num_experts, *sides[matrix])
        for matrix in MATRICES
        for leg in legs
    }


def candidates(shape: Shape) -> list[Tiles]:
    """The tiles worth measuring for a leg: the default first, then those that leave little of their last column empty."""
    found = [choice.default_tiles(shape)]
    for cluster in (1, 2):
        found += [Tiles(rows=64, columns=256, width=width, cluster=cluster) for width in (2, 4, 8, 16)]
        for side_by_side in (False, True):
            found += [
                Tiles(rows=128, columns=128, width=width, cluster=cluster, side_by_side=side_by_side)
                for width in (4, 8, 16)
            ]
    columns = shape.inner if shape.leg == "input_gradient" else shape.out
    fitting = [tiles for tiles in found[1:] if _waste(columns, tiles) <= MAX_WASTE]
    return list(dict.fromkeys([found[0], *fitting]))


def _waste(columns: int, tiles: Tiles) -> float:
    step = tiles.block[1] * tiles.cluster
    return -(-columns // step) * step / columns - 1


def tune(
    models: Mapping[str, MoEShape],
    path: Path,
    legs: Iterable[str] = LEGS,
    *,
    measure: Callable[[Shape, list[Tiles], Callable[[str], None]], Seconds] | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Measures every leg of the models on this Hopper GPU, says the rates, and adds each best to the table at `path`.

    measure: (shape, candidates, say) -> seconds of a call in every round; None for the real thing.
    """
    device = choice.device_kind()
    if not choice.is_hopper(device):
        raise ConfigError(
            f"tune measures kernels for Hopper GPUs (H100, H200, GH200), but this process runs on {device!r}"
        )
    work = [(name, *item) for name, model in models.items() for item in leg_shapes(model, legs=legs).items()]
    add_entries(path, {})  # a table that cannot be read or written shows now
    for number, (name, (matrix, leg), shape) in enumerate(work, start=1):
        say(
            f"[{number}/{len(work)}] {name} {matrix} {leg}: {shape.num_rows} rows in {shape.num_groups} groups, "
            f"{shape.inner} x {shape.out}"
        )
        obstacle = choice.hopper_obstacle(shape)
        if obstacle is not None:
            say(f"  no Hopper kernel for this leg: {obstacle}")
            continue
        seconds = (measure or measure_tiles)(shape, candidates(shape), say)
        if not seconds:
            say("  no candidate works")
            continue
        for line in rate_lines(shape, seconds):
            say(line)
        add_entries(path, {choice.table_key(shape, device): best(seconds)})


def best(seconds: Seconds) -> Tiles:
    """The tiles with the least median."""
    return min(seconds, key=lambda tiles: statistics.median(seconds[tiles]))


def rate_lines(shape: Shape, seconds: Seconds) -> list[str]:
    """A line for each candidate, the fastest first: TFLOP/s, the median and (least-most), and its tiles."""
    flops = 2.0 * shape.num_rows * shape.inner * shape.out
    lines = []
    for tiles in sorted(seconds, key=lambda tiles: statistics.median(seconds[tiles])):
        times = (statistics.median(seconds[tiles]), max(seconds[tiles]), min(seconds[tiles]))
        median, least, most = (flops / t / 1e12 for t in times)
        note = "  (default)" if tiles == choice.default_tiles(shape) else ""
        lines.append(f"  {median:6.1f} TFLOP/s ({least:.1f}-{most:.1f})  {describe(tiles)}{note}")
    return lines


def describe(tiles: Tiles) -> str:
    """Tiles in words, such as "rows=64 columns=256 stages=4 cluster=1 width=8"."""
    words = [f"{name}={getattr(tiles, name)}" for name in ("rows", "columns", "stages", "cluster", "width")]
    return " ".join([*words, *(["side_by_side"] if tiles.side_by_side else [])])


def add_entries(path: Path, entries: Mapping[str, Tiles]) -> None:
    """Adds entries to the table at `path`, which is made if there is none and is replaced as a whole."""
    table = choice.read_table(path) if path.exists() else {}
    table |= {key: choice.tiles_entry(tiles) for key, tiles in entries.items()}
    lines = [f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---- on the GPU ----


def measure_tiles(shape: Shape, tiles: list[Tiles], say: Callable[[str], None]) -> Seconds:
    """Seconds of a call with each of `tiles`, one number a round; says which do not compile, or are wrong.

    A round queues a burst of calls of every candidate in turn: the GPU's clock falls under load, for all of them alike.
    """
    inputs = leg_inputs(shape)
    calls, expected = {}, jax.jit(functools.partial(portable_call, shape))(*inputs)
    for candidate in tiles:
        try:
            call = jax.jit(functools.partial(leg_call, shape, candidate)).lower(*inputs).compile()
            result = jax.block_until_ready(call(*inputs))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            say(f"  does not work: {describe(candidate)}: {reason}")
            continue
        difference = float(_difference(result, expected))
        if difference < MAX_DIFFERENCE:
            calls[candidate] = functools.partial(call, *inputs)
        else:
            say(f"  differs by {difference:.1e} from the portable product: {describe(candidate)}")
    sizes = {candidate: max(1, round(BURST_SECONDS / _burst(call, 3))) for candidate, call in calls.items()}
    seconds: Seconds = {candidate: [] for candidate in calls}
    for _ in range(ROUNDS):
        for candidate, call in calls.items():
            seconds[candidate].append(_burst(call, sizes[candidate]))
    return seconds


def leg_call(shape: Shape, tiles: Tiles, a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The leg's Hopper kernel; the weight gradient as a training step takes it, in the dtype of its inputs."""
    from moe_jax.kernels import hopper  # here: a jaxlib without CUDA need not have what it imports

    if shape.leg == "weight_gradient":
        return hopper.weight_gradient(a, b, sizes_E, out_dtype=a.dtype, tiles=tiles)
    return hopper.rows_times_matrix(a, b, sizes_E, transpose=shape.leg == "input_gradient", tiles=tiles)


def portable_call(shape: Shape, a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The same by the portable implementation."""
    if shape.leg == "weight_gradient":
        return portable.weight_gradient(a, b, sizes_E, None).astype(a.dtype)
    return portable.rows_times_matrix(a, b, sizes_E, transpose=shape.leg == "input_gradient")


def leg_inputs(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal numbers and multinomial group sizes."""
    rows = -(-shape.num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    x, dy, w = (rows, shape.inner), (rows, shape.out), (shape.num_groups, shape.inner, shape.out)
    sides = {"forward": (x, w), "input_gradient": (dy, w), "weight_gradient": (x, dy)}[shape.leg]
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (jax.random.normal(key, side, shape.dtype) for key, side in zip(keys, sides, strict=True))
    sizes_E = np.random.default_rng(0).multinomial(shape.num_rows, np.full(shape.num_groups, 1 / shape.num_groups))
    return a, b, jnp.asarray(sizes_E, jnp.int32)


@jax.jit
def _difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Relative norm of a - b; not a number counts as different."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))


def _burst(call: Callable[[], jax.Array], size: int) -> float:
    """Seconds of one call among `size` that are queued at once."""
    result = jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(size):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / size
