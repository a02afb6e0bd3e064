"""Whole runs of tiny models: resume bit for bit, signals, divergence, accumulation, refusals."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy_hf import TINY

import moe_jax
from moe_jax import hf
from moe_jax import train as train_module
from moe_jax.checkpoint import TrainState, complete_steps, load_model, named_arrays, replicated
from moe_jax.config import MoEConfig, ParallelConfig
from moe_jax.errors import ConfigError
from moe_jax.metrics import Reporter, read_jsonl
from moe_jax.optim import make_optimizer, make_schedule
from moe_jax.run_config import DataConfig, ModelSettings, OptimizerConfig, RunConfig, TrainSettings
from moe_jax.train import TrainingDiverged, train
from moe_jax.train_step import accumulated_gradients, evaluate, make_train_step, put_batch

CARRIED = {"tokenizer.json": b"{ }", "chat_template.jinja": b"{{ x }}", "generation_config.json": b'{"top_k":  3}'}
STEPS, SEQ_LEN = 6, 16
ACCUMULATION_TOLERANCE = 2e-6  # float32, another order of the same sums
MESH_TOLERANCE = 1e-4  # C73


@pytest.fixture(scope="module", autouse=True)
def _compilation_cache(tmp_path_factory: Any) -> Iterator[None]:
    """Runs with equal programs compile once a file; every run still makes, and counts, its own jitted step."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
                "jax_persistent_cache_min_compile_time_secs": 0.2}  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "config.json").write_text(json.dumps(TINY))
    words = np.random.default_rng(0).choice(["expert ", "router ", "token ", "gate ", "the ", "a\n"], 600)
    (folder / "text.txt").write_text("".join(words))
    for name, content in CARRIED.items():
        (folder / name).write_bytes(content)
    return folder


def make_config(inputs: Path, folder: Path) -> RunConfig:
    return RunConfig(
        model=ModelSettings(path=str(inputs), init="random"),
        output=str(folder / "out"),
        parallel=ParallelConfig(expert_parallel_degree=2),
        data=DataConfig(files=(str(inputs / "text.txt"),)),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=1),
        train=TrainSettings(steps=STEPS, global_batch_size=8, seq_len=SEQ_LEN, dtype="float32", checkpoint_every=4,
                            eval_every=3, eval_batches=1, log_every=0),
        export=False,
    )  # fmt: skip


@pytest.fixture
def config(inputs: Path, tmp_path: Path) -> RunConfig:
    return make_config(inputs, tmp_path)


def changed(config: RunConfig, section: str = "", **values: Any) -> RunConfig:
    if not section:
        return dataclasses.replace(config, **values)
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def signal_at(monkeypatch: Any, step: int, times: int = 1) -> None:
    """SIGTERM to this process as soon as that step's metrics are reported."""
    report = Reporter.step

    def patched(self: Reporter, record: dict[str, Any]) -> None:
        report(self, record)
        if record["step"] == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Reporter, "step", patched)


def without_speed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("tokens_per_second", "seconds")} for record in records]


def assert_bitwise_equal(a: Any, b: Any) -> None:
    a, b = named_arrays(a), named_arrays(b)
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: Any) -> Any:
    """One uninterrupted run with an export."""
    return train(changed(make_config(inputs, tmp_path_factory.mktemp("whole")), export=True))


def test_run_learns_and_leaves_everything_behind(whole: Any) -> None:  # C77
    records = read_jsonl(whole.output / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"]
    assert whole.loss == records[-1]["loss"]
    assert abs(records[0]["ce"] - math.log(257)) < 0.2
    assert all(np.sum(record["counts"]) == 2 * 2 * 8 * SEQ_LEN for record in records[:1])
    assert [record["step"] for record in read_jsonl(whole.output / "eval.jsonl")] == [3, 6]
    assert whole.eval_loss == read_jsonl(whole.output / "eval.jsonl")[-1]["eval_loss"] < records[0]["ce"]
    assert complete_steps(whole.output / "checkpoints") == [4, 6]
    for name in ("loss.png", "expert_load.png", "hf/config.json", "hf/model.safetensors"):
        assert (whole.output / name).is_file(), name
    assert (whole.steps, whole.num_compilations, whole.preempted) == (STEPS, 1, False)


def test_export_and_checkpoint_hold_the_trained_model(whole: Any) -> None:
    moe_jax.init({"expert_parallel_degree": 2})
    exported = moe_jax.transform(whole.output / "hf", dtype="float32")
    assert_bitwise_equal(exported, whole.state.model)
    assert_bitwise_equal(load_model(whole.output / "checkpoints"), whole.state.model)


def test_export_of_a_new_model_carries_the_files_of_its_folder(whole: Any) -> None:
    assert {name: (whole.output / "hf" / name).read_bytes() for name in CARRIED} == CARRIED


def test_bf16_run_keeps_float32_masters(config: RunConfig) -> None:
    result = train(changed(config, "train", dtype="bfloat16", steps=3, eval_every=0, checkpoint_every=0))
    records = read_jsonl(result.output / "metrics.jsonl")
    assert result.state.model.dtype == jax.numpy.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(result.state.model)} == {np.dtype(np.float32)}
    assert records[2]["loss"] < records[0]["loss"]


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole: Any, config: RunConfig, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 1, times=2)
        first = train(config)
    assert first.preempted
    assert first.steps == 2
    assert complete_steps(first.output / "checkpoints") == [2]
    second = train(changed(config, "train", resume=True))
    assert (second.steps, second.num_compilations, second.preempted) == (STEPS, 1, False)
    assert_bitwise_equal(second.state, whole.state)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert without_speed(read_jsonl(second.output / name)) == without_speed(read_jsonl(whole.output / name)), name


@pytest.mark.parametrize(
    "moe",
    [
        {"moe_load_balancing": "balanced", "moe_input_jitter_eps": 0.1, "global_token_shuffle": True},
        {"moe_load_balancing": "expert_bias", "moe_expert_capacity_factor": 1.0, "expert_bias_update_rate": 0.05},
    ],
    ids=["noise and shuffle", "bias and capacity"],
)
def test_resumed_run_continues_noise_and_biases(config: RunConfig, tmp_path: Path, monkeypatch: Any, moe: Any) -> None:
    """C81: the random streams and the biases of 2 + 2 steps are those of 4, in every record and bit of the state."""
    config = changed(changed(config, "train", steps=4, global_batch_size=16, accumulation_steps=2, eval_every=0,
                             checkpoint_every=0), "moe", **moe)  # fmt: skip
    whole = train(changed(config, output=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        signal_at(patch, 1)
        assert train(config).steps == 2
    resumed = train(changed(config, "train", resume=True))
    assert_bitwise_equal(resumed.state, whole.state)
    records = read_jsonl(whole.output / "metrics.jsonl")
    assert without_speed(read_jsonl(resumed.output / "metrics.jsonl")) == without_speed(records)
    if moe["moe_load_balancing"] == "expert_bias":
        assert records[0]["max_abs_bias"] == pytest.approx(0.05)
        assert all(record["dropped"] > 0 for record in records)
    else:
        assert records[0]["max_load"] < 1.01
        assert all(min(record["plan_iterations"]) > 0 for record in records)


def test_finished_run_resumes_to_nothing_and_exports_again(whole: Any, inputs: Path) -> None:
    (whole.output / "hf" / "model.safetensors").unlink()
    config = changed(make_config(inputs, whole.output.parent), export=True)
    again = train(changed(config, "train", resume=True))
    assert (again.steps, again.num_compilations) == (STEPS, 0)
    assert (whole.output / "hf" / "model.safetensors").is_file()
    assert_bitwise_equal(again.state, whole.state)


def test_resume_refuses_another_model_and_logs_other_settings(
    config: RunConfig, monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:  # C83
    with monkeypatch.context() as patch:
        signal_at(patch, 1)
        train(config)
    resumed = changed(config, "train", resume=True)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_local_experts": 8}))
    with pytest.raises(ConfigError, match="num_experts is 4 there and 8 in this run"):
        train(changed(resumed, "model", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"train.steps is 1, but the checkpoint .* already of step 2"):
        train(changed(resumed, "train", steps=1))
    with caplog.at_level(logging.WARNING, "moe_jax"):
        result = train(changed(changed(resumed, "data", shuffle_seed=7), "model", path="/gone"))
    assert result.steps == STEPS
    settings = [message.split(": ")[1] for message in caplog.messages if "changed setting" in message]
    assert settings == [
        "data.shuffle_seed was 0 and is now 7",
        f"model.path was {config.model.path!r} and is now '/gone'",
    ]
    assert any("'/gone' is not there any more" in message for message in caplog.messages)


def test_output_with_other_files_is_refused_unless_resuming(config: RunConfig, monkeypatch: Any, caplog: Any) -> None:
    config.folder.mkdir()
    (config.folder / "note.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty; set train\.resume"):
        train(config)
    signal_at(monkeypatch, 1)
    with caplog.at_level(logging.INFO, "moe_jax"):
        result = train(changed(config, "train", resume=True))
    assert result.steps == 2
    assert any("no complete checkpoint" in message for message in caplog.messages)
    assert (config.folder / "note.txt").read_text() == "mine"


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
def test_figure_that_is_not_finite_stops_with_the_step_and_no_checkpoint(
    config: RunConfig, monkeypatch: Any, figure: str
) -> None:
    real = train_module.step_record
    monkeypatch.setattr(
        train_module,
        "step_record",
        lambda step, *a, **k: real(step, *a, **k) | ({figure: math.nan} if step == 4 else {}),
    )
    with pytest.raises(TrainingDiverged, match=f"{figure} is nan at step 4"):  # where a checkpoint is due
        train(config)
    assert complete_steps(config.folder / "checkpoints") == []
    assert read_jsonl(config.folder / "metrics.jsonl")[-1][figure] is None


def test_evaluation_ends_early_on_a_signal() -> None:  # C82
    assert evaluate(None, [{}, {}], stop=lambda: True) is None


def test_every_mesh_gives_the_same_losses(whole: Any, config: RunConfig) -> None:  # C73
    other = train(changed(changed(config, parallel=ParallelConfig(hybrid_shard_degree=4)), "train", eval_every=0))
    for a, b in zip(
        read_jsonl(whole.output / "metrics.jsonl"), read_jsonl(other.output / "metrics.jsonl"), strict=True
    ):
        np.testing.assert_allclose(a["loss"], b["loss"], atol=MESH_TOLERANCE)


# ---- accumulation ----


@pytest.fixture(scope="module")
def plain() -> Any:
    moe_jax.init({"expert_parallel_degree": 2})
    return moe_jax.transform(TINY, MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0), remat="none")


@pytest.fixture
def model(plain: Any) -> Any:
    """A model whose loss is the cross entropy alone."""
    moe_jax.init({"expert_parallel_degree": 2})
    return plain


def rows(num_rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 257, (num_rows, SEQ_LEN)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[:8, 5:] = 0  # the first micro-batch has far fewer labels
    return {"tokens": tokens, "segment_ids": segments}


def gradients(model: Any, batch: Any, steps: int) -> Any:
    return jax.jit(accumulated_gradients)(model, put_batch(batch, steps))


def test_accumulation_gives_the_gradient_of_the_large_batch(model: Any) -> None:
    batch = rows(16)
    (loss, parts, one), (loss_2, parts_2, two) = gradients(model, batch, 1), gradients(model, batch, 2)
    np.testing.assert_allclose(loss, loss_2, rtol=ACCUMULATION_TOLERANCE)
    assert int(parts.count) == int(parts_2.count) == 8 * 4 + 8 * (SEQ_LEN - 1)
    np.testing.assert_array_equal(parts.router.counts, parts_2.router.counts)
    for (name, a), b in zip(named_arrays(one).items(), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=ACCUMULATION_TOLERANCE, err_msg=name)
        assert a.sharding == b.sharding


def test_micro_batch_without_labels_leaves_the_others_gradient_alone(model: Any) -> None:  # C86
    batch = rows(16)
    batch["segment_ids"][:8] = 0
    twice = {name: np.concatenate([array[8:], array[8:]]) for name, array in batch.items()}
    (loss, _, grads), (loss_2, _, grads_2) = gradients(model, batch, 2), gradients(model, twice, 2)
    np.testing.assert_allclose(loss, loss_2, rtol=ACCUMULATION_TOLERANCE)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_2), strict=True):
        np.testing.assert_allclose(a, b, atol=ACCUMULATION_TOLERANCE)


@pytest.mark.parametrize("steps", [1, 2])
def test_batch_without_any_label_has_zero_gradient_and_finite_figures(model: Any, steps: int) -> None:  # C86
    batch = rows(16)
    batch["segment_ids"][:] = 0
    loss, parts, grads = gradients(model, batch, steps)
    assert float(loss) == 0
    assert int(parts.count) == 0
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(grads))


def test_step_donates_its_state_and_compiles_once(config: RunConfig) -> None:
    moe_jax.init(config.parallel)
    optimizer, schedule = make_optimizer(config.optimizer, STEPS), make_schedule(config.optimizer, STEPS)
    step = make_train_step(optimizer, schedule)
    model = moe_jax.transform(TINY, config.moe)
    state = TrainState(model, jax.jit(optimizer.init)(model), replicated(np.int32(0)))
    batch = put_batch(rows(8), 1)
    for _ in range(3):
        before, (state, metrics) = state, step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert int(state.step) == 3
    assert train_module.num_compilations(step) == 1
    np.testing.assert_allclose(metrics.learning_rate, schedule(2), rtol=1e-6)


# ---- refusals ----


@pytest.mark.parametrize(("section", "values", "message"), [
    ("train", {"global_batch_size": 12}, r"global_batch_size is 12.*devices x accumulation_steps = 8 x 1 = 8"),
    ("train", {"global_batch_size": 8, "accumulation_steps": 2}, r"global_batch_size is 8.*8 x 2 = 16"),
    ("train", {"device": "gpu"}, r"train.device is 'gpu', but JAX found only 'cpu'"),  # C98
    ("parallel", {"expert_parallel_degree": 3}, "expert_parallel_degree is 3"),
    ("parallel", {"expert_parallel_degree": 8}, "divide the model's 4 experts"),
    ("model", {"path": "/nowhere"}, "model.path.*/nowhere"),
    ("model", {"init": "weights"}, "safetensors|weights"),
    ("data", {"eos_id": 300}, "300.*vocab_size is 257"),
])  # fmt: skip
def test_impossible_settings_are_refused_by_name(config: RunConfig, section: str, values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(changed(config, section, **values))


@contextlib.contextmanager
def platforms(value: str) -> Iterator[None]:
    """JAX's list of platforms as if it had been started with another; its devices are found already."""
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", value)
    yield
    jax.config.update("jax_platforms", before)


def test_the_cpu_is_taken_only_where_it_was_asked_for(config: RunConfig, monkeypatch: Any, caplog: Any) -> None:  # C98
    monkeypatch.delenv("XLA_FLAGS")
    with monkeypatch.context() as patch, platforms(""):
        with pytest.raises(ConfigError, match=r"device is 'auto', but JAX found only CPU devices; .*--devices N"):
            train(config)
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        train_module._check_devices(config)
    with caplog.at_level(logging.INFO, "moe_jax"):
        train_module._check_devices(config)  # JAX_PLATFORMS=cpu
    assert "expected a multiple of" in caplog.text
    assert "= 2 x 1, found 8 of kind cpu in 1 process(es), 8 of them in this one" in caplog.text


@pytest.mark.parametrize(("section", "values", "message"), [
    ("train", {"accumulation_steps": 3}, "multiple of train.accumulation_steps"),
    ("optimizer", {"warmup_steps": 99}, "warmup_steps is 99"),
    ("data", {"eval_fraction": 0.0}, "eval_fraction"),
])  # fmt: skip
def test_settings_that_exclude_each_other_are_refused(
    config: RunConfig, section: str, values: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(config, section, **values)


def test_router_without_gradient_and_idle_coefficient_are_said_once(
    config: RunConfig, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_experts_per_tok": 1}))  # C06
    monkeypatch.setattr(train_module._Run, "run", lambda self: None)
    hf._warn_once.cache_clear()
    with caplog.at_level(logging.INFO, "moe_jax"), contextlib.suppress(Exception):
        train(changed(config, "model", path=str(tmp_path)))
    assert sum("gives the router no gradient" in message for message in caplog.messages) == 1
    assert sum("moe_aux_loss_coeff" in message for message in caplog.messages) == 1


def test_signal_handler_is_put_back_and_threads_can_train(config: RunConfig) -> None:
    before = signal.getsignal(signal.SIGTERM)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(train(changed(config, "train", eval_every=0))))
    thread.start()
    thread.join()
    assert results[0].steps == STEPS
    assert signal.getsignal(signal.SIGTERM) is before
