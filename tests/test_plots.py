"""The pictures of a run are drawn, for one layer or many and one step or many, and show the figures that they should."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_jax import plots
from moe_jax.plots import plot_expert_load, plot_load_over_time, plot_loss


def records(num_steps: int, num_layers: int, num_experts: int, dropped: int = 0) -> list[dict[str, Any]]:
    shape = (num_steps, num_layers, num_experts)
    counts = np.random.default_rng(0).integers(0, 99, shape).tolist()
    return [{"step": n, "ce": 1 / n, "counts": c, "dropped": dropped} for n, c in enumerate(counts, 1)]


def assert_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000


@pytest.fixture
def drawn(monkeypatch: Any) -> list[Any]:
    """The figures that are made, in order."""
    figures: list[Any] = []
    make = plots._figure
    monkeypatch.setattr(plots, "_figure", lambda *size: figures.append(make(*size)) or figures[-1])
    return figures


def lines(figure: Any) -> dict[str, list[float]]:
    """The y values of every line by its label."""
    return {line.get_label(): np.asarray(line.get_ydata()).tolist() for axes in figure.axes for line in axes.lines}


@pytest.mark.parametrize("num_steps", [1, 60])
def test_loss_and_expert_load_are_drawn(tmp_path: Path, num_steps: int) -> None:
    train = records(num_steps, 2, 4)
    plot_loss(train, [{"step": 1, "eval_loss": 3.0}], tmp_path / "loss.png")
    plot_expert_load(train, tmp_path / "load.png", layers=[0, 2])
    for name in ("loss.png", "load.png"):
        assert_picture(tmp_path / name)


def test_heat_map_of_a_large_model_is_drawn(tmp_path: Path) -> None:
    plot_expert_load(records(1, 48, 128), tmp_path / "load.png", layers=range(48))
    assert_picture(tmp_path / "load.png")


@pytest.mark.parametrize("num_steps", [1, 60])
@pytest.mark.parametrize("layers", [[3], range(12), range(1, 97, 2)], ids=lambda layers: len(layers))
def test_load_over_time_draws_every_layer(tmp_path: Path, drawn: list[Any], layers: Any, num_steps: int) -> None:
    plot_load_over_time(records(num_steps, len(layers), 8), tmp_path / "load.png", layers)
    assert_picture(tmp_path / "load.png")
    found = lines(drawn[0])
    assert [label for label in found if label.startswith("layer")] == [f"layer {n}" for n in layers]
    assert found["balanced"] == [1, 1]
    has_color_bar = len(drawn[0].axes) == 3
    assert has_color_bar == (len(layers) == 48)


def test_load_over_time_shows_the_figures_of_each_step(tmp_path: Path, drawn: list[Any]) -> None:
    train = records(2, 2, 4)
    train[0] |= {"counts": [[4, 4, 4, 4], [10, 6, 0, 0]], "dropped": 0}
    train[1] |= {"counts": [[8, 4, 4, 0], [4, 4, 4, 4]], "dropped": 8}
    plot_load_over_time(train, tmp_path / "load.png", [0, 1])
    assert lines(drawn[0]) == {
        "layer 0": [1, 2], "layer 1": [2.5, 1], "balanced": [1, 1], "dead experts, worst layer": [50, 25],
        "dead experts": [25, 12.5], "dropped (token, expert) pairs": [0, 25],
    }  # fmt: skip


def test_load_over_time_of_a_long_run_is_a_running_mean(tmp_path: Path, drawn: list[Any]) -> None:
    train = records(40, 1, 2)
    for record in train:
        record["counts"] = [[3, 1]] if record["step"] % 2 else [[2, 2]]
    plot_load_over_time(train, tmp_path / "load.png", [0])
    figure = drawn[0]
    assert lines(figure)["layer 0"] == [1.25] * 39
    assert figure.axes[0].lines[0].get_xdata()[0] == 2
    assert "mean of 2 steps" in figure.axes[0].get_title()
    assert not any(label.startswith("dropped") for label in lines(figure))
