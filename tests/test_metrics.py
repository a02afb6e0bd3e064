"""Load figures by hand, the JSONL file across a resume, log lines, and that the pictures are drawn."""

import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.metrics import JsonlWriter, Reporter, StepMetrics, load_figures, read_jsonl, step_record
from moe_jax.plots import plot_expert_load, plot_loss, relative_load


def metrics(loss: float = 2.0) -> StepMetrics:
    scalars = {"ce": 1.5, "aux": 1.0, "z": 4.0, "grad_norm": 0.5, "learning_rate": 1e-3}
    return StepMetrics(
        loss=jnp.float32(loss), **{k: jnp.float32(value) for k, value in scalars.items()}, num_labels=jnp.int32(30),
        counts=jnp.array([[4, 4, 4, 4], [10, 6, 0, 0]]), dropped=jnp.array([0, 3]), entropy=jnp.array([1.0, 0.5]),
    )  # fmt: skip


def record(step: int, loss: float = 2.0) -> dict[str, Any]:
    return step_record(step, metrics(loss), num_tokens=32, seconds=0.5)


def test_load_figures_by_hand() -> None:
    assert load_figures(np.array([[4, 4], [4, 4]])) == {"max_load": 1.0, "dead_experts": 0.0}
    assert load_figures(np.array([[8, 0], [5, 3]])) == {"max_load": 2.0, "dead_experts": 0.25}
    assert load_figures(np.zeros((0, 4))) == {"max_load": 0.0, "dead_experts": 0.0}
    assert load_figures(np.zeros((1, 4))) == {"max_load": 0.0, "dead_experts": 1.0}


def test_record_holds_the_figures_and_is_json() -> None:
    line = json.loads(json.dumps(record(7)))
    assert line["step"] == 7
    assert line["tokens_per_second"] == 64
    assert line["num_labels"] == 30
    assert line["max_load"] == 2.5
    assert line["dead_experts"] == 0.25
    assert line["dropped"] == 3
    assert line["counts"] == [[4, 4, 4, 4], [10, 6, 0, 0]]
    assert line["entropy"] == [1.0, 0.5]


def test_jsonl_drops_later_steps_and_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2, 3):
        writer.write({"step": step, "loss": 0.5})
    writer.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [line["step"] for line in read_jsonl(path)] == [1, 2, 3]
    writer = JsonlWriter(path, last_step=2)
    writer.write({"step": 3, "loss": float("nan")})
    writer.close()
    assert [(line["step"], line["loss"]) for line in read_jsonl(path)] == [(1, 0.5), (2, 0.5), (3, None)]


def test_damage_before_the_last_line_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_jsonl(tmp_path / "m.jsonl")


def test_reporter_writes_files_log_lines_and_tensorboard_events(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "moe_jax"):
        reporter = Reporter(tmp_path, first_step=0, steps=4, log_every=2, tensorboard=True)
        with reporter:
            for step in (1, 2, 3, 4):
                reporter.step(record(step))
            reporter.evaluation({"step": 4, "eval_loss": 1.25, "seconds": 0.1})
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_jsonl(tmp_path / "eval.jsonl")[0]["eval_loss"] == 1.25
    assert [message.split()[1] for message in caplog.messages] == ["2/4", "4/4", "4/4"]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_progress_bar_shows_the_figures(tmp_path: Path, monkeypatch: Any) -> None:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    monkeypatch.setattr("moe_jax.metrics.console", lambda: console)
    with Reporter(tmp_path, first_step=2, steps=4) as reporter:
        reporter.step(record(3, loss=1.2345))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/4" in text
    assert "loss 1.2345" in text


def test_relative_load_is_one_when_balanced() -> None:
    assert relative_load(np.array([[3, 3], [4, 0]])).tolist() == [[1, 1], [2, 0]]


@pytest.mark.parametrize("num_records", [1, 60])
def test_pictures_are_png_files(tmp_path: Path, num_records: int) -> None:
    records = [record(step, 1 / step) for step in range(1, num_records + 1)]
    plot_loss(records, [{"step": 1, "eval_loss": 3.0}], tmp_path / "loss.png")
    plot_expert_load(records, tmp_path / "load.png", layers=[0, 2])
    for name in ("loss.png", "load.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000


def test_heat_map_of_a_large_model_is_drawn(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 99, (48, 128)).tolist()
    plot_expert_load([{"step": 1, "counts": counts}], tmp_path / "load.png", layers=range(48))
    assert (tmp_path / "load.png").stat().st_size > 5000
