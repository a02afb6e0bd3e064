"""Fine-tunes a Hugging Face folder on text files and writes a Hugging Face folder again; torch is not needed.

    python examples/finetune_hf_folder.py FOLDER --text a.txt b.txt --out runs/mine
    python examples/finetune_hf_folder.py FOLDER --out runs/mine --devices 8      # eight simulated CPU devices

The same run as a file, with every setting: examples/mixtral_tiny.yaml.
"""

import argparse
import logging
import sys

from moe_jax import MoEConfig, ParallelConfig
from moe_jax.cli import simulate_devices
from moe_jax.errors import ConfigError
from moe_jax.run_config import DataConfig, ModelSettings, OptimizerConfig, RunConfig, TrainSettings
from moe_jax.train import PREEMPTED_EXIT_CODE, TrainResult, train


def run_config(args: argparse.Namespace) -> RunConfig:
    """The run: a few settings of its own, defaults for the rest."""
    return RunConfig(
        model=ModelSettings(path=args.folder),
        output=args.out,
        parallel=ParallelConfig(expert_parallel_degree=args.expert_parallel_degree),
        moe=MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001),
        data=DataConfig(files=tuple(args.text), tokenizer=args.tokenizer or args.folder),
        optimizer=OptimizerConfig(learning_rate=args.learning_rate, warmup_steps=args.steps // 10),
        train=TrainSettings(
            steps=args.steps,
            global_batch_size=args.batch_size,
            seq_len=args.seq_len,
            dtype=args.dtype,
            eval_every=max(args.steps // 4, 1),
            eval_batches=8,
        ),
    )


def main() -> int:
    """Trains as the command line says; returns the exit code: 0, 2 for what cannot work, 143 when stopped by SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Hugging Face checkpoint")
    parser.add_argument("--text", nargs="*", default=[], help="UTF-8 text files; default: text that comes with Python")
    parser.add_argument("--tokenizer", help='folder with tokenizer.json, or "bytes"; default: the checkpoint\'s own')
    parser.add_argument("--out", required=True, help="new folder for metrics, plots, checkpoints/ and hf/")
    parser.add_argument("--devices", type=int, default=0, help="run on that many simulated CPU devices")
    parser.add_argument("--expert-parallel-degree", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step, a multiple of the devices")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype; parameters are float32 always")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)  # orbax sets one up at import
    logging.getLogger("moe_jax").setLevel(logging.INFO)
    if args.devices:
        simulate_devices(args.devices)
    try:
        result = train(run_config(args))
    except ConfigError as error:
        print(f"finetune_hf_folder: {error}", file=sys.stderr)
        return 2
    print(summary(result))
    return PREEMPTED_EXIT_CODE if result.preempted else 0


def summary(result: TrainResult) -> str:
    """One line about the run; a run that was stopped may have no evaluation, and has no export."""
    held_out = "" if result.eval_loss is None else f", held-out loss {result.eval_loss:.4f}"
    if result.preempted:
        return f"stopped at step {result.steps}: loss {result.loss:.4f}{held_out}; wrote {result.output}/checkpoints"
    return f"step {result.steps}: loss {result.loss:.4f}{held_out}; wrote {result.output}/hf"


if __name__ == "__main__":
    sys.exit(main())
