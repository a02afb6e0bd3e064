"""Load figures by hand, the JSONL file across a resume, log lines, TensorBoard series, and the watch for collapse."""

import dataclasses
import json
import logging
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_hf import TINY

from moe_jax import train as train_module
from moe_jax.config import LayerConfig, ModelConfig
from moe_jax.errors import ConfigError
from moe_jax.hf import model_config_of
from moe_jax.metrics import (
    HEADLINES,
    LAYER_SERIES,
    CollapseWatch,
    JsonlWriter,
    Reporter,
    StepMetrics,
    load_figures,
    read_jsonl,
    relative_load,
    step_record,
)
from moe_jax.run_config import ModelSettings, RunConfig, TrainSettings

LAYER_LISTS = ("counts", "entropy", "layer_max_load", "layer_dead", "layer_dropped", "layer_aux", "layer_z",
               "mean_logit", "max_logit", "plan_iterations", "further_rounds", "further_blocks",
               "bias_min", "bias_max")  # fmt: skip


def metrics(loss: float = 2.0, **changes: Any) -> StepMetrics:
    scalars = {"ce": 1.5, "aux": 1.0, "z": 4.0, "grad_norm": 0.5, "learning_rate": 1e-3}
    layers: dict[str, Any] = {
        "counts": [[4, 4, 4, 4], [10, 6, 0, 0]], "dropped": [0, 3], "entropy": [1.0, 0.5], "layer_aux": [1.0, 1.75],
        "layer_z": [0.25, 1.0 / 3], "mean_logit": [0.5, -0.5], "max_logit": [3.0, 2.5],
        "plan_iterations": [7, 0], "further_rounds": [0, 2], "further_blocks": [1, 0],
        "bias_min": [-0.5, 0.0], "bias_max": [0.25, 0.0],
    }  # fmt: skip
    return StepMetrics(
        loss=jnp.float32(loss), **{k: jnp.float32(value) for k, value in scalars.items()}, num_labels=jnp.int32(30),
        **{name: jnp.array(value) for name, value in (layers | changes).items()},
    )  # fmt: skip


def record(step: int, loss: float = 2.0, **changes: Any) -> dict[str, Any]:
    return step_record(step, metrics(loss, **changes), num_tokens=32, seconds=0.5)


def without_layers() -> dict[str, Any]:
    """The fields as a model without MoE layers gives them."""
    floats = ("entropy", "layer_aux", "layer_z", "mean_logit", "max_logit", "bias_min", "bias_max")
    return {
        "counts": jnp.zeros((0, 4), jnp.int32), **{name: jnp.zeros(0) for name in floats},
        **{name: jnp.zeros(0, jnp.int32) for name in ("dropped", "plan_iterations", "further_rounds", "further_blocks")},
    }  # fmt: skip


def series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) pairs of every tag in the folder's event files, which are records between lengths and sums."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in folder.glob("events*"):
        content, start = path.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            event = Event.FromString(content[start + 12 : start + 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            start += length + 16
    return found


def test_load_figures_by_hand() -> None:
    assert load_figures(np.array([[4, 4], [4, 4]])) == {"max_load": 1.0, "dead_experts": 0.0}
    assert load_figures(np.array([[8, 0], [5, 3]])) == {"max_load": 2.0, "dead_experts": 0.25}
    assert load_figures(np.zeros((0, 4))) == {"max_load": 0.0, "dead_experts": 0.0}
    assert load_figures(np.zeros((1, 4))) == {"max_load": 0.0, "dead_experts": 1.0}


def test_relative_load_is_one_when_balanced() -> None:
    assert relative_load(np.array([[3, 3], [4, 0]])).tolist() == [[1, 1], [2, 0]]


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


def test_record_tells_every_layer_apart() -> None:
    line = json.loads(json.dumps(record(7)))
    assert line["layer_max_load"] == [1.0, 2.5]
    assert line["layer_dead"] == [0.0, 0.5]
    assert line["layer_dropped"] == [0, 3]
    assert line["layer_aux"] == [1.0, 1.75]
    assert line["layer_z"] == [0.25, 0.333333]  # six digits
    assert line["mean_logit"] == [0.5, -0.5]
    assert line["max_logit"] == [3.0, 2.5]
    assert line["plan_iterations"] == [7, 0]
    assert line["further_rounds"] == [0, 2]
    assert line["bias_min"] == [-0.5, 0.0]
    assert line["bias_max"] == [0.25, 0.0]
    assert (line["mean_entropy"], line["max_router_logit"], line["max_abs_bias"]) == (0.75, 3.0, 0.5)
    assert record(7, max_logit=[-2.0, -1.0])["max_router_logit"] == -1.0


def test_model_without_moe_layers_has_empty_lists_and_zeros(tmp_path: Path) -> None:
    dense = record(1, **without_layers())
    assert {name: dense[name] for name in LAYER_LISTS} == {name: [] for name in LAYER_LISTS}
    figures = ("max_load", "dead_experts", "dropped", "mean_entropy", "max_router_logit", "max_abs_bias")
    assert {name: dense[name] for name in figures} == dict.fromkeys(figures, 0)
    with Reporter(tmp_path, first_step=0, steps=1, log_every=1, tensorboard=True) as reporter:
        reporter.step(dense)
    assert not any("layer_" in tag for tag in series(tmp_path / "tensorboard"))
    assert CollapseWatch(2.0, 1, []).check(dense) == []


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


def test_figure_that_is_not_finite_becomes_null_inside_a_list_too(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(record(1, loss=math.inf, layer_z=[math.nan, 4.0], max_logit=[math.nan, math.inf]))
    writer.close()
    (line,) = read_jsonl(tmp_path / "m.jsonl")
    assert (line["loss"], line["layer_z"], line["max_logit"]) == (None, [None, 4.0], [None, None])
    assert line["max_router_logit"] is None
    assert line["counts"] == [[4, 4, 4, 4], [10, 6, 0, 0]]


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
    assert series(tmp_path / "tensorboard")["train/loss"] == [(step, 2.0) for step in (1, 2, 3, 4)]
    assert series(tmp_path / "tensorboard")["eval/eval_loss"] == [(4, 1.25)]


@pytest.mark.parametrize(("layers", "second"), [([1, 12], "layer_12"), (None, "layer_01")])
def test_tensorboard_has_a_series_for_every_layer(tmp_path: Path, layers: list[int] | None, second: str) -> None:
    with Reporter(tmp_path, first_step=0, steps=2, tensorboard=True, layers=layers) as reporter:
        reporter.step(record(1))
        reporter.step(record(2, counts=[[4, 4, 4, 4], [16, 0, 0, 0]]))
    found = series(tmp_path / "tensorboard")
    expected = {"max_load": 4.0, "dead": 0.75, "dropped": 3, "entropy": 0.5, "aux": 1.75, "z": 0.333333,
                "mean_logit": -0.5, "max_logit": 2.5, "bias_min": 0.0, "bias_max": 0.0, "plan_iterations": 0,
                    "further_rounds": 2, "further_blocks": 0}  # fmt: skip
    assert set(expected) == set(LAYER_SERIES)
    for name, value in expected.items():
        assert found[f"train/{second}/{name}"][1] == pytest.approx((2, value)), name
    assert found[f"train/{second}/max_load"][0] == (1, 2.5)
    assert len(found[f"train/{second}/counts"]) == 2  # a histogram
    assert sum("/layer_" in tag for tag in found) == 2 * (len(expected) + 1)
    assert {f"train/{name}" for name in (*HEADLINES, "max_router_logit", "max_abs_bias")} <= set(found)


def test_log_line_is_one_short_line_that_mentions_drops_only_where_there_are_any(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "moe_jax"), Reporter(tmp_path, first_step=0, steps=2, log_every=1) as reporter:
        reporter.step(record(1))
        reporter.step(record(2, dropped=[0, 0]))
    first, second = caplog.messages
    assert first == (
        "step 1/2  loss 2.0000  grad_norm 0.500  lr 1.00e-03  tokens/s 64  max_load 2.50  dead 25.0%  entropy 0.750  dropped 3"
    )
    assert second.endswith("dead 25.0%  entropy 0.750")


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


# ---- the watch for collapse ----

COLLAPSED, EVEN = [[4, 4, 4, 4], [1, 0, 14, 1]], [[4, 4, 4, 4], [5, 4, 4, 3]]


def model(**changes: Any) -> ModelConfig:
    """4 experts, 2 per token, unless changed: the largest load is 2."""
    return dataclasses.replace(model_config_of(TINY), **changes)


def spoken(watch: CollapseWatch, counts: list[Any]) -> dict[int, list[str]]:
    """What the watch says at which step, for one record a step."""
    said = {step: watch.check(record(step, counts=c)) for step, c in enumerate(counts, 1)}
    return {step: sentences for step, sentences in said.items() if sentences}


def test_watch_names_layer_expert_load_and_steps_once() -> None:
    said = spoken(CollapseWatch(3.0, 3, [0, 5]), [EVEN, *[COLLAPSED] * 6])
    assert list(said) == [4]
    assert said[4] == [
        "layer 5 collapses: expert 2 took 3.50 times an even share of the tokens at step 4, and the layer's fullest expert "
        "more than 3 times in every step from 2 to 4"
    ]


def test_watch_speaks_again_only_after_a_recovery() -> None:
    counts = [COLLAPSED, COLLAPSED, EVEN, *[COLLAPSED] * 4, EVEN, *[COLLAPSED] * 3]
    assert list(spoken(CollapseWatch(3.0, 3, [0, 5]), counts)) == [6, 11]


def test_watch_counts_every_layer_apart() -> None:
    other = [COLLAPSED[1], COLLAPSED[0]]
    assert list(spoken(CollapseWatch(3.0, 2, [0, 1]), [COLLAPSED, other, COLLAPSED, other])) == []
    both = [COLLAPSED[1], COLLAPSED[1]]
    (sentences,) = spoken(CollapseWatch(3.0, 2, [0, 1]), [both, both]).values()
    assert [sentence.split()[:2] for sentence in sentences] == [["layer", "0"], ["layer", "1"]]


def test_load_at_the_threshold_is_no_collapse_and_threshold_0_is_no_watch() -> None:
    assert spoken(CollapseWatch(3.5, 1, [0, 1]), [COLLAPSED]) == {}
    assert spoken(CollapseWatch(0.0, 1, [0, 1]), [COLLAPSED]) == {}


@pytest.mark.parametrize(("experts", "top_k", "threshold"), [(8, 2, 2.0), (128, 8, 8.0), (5, 2, 2.0), (4, 2, 0.0)])
def test_default_threshold_is_half_the_largest_load(experts: int, top_k: int, threshold: float) -> None:
    config = model(num_experts=experts, num_experts_per_tok=top_k)
    assert TrainSettings().collapse_threshold(config) == threshold


def test_threshold_is_taken_as_given_where_a_load_can_pass_it() -> None:
    assert TrainSettings(collapse_load=1.9).collapse_threshold(model()) == 1.9
    assert TrainSettings(collapse_load=0).collapse_threshold(model()) == 0
    dense = model(num_experts=8, layers=(LayerConfig(is_moe=False),))
    assert TrainSettings(collapse_load=0).collapse_threshold(dense) == 0
    assert TrainSettings().collapse_threshold(dense) == 0
    with pytest.raises(ConfigError, match=r"train.collapse_load is 1.9, but must be 0 or null: .* no MoE layer"):
        TrainSettings(collapse_load=1.9).collapse_threshold(dense)


@pytest.mark.parametrize(("values", "message"), [
    ({"collapse_load": 1.0}, "train.collapse_load is 1.0, but must be a number above 1, 0"),
    ({"collapse_load": 0.5}, "train.collapse_load is 0.5"),
    ({"collapse_load": -1.0}, "train.collapse_load is -1.0"),
    ({"collapse_load": math.nan}, "train.collapse_load is nan"),
    ({"collapse_load": "4"}, "train.collapse_load is '4'"),
    ({"collapse_steps": 0}, "train.collapse_steps is 0, but must be an integer >= 1"),
    ({"collapse_steps": 1.5}, "train.collapse_steps is 1.5"),
])  # fmt: skip
def test_settings_of_the_watch_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**values)


def run_config(tmp_path: Path, **values: Any) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    settings = TrainSettings(device="cpu", **values)
    return RunConfig(model=ModelSettings(path=str(tmp_path)), output=str(tmp_path / "out"), train=settings)


def test_run_refuses_a_threshold_out_of_reach_before_it_reads_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collapse_load is 2.0, .*below num_experts / num_experts_per_tok = 2,"):
        train_module.train(run_config(tmp_path, collapse_load=2.0))  # there are no weights


def started_run(config: RunConfig, model_config: ModelConfig) -> Any:
    """A run up to its first step, without a model."""
    state: Any = SimpleNamespace(step=0, model=SimpleNamespace(config=model_config))
    rows: Any = np.zeros((8, 4), np.int32)
    return train_module._Run(config, state, optax.identity(), rows, rows, lambda _: False, False)


def test_run_warns_of_a_collapse_under_the_models_layer_number(tmp_path: Path, caplog: Any) -> None:
    layers = (LayerConfig(is_moe=False), LayerConfig(), LayerConfig())
    run = started_run(run_config(tmp_path, collapse_load=1.5, collapse_steps=2), model(layers=layers))
    run.reporter = SimpleNamespace(step=lambda record: None)
    for step in (1, 2, 3):
        run.pending = step, metrics(counts=COLLAPSED), 32
        run._read_pending()
    assert [(entry.levelname, entry.message.split(":")[0]) for entry in caplog.records] == [
        ("WARNING", "layer 2 collapses")
    ]


def test_run_says_once_that_it_cannot_watch(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "moe_jax"):
        started_run(run_config(tmp_path), model())
        assert len(caplog.messages) == 1
        assert "no layer is watched for collapse: with 2 of 4 experts per token" in caplog.text
        started_run(run_config(tmp_path, collapse_load=0), model())
        started_run(run_config(tmp_path), model(num_experts=8))
    assert len(caplog.messages) == 1
