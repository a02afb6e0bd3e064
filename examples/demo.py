"""The whole way of a model, offline, on eight simulated CPU devices: what `make demo` runs.

A small Hugging Face Mixtral is made, proven to survive the round trip, trained with expert parallelism (interrupted and
resumed on the way) and exported; transformers loads the export, and the logits are compared. It all lies in one folder.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import moe_jax
from converters.parity import MAX_RELATIVE_NORM, relative_norm, warm_up_torch
from moe_jax.checkpoint import load_model
from moe_jax.cli import parse_run, simulate_devices
from moe_jax.data import embedded_corpus
from moe_jax.metrics import Record, read_jsonl
from moe_jax.run_config import RunConfig

NUM_DEVICES = 8
TEMPLATE = Path(__file__).with_name("mixtral_tiny.yaml")
MARKER = ".moe_jax_demo"  # only a folder that the demo made is cleared by it
SHARD_SIZE = "8MB"
EOS = "<|endoftext|>"
VOCAB_SIZE = 2048
MIXTRAL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "sliding_window": None, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
INTERRUPT_AT = 40
MAX_LOSS_RATIO = 0.85  # held-out loss at the end over the first training loss; the run reaches less

console = Console()


# ---- the checkpoint ----


def make_checkpoint(folder: Path) -> None:
    """Writes a random Mixtral of 5.4 million parameters, in several shards, with a tokenizer of its own."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL))
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Trains a byte-level BPE tokenizer on the embedded corpus and writes it as transformers does."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    raw = ByteLevelBPETokenizer()
    raw.train_from_iterator(embedded_corpus(), VOCAB_SIZE, special_tokens=[EOS], show_progress=False)
    file = folder / "tokenizer.json"
    raw.save(str(file))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=EOS, bos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(folder)


# ---- the run ----


def write_run_file(folder: Path) -> tuple[Path, RunConfig]:
    """Writes the commented template with this folder's paths, and returns it with what it says."""
    run_file = folder / "RUN.yaml"
    run_file.write_text(TEMPLATE.read_text().replace(" demo/", f" {folder}/"))
    return run_file, parse_run([str(run_file)])[0]


def train_command(run_file: Path, *more: str) -> list[str]:
    """The command line that trains; the same as `moe-jax train RUN.yaml --devices 8`."""
    return [sys.executable, "-m", "moe_jax.cli", "train", str(run_file), "--devices", str(NUM_DEVICES), *more]


def train_until_interrupted(run_file: Path, metrics: Path) -> None:
    """Starts the run and sends it SIGTERM after step `INTERRUPT_AT`; it writes a checkpoint and exits with 143."""
    process = subprocess.Popen(train_command(run_file))
    while process.poll() is None and steps_done(metrics) < INTERRUPT_AT:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    if code != 128 + signal.SIGTERM:
        sys.exit(f"demo: the interrupted run exited with {code}, not with {128 + signal.SIGTERM}")


def steps_done(metrics: Path) -> int:
    """The last step that the run has reported, or 0."""
    records = read_jsonl(metrics)
    return records[-1]["step"] if records else 0


def run(*command: str) -> None:
    """Runs a command, shown; ends the demo with its exit code when it fails."""
    console.print(f"[dim]$ {' '.join(command).replace(sys.executable, 'python')}", highlight=False, soft_wrap=True)
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


# ---- the proof ----


def compare_with_transformers(checkpoints: Path, export: Path) -> float:
    """The relative norm of the logits' difference: the checkpoint's model here against its export in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    warm_up_torch()
    tokenizer = AutoTokenizer.from_pretrained(export)
    theirs = AutoModelForCausalLM.from_pretrained(export).eval()
    tokens = np.array([tokenizer("\n\n".join(embedded_corpus())[:4000])["input_ids"][:256]], np.int32)
    with torch.no_grad():
        reference = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    simulate_devices(NUM_DEVICES)
    moe_jax.init({"expert_parallel_degree": 4, "hybrid_shard_degree": 2})
    ours = jax.jit(lambda model, tokens: model(tokens).logits)(load_model(checkpoints, dtype="float32"), tokens)
    return relative_norm(np.asarray(ours), reference)


# ---- the story ----


def fresh_folder(folder: Path) -> None:
    """Empties the demo's own folder, or makes it; refuses one that holds something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        sys.exit(f"demo: {folder} is not empty and was not made by the demo; choose another with --folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()


def heading(text: str) -> None:
    console.print(f"\n[bold]{text}")


def print_summary(folder: Path, config: RunConfig, difference: float, seconds: float) -> None:
    """Prints what came out, and where it lies."""
    records: list[Record] = read_jsonl(config.folder / "metrics.jsonl")
    held_out: list[Record] = read_jsonl(config.folder / "eval.jsonl")
    first, last = records[0], records[-1]
    table = Table(show_header=False, title="Demo", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "training loss": f"{first['ce']:.3f} -> {last['ce']:.3f} nats per token in {last['step']} steps",
        "held-out loss": " -> ".join(f"{record['eval_loss']:.3f}" for record in held_out),
        "fullest expert": f"{first['max_load']:.2f} -> {last['max_load']:.2f} times an even share",
        "logits of the export": f"relative norm of the difference {difference:.1e} (transformers against moe_jax)",
        "run": str(folder / "RUN.yaml"),
        "plots": f"{config.folder / 'loss.png'}, {config.folder / 'expert_load.png'}",
        "export": str(config.folder / "hf"),
        "time": f"{seconds:.0f} s",
    }
    for label, value in rows.items():
        table.add_row(label, value)
    console.print()
    console.print(table, highlight=False, markup=False)


def check_learning(metrics: list[Record], held_out: list[Record]) -> None:
    """Ends the demo with 1 unless the last held-out loss is clearly below the first training loss."""
    first, last = metrics[0]["ce"], held_out[-1]["eval_loss"]
    if not last < MAX_LOSS_RATIO * first:
        sys.exit(f"demo: nothing was learnt: the held-out loss is {last:.3f}, the first training loss was {first:.3f}")


def main() -> None:
    """Runs the demo; exits non-zero when a step fails, nothing was learnt, or the export does not match."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything goes (cleared first)")
    folder, started = parser.parse_args().folder, time.perf_counter()

    fresh_folder(folder)
    heading("1. A Mixtral checkpoint of transformers, and its exact round trip")
    checkpoint = folder / "mixtral"
    make_checkpoint(checkpoint)
    converters = [sys.executable, "-m", "converters"]
    run(*converters, "inspect", str(checkpoint))
    run(*converters, "roundtrip", str(checkpoint), "--expert-parallel-degree", "4", "--hybrid-shard-degree", "2")

    heading(f"2. Training on {NUM_DEVICES} simulated devices, interrupted after step {INTERRUPT_AT}")
    run_file, config = write_run_file(folder)
    train_until_interrupted(run_file, config.folder / "metrics.jsonl")
    heading("3. The same run, resumed")
    run(*train_command(run_file, "--train.resume", "true"))

    heading("4. The export in transformers")
    difference = compare_with_transformers(config.folder / "checkpoints", config.folder / "hf")
    print_summary(folder, config, difference, time.perf_counter() - started)
    check_learning(read_jsonl(config.folder / "metrics.jsonl"), read_jsonl(config.folder / "eval.jsonl"))
    if not difference < MAX_RELATIVE_NORM:
        sys.exit(f"demo: the export differs: {difference:.1e} is not below {MAX_RELATIVE_NORM:g}")


if __name__ == "__main__":
    main()
