"""Parsing of run files and overrides, exit codes, and one real process that is stopped by SIGTERM."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from numpy_hf import TINY

from moe_jax.checkpoint import complete_steps
from moe_jax.cli import (
    PROCESS_COUNT_VARIABLES,
    join_processes,
    main,
    parse_run,
    simulate_devices,
    warn_if_alone,
)
from moe_jax.errors import ConfigError
from moe_jax.metrics import read_jsonl

REPO = Path(__file__).parent.parent
SIGTERM_EXIT_SECONDS = 60  # the step at work, one checkpoint of a tiny model, two pictures
RUN = """
model: {path: /models/x, init: random}
output: out
moe: {moe_load_balancing: aux_loss}
optimizer: {learning_rate: 3.0e-4}
train: {steps: 7, seq_len: 64}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def test_run_file_fills_the_dataclasses_and_overrides_win(run_file: Path) -> None:
    config, devices, distributed = parse_run(
        [str(run_file), "--train.steps", "9", "--data.files", "[a.txt,b.txt]", "--devices", "4"]
    )
    assert (config.model.init, config.train.steps, config.train.seq_len) == ("random", 9, 64)
    assert config.moe.moe_load_balancing == "aux_loss"
    assert config.optimizer.learning_rate == 3e-4
    assert config.data.files == ("a.txt", "b.txt")
    assert config.data.eos_id is None
    assert (devices, distributed) == (4, False)


def test_one_text_file_needs_no_list(run_file: Path) -> None:
    assert parse_run([str(run_file), "--data.files", "a.txt"]).config.data.files == ("a.txt",)
    run_file.write_text(RUN + "data: {files: b.txt}\n")
    assert parse_run([str(run_file)]).config.data.files == ("b.txt",)


def test_settings_survive_json(run_file: Path, tmp_path: Path) -> None:
    config = parse_run([str(run_file), "--data.files", "[a.txt]"]).config
    (tmp_path / "again.json").write_text(json.dumps(config.to_dict()))
    assert parse_run([str(tmp_path / "again.json")])[0] == config


@pytest.mark.parametrize(("arguments", "message"), [
    (["--train.stepz", "3"], "train.stepz"),
    (["--train.steps", "many"], "train.steps"),
    (["--train.steps", "0"], "train.steps is 0, but must be an integer >= 1"),
    (["--moe.moe_load_balancing", "Sinkhorn"], "moe.moe_load_balancing.*'sinkhorn', 'balanced', 'aux_loss'"),
    (["--parallel.tensor_parallel_degree", "2"], "tensor_parallel_degree is 2"),
    (["--optimizer.warmup_steps", "8"], "optimizer.warmup_steps is 8"),
    (["--devices", "-1"], "devices"),
    (["--devices", "2", "--distributed"], "--devices is 2, but must be absent beside --distributed"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_exit_code_2(
    run_file: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    assert main(["train", str(run_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert error.startswith("moe-jax: ")


@pytest.mark.parametrize(("content", "message"), [
    ("trian: {steps: 3}\n", "trian"),
    ("model: {path: a}\noutput: b\ntrain: {stepz: 3}\n", "stepz"),
    ("output: b\n", "model.path"),
    ("model: {path: a\n", "pars"),
])  # fmt: skip
def test_wrong_run_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_run([str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "--train.steps", "3"], ["train", "/no/such.yaml"], ["tarin"], []]
)
def test_missing_file_or_command_exits_with_2(arguments: list[str], capsys: Any) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("moe-jax: ")


def test_config_error_of_the_run_exits_with_2(run_file: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(run_file), "--train.device", "cpu"]) == 2
    assert "/models/x" in capsys.readouterr().err


def test_a_file_system_error_is_one_line_and_exit_code_2(run_file: Path, capsys: Any, monkeypatch: Any) -> None:
    def full(_config: Any) -> None:
        raise OSError(28, "No space left on device", "out/metrics.jsonl")

    monkeypatch.setattr("moe_jax.train.train", full)
    assert main(["train", str(run_file)]) == 2
    assert capsys.readouterr().err == "moe-jax: [Errno 28] No space left on device: 'out/metrics.jsonl'\n"


# C96: schedulers


@pytest.mark.parametrize("name", PROCESS_COUNT_VARIABLES)
def test_variables_of_a_scheduler_are_warned_of_and_nothing_waits(name: str, monkeypatch: Any, caplog: Any) -> None:
    for other in PROCESS_COUNT_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    warn_if_alone()
    assert caplog.messages == []
    monkeypatch.setenv(name, "4")
    warn_if_alone()
    assert caplog.messages == [f"{name} is 4, but this process trains alone: pass --distributed to join the others"]


def test_joining_logs_the_expected_and_found_counts_or_says_why_not(monkeypatch: Any, caplog: Any) -> None:
    for other in PROCESS_COUNT_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setattr("jax.distributed.initialize", lambda: None)
    with caplog.at_level("INFO", "moe_jax"):
        join_processes()
    assert caplog.messages == [
        "processes: expected 2 (SLURM_NTASKS), found 1 with 8 device(s) in all, 8 here",
        "SLURM_NTASKS is 2, but 1 process(es) joined",
    ]

    def fail() -> None:
        raise ValueError("coordinator_address\nshould be defined.")

    monkeypatch.setattr("jax.distributed.initialize", fail)
    with pytest.raises(ConfigError, match=r"could not join the other processes: coordinator_address should be"):
        join_processes()


def test_help_lists_the_fields(capsys: Any) -> None:
    assert main(["--help"]) == 0
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    assert done.value.code == 0
    assert "--optimizer.warmup_steps" in capsys.readouterr().out


def test_tune_passes_its_shapes_on(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    calls = []
    monkeypatch.setattr("moe_jax.kernels.tuning.tune", lambda *arguments: calls.append(arguments))
    out = tmp_path / "tiles.json"
    sizes = ["--rows", "96", "--experts", "4", "--hidden", "64", "--width", "128"]
    assert main(["tune", *sizes, "--legs", "forward", "weight_gradient", "--out", str(out)]) == 0
    assert main(["tune", "--model", "large", "--model", "OLMoE-1B-7B", "--tokens", "8"]) == 0
    (models, path, legs), (named, default_path, all_legs) = calls
    assert [tuple(model) for model in models.values()] == [(96, 1, 4, 64, 128)]
    assert (path, list(legs)) == (out, ["forward", "weight_gradient"])
    assert {name: (model.tokens, model.num_experts) for name, model in named.items()} == {
        "large": (8, 128), "OLMoE-1B-7B": (8, 64),
    }  # fmt: skip
    assert (default_path, list(all_legs)) == (Path("tiles.json"), ["forward", "input_gradient", "weight_gradient"])
    assert f"MOE_JAX_TILES={out}" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["tune"], "tune needs --model, or all of --rows"),
    (["tune", "--rows", "8", "--experts", "4", "--hidden", "64"], "tune needs --model, or all of --rows"),
    (["tune", "--model", "large", "--rows", "8"], "cannot stand beside --model"),
    (["tune", "--rows", "8", "--experts", "4", "--hidden", "64", "--width", "64", "--tokens", "8"], "--tokens needs --model"),
    (["tune", "--rows", "0"], "rows"),
    (["tune", "--model", "large", "--legs", "backward"], "legs.*backward"),
    (["tune", "--model", "large"], "kernels for Hopper GPUs.*'cpu'"),
    (["doctor", "--tokens", "-1"], "tokens"),
    (["doctor", "--tokens", "many"], "tokens"),
    (["doctor", "--dtype", "int8"], "dtype.*int8"),
    (["doctor", "--modle", "large"], "modle"),
])  # fmt: skip
def test_wrong_arguments_of_doctor_and_tune_are_one_line_and_exit_code_2(
    capsys: Any, arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert error.startswith("moe-jax: ")


def test_simulated_devices_replace_an_earlier_number(monkeypatch: Any) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    simulate_devices(3)
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=3"


def environment() -> dict[str, str]:
    return {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(REPO)}


def test_importing_the_command_stays_light() -> None:
    heavy = "{'optax', 'orbax', 'grain', 'flax', 'matplotlib', 'jsonargparse', 'torch', 'transformers'}"
    code = f"import sys, moe_jax.cli; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sigterm_ends_the_process_with_a_complete_checkpoint(tmp_path: Path) -> None:  # C77, C82
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "text.txt").write_text("all the experts " * 60)
    (tmp_path / "run.yaml").write_text(json.dumps({
        "model": {"path": str(tmp_path), "init": "random"}, "output": str(tmp_path / "out"),
        "data": {"files": [str(tmp_path / "text.txt")]}, "moe": {"moe_load_balancing": "none"},
        "train": {"steps": 100_000, "global_batch_size": 2, "seq_len": 16, "dtype": "float32", "device": "cpu"},
    }))  # fmt: skip
    command = [sys.executable, "-m", "moe_jax.cli", "train", str(tmp_path / "run.yaml"), "--devices", "2"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, cwd=tmp_path)
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        while process.poll() is None and not (metrics.is_file() and len(read_jsonl(metrics)) >= 2):
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=SIGTERM_EXIT_SECONDS)
    finally:
        process.kill()
    assert code == 143, (tmp_path / "log").read_text()
    (step,) = complete_steps(tmp_path / "out" / "checkpoints")
    assert read_jsonl(metrics)[-1]["step"] == step
