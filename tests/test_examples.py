"""Every example runs as its docstring says, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.metrics import read_jsonl

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
