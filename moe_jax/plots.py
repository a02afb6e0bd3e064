"""PNG pictures of a run: the loss, and how evenly each layer's experts are loaded. L MoE layers, E experts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.metrics import Record

# The heat map sums the last part of the run, so that single batches don't speckle it.
RECENT_STEPS = 20
ANNOTATED_CELLS = 160  # figures are written into the cells of a map of up to this many


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_loss(train: Sequence[Record], evaluation: Sequence[Record], path: Path) -> None:
    """Draws the cross entropy over the steps: every training step, its running mean, and the held-out rows."""
    figure = _figure(8.0, 4.5)
    axes = figure.subplots()
    steps = [record["step"] for record in train]
    losses = np.array([record["ce"] for record in train], np.float64)
    window = max(len(losses) // 20, 1)
    axes.plot(
        steps, losses, color="tab:blue", alpha=0.35 if window > 1 else 1, linewidth=1, label="training, each step"
    )
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="tab:blue", linewidth=2, label=f"training, mean of {window} steps")
    if evaluation:
        axes.plot([record["step"] for record in evaluation], [record["eval_loss"] for record in evaluation],
                  "o-", color="tab:orange", markersize=4, label="held-out rows")  # fmt: skip
    axes.set_title("Next-token loss")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def relative_load(counts_LE: np.ndarray) -> np.ndarray:
    """Returns each expert's tokens over its layer's mean: 1 is balanced."""
    counts_LE = np.asarray(counts_LE, np.float64)
    return counts_LE / np.maximum(counts_LE.mean(axis=1, keepdims=True), 1e-9)


def plot_expert_load(train: Sequence[Record], path: Path, layers: Sequence[int]) -> None:
    """Draws layers x experts: each expert's share of the tokens of the last steps, relative to an even share.

    layers: the model's layer number of every row of counts.
    """
    from matplotlib.colors import TwoSlopeNorm

    recent = train[-RECENT_STEPS:]
    load_LE = relative_load(np.sum([record["counts"] for record in recent], axis=0))
    num_layers, num_experts = load_LE.shape
    figure = _figure(min(max(5.5, 2.5 + 0.45 * num_experts), 16.0), min(max(3.0, 1.8 + 0.32 * num_layers), 14.0))
    axes = figure.subplots()
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(2.0, float(load_LE.max())))
    image = axes.imshow(load_LE, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set_title(f"Expert load, steps {recent[0]['step']} to {recent[-1]['step']}")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(*_ticks(layers, 24))
    axes.set_xticks(*_ticks(range(num_experts), 32))
    if load_LE.size <= ANNOTATED_CELLS:
        for (row, column), value in np.ndenumerate(load_LE):
            dark = abs(norm(value) - 0.5) > 0.3
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("tokens / even share (1 = balanced)")
    figure.savefig(path, dpi=120)


def _ticks(labels: Sequence[int], most: int) -> tuple[list[int], list[str]]:
    """At most `most` positions and their labels, evenly spaced."""
    step = -(-len(labels) // most)
    positions = list(range(0, len(labels), step))
    return positions, [str(labels[i]) for i in positions]
