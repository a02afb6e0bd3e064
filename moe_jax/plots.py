"""PNG pictures of a run: the loss, and how evenly each layer's experts are loaded.

N steps, L MoE layers, E experts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.metrics import Record, relative_load

# The heat map sums the last part of the run, so that single batches don't speckle it.
RECENT_STEPS = 20
ANNOTATED_CELLS = 160  # figures are written into the cells of a map of up to this many
NAMED_LAYERS = 12  # up to this many lines are told apart by a legend, more by a colour bar
MARKED_STEPS = 30  # up to this many points of a line are marked one by one


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
    window = _window(train)
    axes.plot(
        steps, losses, color="tab:blue", alpha=0.35 if window > 1 else 1, linewidth=1, label="training, each step"
    )
    if window > 1:
        axes.plot(steps[window - 1 :], _running_mean(losses, window), color="tab:blue", linewidth=2,
                  label=f"training, mean of {window} steps")  # fmt: skip
    if evaluation:
        axes.plot([record["step"] for record in evaluation], [record["eval_loss"] for record in evaluation],
                  "o-", color="tab:orange", markersize=4, label="held-out rows")  # fmt: skip
    axes.set_title("Next-token loss")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


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


def plot_load_over_time(train: Sequence[Record], path: Path, layers: Sequence[int]) -> None:
    """Draws over the steps how full each layer's fullest expert is, and which part of the experts took no token.

    Running means where the run is long. Dropped (token, expert) pairs are drawn where there are any.
    layers: the model's layer number of every row of counts.
    """
    from matplotlib.ticker import MaxNLocator

    # One step's counts at a time: those of a long run of a large model would be gigabytes.
    load_NL = np.stack([relative_load(np.array(record["counts"])).max(axis=1) for record in train])
    dead_NL = np.stack([np.mean(np.array(record["counts"]) == 0, axis=1) for record in train])
    dropped_N = np.array([record["dropped"] / max(np.sum(record["counts"]), 1) for record in train])
    window = _window(train)
    steps = [record["step"] for record in train][window - 1 :]
    figure = _figure(10.0, 6.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_layers(upper, steps, _running_mean(load_NL, window), layers)
    upper.set_title("Load of each layer's fullest expert" + (f", mean of {window} steps" if window > 1 else ""))
    upper.set_ylabel("tokens / even share")
    _draw_lost(lower, steps, _running_mean(dead_NL, window), _running_mean(dropped_N, window))
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _draw_layers(axes: Any, steps: Sequence[int], load_NL: np.ndarray, layers: Sequence[int]) -> None:
    """One line a layer, coloured by depth, with a legend or a colour bar; a dashed line at 1."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    colors = ListedColormap(colormaps["viridis"](np.linspace(0.0, 0.9, 256)))  # its yellow end is lost on white
    depth = Normalize(min(layers), max(max(layers), min(layers) + 1))
    named = len(layers) <= NAMED_LAYERS
    for layer, load_N in zip(layers, load_NL.T, strict=True):
        axes.plot(steps, load_N, color=colors(depth(layer)), label=f"layer {layer}", linewidth=1.6 if named else 1.0,
                  **_marks(steps))  # fmt: skip
    balanced = axes.axhline(1.0, color="k", linestyle="--", linewidth=1, label="balanced")
    if named:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    else:
        axes.legend(handles=[balanced])
        axes.figure.colorbar(ScalarMappable(depth, colors), ax=axes, label="layer")


def _draw_lost(axes: Any, steps: Sequence[int], dead_NL: np.ndarray, dropped_N: np.ndarray) -> None:
    """Dead experts, of the worst layer and of all, and dropped pairs, in percent."""
    if dead_NL.shape[1] > 1:
        axes.plot(steps, 100 * dead_NL.max(axis=1), color="tab:red", alpha=0.45, label="dead experts, worst layer",
                  **_marks(steps))  # fmt: skip
    axes.plot(steps, 100 * dead_NL.mean(axis=1), color="tab:red", label="dead experts", **_marks(steps))
    if dropped_N.any():
        axes.plot(steps, 100 * dropped_N, color="tab:blue", label="dropped (token, expert) pairs", **_marks(steps))
    axes.set_ylim(0.0, 1.35 * max(5.0, axes.dataLim.y1))  # room for the legend
    axes.set_ylabel("percent")
    axes.legend(loc="upper left", ncols=3)


def _marks(steps: Sequence[int]) -> dict[str, Any]:
    return {"marker": "o" if len(steps) <= MARKED_STEPS else "", "markersize": 4, "clip_on": False}


def _window(train: Sequence[Record]) -> int:
    """Steps that a running mean is over: 1, which is none, for a short run."""
    return max(len(train) // 20, 1)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Means of `window` neighbours along the first dimension, which gets shorter by window - 1."""
    return np.lib.stride_tricks.sliding_window_view(values, window, axis=0).mean(axis=-1)


def _ticks(labels: Sequence[int], most: int) -> tuple[list[int], list[str]]:
    """At most `most` positions and their labels, evenly spaced."""
    step = -(-len(labels) // most)
    positions = list(range(0, len(labels), step))
    return positions, [str(labels[i]) for i in positions]
