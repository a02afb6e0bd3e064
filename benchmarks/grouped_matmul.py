"""The three legs of `grouped_matmul` beside torch's on one GPU: `python benchmarks/grouped_matmul.py [--out FOLDER]`.

bf16, both in one process on the same arrays, measured in turn. A row is a shape, a load (how many rows each expert has) and a leg:

- forward: x[M, K] w[E, K, N]; input: dy[M, N] times w transposed; weight: x^T dy of each expert.
- random: a uniform multinomial draw; balanced; zipf: expert e by 1 / (e + 1), in random order, at most M / top_k rows each;
  half_empty: every second expert has none, the others a uniform draw.

TFLOP/s are 2 M K N / time: the median of the repeats (least-most). "dense" is one XLA product of [M, K] with [K, N] (and its two
gradients). Errors are relative norms against float64 on the same bf16 inputs, over sampled rows of four experts (the first, last,
largest and smallest) or every few columns of their weight gradients; an empty expert's gradient that is not all zeros is inf.
Where torch fails or is wrong, it is measured with ends of groups at multiples of 16 rows instead, and the row says so.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import peers  # first: it sets how jax takes memory  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import torch
from exchange import table
from jax import lax
from peers import as_torch, first_line, interleaved, jax_seconds, rate, torch_seconds

from moe_jax.kernels.grouped_matmul import grouped_matmul, input_gradient, weight_gradient


@dataclasses.dataclass(frozen=True)
class Shape:
    """M rows, K inner and N outer width, E experts; top_k bounds an expert's rows: M / top_k."""

    rows: int
    inner: int
    outer: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.outer


SHAPES = {
    "mixtral": Shape(32768, 4096, 14336, 8, 2),
    "qwen3_30b": Shape(131072, 2048, 768, 128, 8),
    "dsv3": Shape(32768, 7168, 2048, 32, 8),
    "qwen3_gate_up": Shape(131072, 2048, 1536, 128, 8),
    "qwen3_down": Shape(131072, 768, 2048, 128, 8),
    "olmoe_gate_up": Shape(131072, 2048, 2048, 64, 8),
    "mixtral_gate_up": Shape(16384, 4096, 28672, 8, 2),
}
TINY = {"tiny": Shape(512, 64, 96, 8, 2), "tiny_many": Shape(256, 32, 48, 32, 8)}
LOADS, LEGS = ("random", "balanced", "zipf", "half_empty"), ("forward", "input", "weight")
LIMIT = 1e-2  # of an error: bf16 rounds the result, 2e-3
ALIGNED = 16
SECONDS = 0.05  # of one side in one repeat

# The one place that says what our weight gradient gives: bf16, as torch's; `{}` is the library's default, float32.
WEIGHT_OPTIONS: dict[str, Any] = {"out_dtype": jnp.bfloat16}
OURS: dict[str, Callable[..., jax.Array]] = {
    "forward": jax.jit(lambda x, w, dy, sizes: grouped_matmul(x, w, sizes)),
    "input": jax.jit(lambda x, w, dy, sizes: input_gradient(dy, w, sizes)),
    "weight": jax.jit(lambda x, w, dy, sizes: weight_gradient(x, dy, sizes, **WEIGHT_OPTIONS)),
}
DENSE: dict[str, Callable[..., jax.Array]] = {
    "forward": jax.jit(lambda x, w, dy: x @ w),
    "input": jax.jit(lambda x, w, dy: dy @ w.T),
    "weight": jax.jit(lambda x, w, dy: x.T @ dy),
}


def _ragged(contract: tuple[int, int], groups: list[int]) -> Callable[..., jax.Array]:
    numbers = lax.RaggedDotDimensionNumbers((((contract[0],), (contract[1],)), ((), ())), [0], groups)
    return jax.jit(lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers))


RAGGED = {"forward": _ragged((1, 1), [0]), "input": _ragged((1, 2), [0]), "weight": _ragged((0, 0), [])}


def theirs(leg: str, arrays: "Arrays", ends: torch.Tensor) -> torch.Tensor:
    """torch's leg; ends: int32 [E], the row after the last one of each expert."""
    x, w, dy = arrays.torch
    mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm")  # noqa: B009
    if leg == "forward":
        return mm(x, w, offs=ends)
    return mm(dy, w.transpose(-2, -1), offs=ends) if leg == "input" else mm(x.t(), dy, offs=ends)


# ---- loads ----


def capped(weights_E: np.ndarray, rows: int, most: int) -> np.ndarray:
    """Integer sizes near rows * weights / sum, none above `most`; what is above goes to the others in proportion."""
    exact_E, full_E = rows * weights_E / weights_E.sum(), np.zeros(len(weights_E), bool)
    while np.any(exact_E > most + 1e-6):
        full_E |= exact_E >= most
        left = rows - most * full_E.sum()
        exact_E = np.where(full_E, most, left * weights_E / weights_E[~full_E].sum())
    sizes_E = np.floor(exact_E + 1e-6).astype(np.int64)
    sizes_E[np.argsort(sizes_E - exact_E, kind="stable")[: rows - sizes_E.sum()]] += 1
    return sizes_E


def group_sizes(load: str, shape: Shape) -> np.ndarray:
    """[E], their sum is M."""
    rng, experts = np.random.default_rng(0), shape.experts
    if load == "zipf":
        return rng.permutation(capped(1 / np.arange(1, experts + 1), shape.rows, shape.rows // shape.top_k))
    if load == "balanced":
        return capped(np.ones(experts), shape.rows, shape.rows)
    used_E = np.arange(experts) % 2 == 0 if load == "half_empty" else np.ones(experts, bool)
    return rng.multinomial(shape.rows, used_E / used_E.sum())


def aligned(sizes_E: np.ndarray) -> np.ndarray:
    """The sizes with every group's end at the nearest multiple of 16 rows."""
    ends_E = np.round(np.cumsum(sizes_E) / ALIGNED).astype(np.int64) * ALIGNED
    return np.diff(ends_E, prepend=0)


# ---- correctness ----


def sampled_error(leg: str, arrays: "Arrays", sizes_E: np.ndarray, found: torch.Tensor) -> float:
    """Relative norm of `found` minus float64, over a sample (the module's docstring)."""
    x, w, dy = arrays.torch
    ends_E, used = np.cumsum(sizes_E), np.flatnonzero(sizes_E)
    wrong = right = 0.0
    for e in {used[0], used[-1], used[np.argmax(sizes_E[used])], used[np.argmin(sizes_E[used])]}:
        start, end = int(ends_E[e] - sizes_E[e]), int(ends_E[e])
        if leg == "weight":
            steps = [max(a.shape[1] // 256, 1) for a in (x, dy)]
            expected = x[start:end, :: steps[0]].double().T @ dy[start:end, :: steps[1]].double()
            actual = found[e, :: steps[0], :: steps[1]]
        else:
            rows = torch.from_numpy(np.unique(np.linspace(start, end - 1, 16).astype(np.int64))).to(found.device)
            expected = x[rows].double() @ w[e].double() if leg == "forward" else dy[rows].double() @ w[e].double().T
            actual = found[rows]
        wrong += float(torch.sum((actual.double() - expected) ** 2))
        right += float(torch.sum(expected**2))
    if leg == "weight" and any(bool(torch.any(found[e] != 0)) for e in np.flatnonzero(sizes_E == 0)):
        return float("inf")
    return (wrong / right) ** 0.5


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    kind = torch.int16 if a.dtype == jnp.bfloat16 else torch.int32
    return torch.equal(as_torch(a).view(kind), as_torch(b).view(kind))


# ---- one row ----


class Arrays:
    """The inputs of a shape, drawn by JAX and seen by torch without a copy."""

    def __init__(self, shape: Shape) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        m, k, n, e = shape.rows, shape.inner, shape.outer, shape.experts
        dims = ((m, k), (e, k, n), (m, n))
        self.jax = [jax.random.normal(key, dim, jnp.bfloat16) for key, dim in zip(keys, dims, strict=True)]
        self.torch = [as_torch(a) for a in self.jax]
        self.dense = [self.jax[0], self.jax[1][0], self.jax[2]]


def torch_call(leg: str, arrays: Arrays, sizes_E: np.ndarray) -> tuple[Callable[[], torch.Tensor] | None, float, str]:
    """(what to time, its error, a note): with these sizes, or with aligned ones where those do not work."""
    note = ""
    for sizes in (sizes_E, aligned(sizes_E)):
        ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=peers.device())
        call = lambda ends=ends: theirs(leg, arrays, ends)  # noqa: E731
        try:
            error = sampled_error(leg, arrays, sizes, call())
        except RuntimeError as refused:
            note += f"torch refuses: {first_line(refused)}; "
            continue
        if error < LIMIT:
            return call, error, note + ("torch with aligned groups" if sizes is not sizes_E else "")
        note += f"torch is wrong by {error:.1e}; "
    return None, float("nan"), note


def measure(name: str, load: str, leg: str, shape: Shape, arrays: Arrays, repeats: int, ragged: bool) -> dict[str, Any]:
    sizes_E = group_sizes(load, shape)
    sizes = jnp.asarray(sizes_E, jnp.int32)
    record = {"shape": name, **dataclasses.asdict(shape), "load": load, "leg": leg, "largest": int(sizes_E.max()),
              "smallest": int(sizes_E.min())}  # fmt: skip
    ours = lambda: OURS[leg](*arrays.jax, sizes)  # noqa: E731
    first = ours()
    record |= {"dtype": str(first.dtype), "error": sampled_error(leg, arrays, sizes_E, as_torch(first)),
               "same_bits": same_bits(first, ours())}  # fmt: skip
    del first
    dense = lambda: DENSE[leg](*arrays.dense)  # noqa: E731
    calls: dict[str, Any] = {"ours": (jax_seconds, ours), "dense": (jax_seconds, dense)}
    call, record["torch_error"], record["note"] = torch_call(leg, arrays, sizes_E)
    if call:
        calls["torch"] = (torch_seconds, call)
    if ragged:
        x, w, dy = arrays.jax
        pair = {"forward": (x, w), "input": (dy, w), "weight": (x, dy)}[leg]
        calls["ragged_dot"] = (jax_seconds, lambda: RAGGED[leg](*pair, sizes))
    for side in [side for side in calls if side in ("dense", "ragged_dot")]:
        try:  # compiles it
            jax.block_until_ready(calls[side][1]())
        except Exception as refused:
            record["note"] += f" {side}: {first_line(refused)}"
            del calls[side]
    times = interleaved(calls, repeats, SECONDS)
    return record | {
        "seconds": {side: dataclasses.asdict(t) for side, t in times.items()},
        "rates": {side: t.rates(shape.flops) for side, t in times.items()},
    }


def lines_of(records: list[dict[str, Any]], ragged: bool) -> list[str]:
    rows = []
    for r in records:
        rates = r.get("rates", {})
        of_torch = f"{rates['ours']['median'] / rates['torch']['median']:.2f}" if "torch" in rates else "-"
        cells = [rate(rates.get(side)) for side in ("ours", "torch", "dense", *(["ragged_dot"] if ragged else []))]
        size = f"{r['rows']} x {r['inner']} -> {r['outer']}, {r['experts']}"
        checks = ["-"] * 4
        if "error" in r:
            checks = [r["dtype"], f"{r['error']:.1e}", f"{r['torch_error']:.1e}", "yes" if r["same_bits"] else "NO"]
        rows.append([f"{r['shape']}: {size}", r["load"], r["leg"], *cells, of_torch, *checks, r["note"]])
    sides = ("ours", "torch", "dense", *(["ragged_dot"] if ragged else []))
    names = ("shape", "load", "leg", *sides, "ours / torch", "ours gives", "our error", "torch's", "same bits", "note")
    return list(table(names, rows))


def main() -> int:
    parser = peers.argument_parser(__doc__, "grouped_matmul", LOADS, limit_seconds=240.0)
    parser.add_argument("--shapes", default="", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--legs", default=",".join(LEGS))
    parser.add_argument("--ragged-dot", action="store_true", help="lax.ragged_dot too")
    args = parser.parse_args()
    shapes = TINY if args.tiny else SHAPES
    heading = peers.begin() + "; bf16, TFLOP/s: median (least-most)"
    report = peers.Report(args, "grouped_matmul", heading, lambda records: lines_of(records, args.ragged_dot))
    for name in args.shapes.split(",") if args.shapes else shapes:
        arrays, shape = None, shapes[name]
        peers.free_memory()
        for load, leg in [(load, leg) for load in args.loads.split(",") for leg in args.legs.split(",")]:
            if report.is_late(f"{name}, {load}, {leg}"):
                continue
            arrays = arrays or Arrays(shape)
            try:
                report.add(measure(name, load, leg, shape, arrays, args.repeats, args.ragged_dot))
            except Exception as error:  # one leg that fails must not end the run
                report.add(
                    {"shape": name, **dataclasses.asdict(shape), "load": load, "leg": leg, "note": first_line(error)}
                )
    report.end()
    return 0 if all(r.get("same_bits") and r["error"] < LIMIT for r in report.records) else 1


if __name__ == "__main__":
    sys.exit(main())
