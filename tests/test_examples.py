"""Every example runs as its docstring says, in a process of its own."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_jax.metrics import read_jsonl
from moe_jax.train import TrainResult

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.torch


def run(script: str, *arguments: str) -> str:
    """The script's standard output; fails with all it printed when it exits non-zero."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the two-step example wrote on eight devices, and what it printed."""
    out = tmp_path_factory.mktemp("examples") / "smp"
    return out, run("smp_two_steps.py", "--devices", "8", "--steps", "4", "--seq-len", "32", "--out", str(out))


def test_smp_two_steps_trains_and_exports(trained: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    folder, printed = trained
    losses = [float(line.split("loss ")[1].split()[0]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(info.values())


def load(script: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), EXAMPLES / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smp_two_steps_refuses_an_output_that_is_not_empty_before_training(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "note.txt").touch()
    module = load("smp_two_steps.py")
    monkeypatch.setattr(module, "hugging_face_model", lambda _: pytest.fail("work has begun"))
    monkeypatch.setattr("sys.argv", ["smp_two_steps.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        module.main()
    assert done.value.code == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(("preempted", "eval_loss", "code", "printed"), [
    (False, 1.25, 0, "step 3: loss 2.0000, held-out loss 1.2500; wrote out/hf\n"),
    (False, None, 0, "step 3: loss 2.0000; wrote out/hf\n"),
    (True, None, 143, "stopped at step 3: loss 2.0000; wrote out/checkpoints\n"),
])  # fmt: skip
def test_finetune_hf_folder_says_how_the_run_ended(
    preempted: bool, eval_loss: float | None, code: int, printed: str, monkeypatch: Any, capsys: Any
) -> None:
    module = load("finetune_hf_folder.py")
    result = TrainResult(None, 3, 2.0, eval_loss, 1, preempted, Path("out"))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(module, "train", lambda _: result)
    monkeypatch.setattr(module.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("sys.argv", ["finetune_hf_folder.py", "folder", "--out", "out"])
    assert module.main() == code
    assert capsys.readouterr().out == printed


def test_finetune_hf_folder_refuses_in_one_line(monkeypatch: Any, capsys: Any) -> None:
    module = load("finetune_hf_folder.py")
    monkeypatch.setattr(module.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("sys.argv", ["finetune_hf_folder.py", "/no/such", "--out", "out", "--steps", "0"])
    assert module.main() == 2
    assert capsys.readouterr().err == "finetune_hf_folder: train.steps is 0, but must be an integer >= 1\n"


@pytest.mark.parametrize(("held_out", "learnt"), [(5.0, True), (8.0, False), (float("nan"), False)])
def test_demo_fails_unless_something_was_learnt(held_out: float, learnt: bool) -> None:
    check = load("demo.py").check_learning
    with contextlib.nullcontext() if learnt else pytest.raises(SystemExit, match="nothing was learnt"):
        check([{"ce": 7.6}], [{"eval_loss": 7.5}, {"eval_loss": held_out}])


def test_finetune_hf_folder_trains_on_text_files(trained: tuple[Path, str], tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("All tokens go to the experts that want them, and come back weighted.\n" * 60)
    run(
        "finetune_hf_folder.py", str(trained[0]), "--text", str(text), "--tokenizer", "bytes", "--out", str(out),
        "--devices", "4", "--expert-parallel-degree", "2", "--steps", "6", "--seq-len", "32", "--batch-size", "8",
        "--learning-rate", "3e-3", "--dtype", "float32",
    )  # fmt: skip
    held_out = [record["eval_loss"] for record in read_jsonl(out / "eval.jsonl")]
    assert held_out[-1] < held_out[0]
    assert {path.name for path in (out / "hf").iterdir()} == {path.name for path in trained[0].iterdir()}
