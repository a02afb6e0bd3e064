"""What the comparisons with torch on one GPU share: the same arrays on both sides, interleaved timing, a run's header and files.

JAX and torch hold their memory side by side in one process, so nothing is preallocated; import this before jax.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import torch

PACKAGES = ("jax", "jaxlib", "torch", "transformers", "triton")
GIB = 2**30


def device() -> str:
    """Where torch computes: on the GPU if JAX does."""
    return "cpu" if jax.default_backend() == "cpu" else "cuda"


def begin() -> str:
    """Sees that both sides compute on one device, and returns the header: date, hardware, versions and command."""

    def version(name: str) -> str:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            return f"no {name}"

    if (device() == "cuda") != torch.cuda.is_available():
        raise SystemExit(f"JAX computes on {jax.default_backend()!r}, but torch.cuda is {torch.cuda.is_available()}")
    if device() == "cpu":
        torch.set_num_threads(1)  # waiting threads of one side would slow the other
    name = torch.cuda.get_device_name() if device() == "cuda" else "CPU (a test of this script, no measurement)"
    versions = ", ".join(version(name) for name in PACKAGES)
    return f"{time.strftime('%Y-%m-%d')}, {name}, {versions}; python {' '.join(sys.argv)}"


def as_torch(array: jax.Array) -> torch.Tensor:
    """The same memory as a torch tensor, to be read only."""
    return torch.from_dlpack(jax.block_until_ready(array))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160].replace("|", "/")


# ---- timing ----


@dataclasses.dataclass
class Seconds:
    """Seconds of one call: the median of the repeats, the least and the most."""

    median: float
    least: float
    most: float

    def rates(self, flops: float) -> dict[str, float]:
        """TFLOP/s, most and least."""
        return {
            "median": flops / self.median / 1e12,
            "least": flops / self.most / 1e12,
            "most": flops / self.least / 1e12,
        }


def jax_seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds a call: all are queued, then the last is waited for, so that starting one hides behind another."""
    started = time.perf_counter()
    for _ in range(count - 1):
        call()  # its result is dropped at once: the memory is that of one call
    jax.block_until_ready(call())
    return (time.perf_counter() - started) / count


def torch_seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds a call, by the device's own events."""
    if device() == "cpu":
        started = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - started) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def interleaved(
    calls: dict[str, tuple[Callable[..., float], Callable[[], Any]]], repeats: int, seconds: float
) -> dict[str, Seconds]:
    """Name -> time of a call; calls: name -> (`jax_seconds` or `torch_seconds`, call), each called before (and compiled).

    A repeat measures every side in turn, each for about `seconds`, so that clock and temperature are the same for all.
    """
    counts = {name: min(max(round(seconds / clock(call, 2)), 2), 200) for name, (clock, call) in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, (clock, call) in calls.items():
            found[name].append(clock(call, counts[name]))
    return {name: Seconds(statistics.median(times), min(times), max(times)) for name, times in found.items()}


# ---- output ----


def rate(rates: dict[str, float] | None) -> str:
    """A cell: the median (least to most) TFLOP/s."""
    if not rates:
        return "-"
    digits = 0 if rates["median"] >= 10 else 3
    return f"{rates['median']:.{digits}f} ({rates['least']:.{digits}f}-{rates['most']:.{digits}f})"


def argument_parser(
    doc: str | None, name: str, loads: tuple[str, ...], limit_seconds: float
) -> argparse.ArgumentParser:
    """What every comparison takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"folder for {name}.json and {name}.md")
    parser.add_argument("--loads", default=",".join(loads))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-seconds", type=float, default=limit_seconds, help="nothing is started after that")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test of this script on a CPU")
    return parser


class Report:
    """The rows so far: printed and written one by one, so that a run that is stopped leaves what it has."""

    def __init__(
        self, args: argparse.Namespace, name: str, heading: str, lines_of: Callable[[list[Any]], list[str]]
    ) -> None:
        self.args, self.name, self.heading, self.lines_of = args, name, heading, lines_of
        self.records: list[dict[str, Any]] = []
        self.started = time.perf_counter()
        print(heading, *lines_of([]), sep="\n", flush=True)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        print(self.lines_of([record])[-1], flush=True)
        out, text = self.args.out, json.dumps({"header": self.heading, "records": self.records}, indent=1)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{self.name}.json").write_text(text + "\n")
            (out / f"{self.name}.md").write_text("\n".join([self.heading, "", *self.lines_of(self.records)]) + "\n")

    def is_late(self, what: str) -> bool:
        """Whether the time is over; says then that `what` is left out."""
        late = time.perf_counter() - self.started > self.args.limit_seconds
        if late:
            print(f"limit reached: {what} not started", flush=True)
        return late

    def end(self) -> None:
        print(f"{time.perf_counter() - self.started:.0f} s", flush=True)


def free_memory() -> None:
    """Drops what the case before left with torch: its compiled programs and its cached memory."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


# ---- a routed block in float64 ----


def block_errors(
    weights: dict[str, torch.Tensor], x: torch.Tensor, dy: torch.Tensor, ids_TK: torch.Tensor,
    found: dict[str, torch.Tensor], *, norm_topk_prob: bool,
) -> dict[str, float]:  # fmt: skip
    """Relative norm of each result of a routed block, forward and backward, against float64 of the same values.

    weights: "router" [H, E], "gate_up" [E, H, 2 I] and "down" [E, I, H]. x, dy: [..., H]. ids_TK: the choice of experts, given.
    found: "y" and "dx" [..., H], and "d_" + name in the shapes of the weights. An expert at a time, so that float64 has room.
    """
    x, dy, router = x.flatten(0, -2).double(), dy.flatten(0, -2).double(), weights["router"].double()
    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    logits = (x @ router).requires_grad_()
    scores = torch.softmax(logits, 1).gather(1, ids_TK)
    scores = scores / scores.sum(1, keepdim=True) if norm_topk_prob else scores
    d_scores = torch.zeros_like(scores)
    sums = {name: [0.0, 0.0] for name in found}

    def compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        sums[name][0] += float(torch.sum((actual.double() - expected) ** 2))
        sums[name][1] += float(torch.sum(expected**2))

    for e in range(router.shape[1]):
        tokens, slots = torch.where(ids_TK == e)
        leaves = x[tokens], weights["gate_up"][e].double(), weights["down"][e].double(), scores.detach()[tokens, slots]
        rows, gate_up, down, weight = (a.requires_grad_() for a in leaves)
        gate, up = (rows @ gate_up).chunk(2, 1)
        out = (torch.nn.functional.silu(gate) * up) @ down * weight[:, None]
        d_rows, d_gate_up, d_down, d_weight = torch.autograd.grad(out, (rows, gate_up, down, weight), dy[tokens])
        y.index_add_(0, tokens, out.detach())
        dx.index_add_(0, tokens, d_rows)
        d_scores[tokens, slots] = d_weight
        compare("d_gate_up", found["d_gate_up"][e], d_gate_up)
        compare("d_down", found["d_down"][e], d_down)
    (d_logits,) = torch.autograd.grad(scores, logits, d_scores)
    compare("d_router", found["d_router"], x.T @ d_logits)
    compare("dx", found["dx"].flatten(0, -2), dx + d_logits @ router.T)
    compare("y", found["y"].flatten(0, -2), y)
    return {name: (wrong / size) ** 0.5 for name, (wrong, size) in sums.items()}
