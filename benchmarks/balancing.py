"""The balancing modes side by side: `python benchmarks/balancing.py [--devices 0] [--steps 150] [--seeds 3] [--out FOLDER]`.

The demo's Mixtral (4 layers, 8 experts, 2 a token; the tokens are bytes) is trained on the embedded corpus, under every mode of
MODES from the same initial weights and with the same batches. A seed is that of both. Written to the output folder:
balancing.json, balancing.md (the table that is printed) and load_by_mode.png.

--devices 8 simulates so many CPU devices (expert degree 4 x fsdp 2); --devices 0 takes what JAX finds (expert degree 1).

N steps, L MoE layers, E experts.
"""

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax.checkpoint import TrainState, replicated
from moe_jax.cli import simulate_devices
from moe_jax.config import MoEConfig
from moe_jax.data import eval_batches, load_rows, training_batches
from moe_jax.hf import abstract_model, fill, from_config, model_config_of
from moe_jax.losses import next_token_loss
from moe_jax.metrics import StepMetrics, relative_load
from moe_jax.model import named_parameters
from moe_jax.optim import make_optimizer, make_schedule
from moe_jax.run_config import DataConfig, OptimizerConfig
from moe_jax.train_step import make_train_step, num_compilations, put_batch

# As in examples/demo.py, but for the vocabulary: bytes and the end of a document.
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
OPTIMIZER = OptimizerConfig(learning_rate=4e-3, warmup_steps=8, weight_decay=0.1, clip_norm=1.0)  # the demo's
MODES = {
    "none": MoEConfig(moe_load_balancing="none", moe_aux_loss_coeff=0.0),
    "sinkhorn": MoEConfig(moe_load_balancing="sinkhorn", moe_aux_loss_coeff=0.0),
    "balanced": MoEConfig(moe_load_balancing="balanced", moe_aux_loss_coeff=0.0),
    # What Switch Transformer and Megatron-LM's documentation use. The default here, 0.001, shows little in 150 steps.
    "aux_loss megatron": MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.01),
    # Mixtral-8x7B's own config.json; with 4 layers and 2 experts a token as strong as 0.01 of the form above (docs/balancing.md).
    "aux_loss hf": MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.02, moe_aux_loss_form="hf"),
    # The papers' 0.001 is for ten thousands of steps. In a run of 120 steps (16 x 128 bytes, seed 0) the load of the last fifth was
    # 1.92, 1.46, 1.54 and 1.74 at rates of 0.002, 0.005, 0.01 and 0.02.
    "expert_bias": MoEConfig(moe_load_balancing="expert_bias", moe_aux_loss_coeff=0.0, expert_bias_update_rate=0.005),
    # DeepSeek-V3's coefficient is 0.0001, for the same reason too small for a short run.
    "expert_bias + sequence": MoEConfig(
        moe_load_balancing="expert_bias", expert_bias_update_rate=0.005, moe_aux_loss_form="sequence", moe_aux_loss_coeff=0.001
    ),
}  # fmt: skip
# Figure of a run -> its heading in the table and its format. "first" and "last" are means over a fifth of the steps.
COLUMNS = {
    "first_load": ("load, first fifth", ".2f"), "last_load": ("load, last fifth", ".2f"),
    "eval_load": ("load, own routing", ".2f"), "last_dead": ("dead experts", ".1%"), "last_entropy": ("entropy", ".2f"),
    "last_ce": ("training CE", ".3f"), "eval_ce": ("held-out CE", ".3f"), "iterations": ("plan steps", ".0f"),
    "max_iterations": ("at most", ".0f"), "ms": ("ms/step", ".1f"),
}  # fmt: skip
SMOOTHED = 5  # steps that a line of the picture is the mean of


# ---- one run ----


def initial_weights(seed: int, parallel: dict[str, int]) -> dict[str, np.ndarray]:
    """Name -> array on the host; every mode's model is filled from it."""
    moe_jax.init({**parallel, "random_seed": seed})
    moe = MoEConfig(moe_load_balancing="none", moe_aux_loss_coeff=0.0, random_seed=seed)
    return {name: np.asarray(param[...]) for name, param in named_parameters(from_config(MIXTRAL, {}, moe)).items()}


def filled(abstract: Any, weights: dict[str, np.ndarray]) -> Any:
    """The model with these weights; selection biases start at zero."""
    shapes = {name: jax.tree.leaves(param)[0].shape for name, param in named_parameters(abstract).items()}
    return fill(abstract, lambda name, index: weights.get(name, np.zeros(shapes[name], np.float32))[index])


@jax.jit
def eval_figures(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(cross entropy, number of labels, counts [L, E]) of one batch under the model's own routing."""
    output = model(batch["tokens"], batch["segment_ids"], train=False)
    return *next_token_loss(output.logits, batch["tokens"], batch["segment_ids"]), output.router.counts


def evaluate(model: Any, abstract: Any, batches: list[dict[str, jax.Array]]) -> dict[str, float]:
    """Held-out loss, and load as the mean over batches and layers. As a model of mode "none", so that it compiles once."""
    weights = {name: np.asarray(param[...]) for name, param in named_parameters(model).items()}
    model = filled(abstract, weights)
    found = jax.device_get([eval_figures(model, batch) for batch in batches])
    losses, labels = (np.array([f[i] for f in found], np.float64) for i in range(2))
    loads = [relative_load(counts_LE).max(axis=1).mean() for *_, counts_LE in found]
    return {"eval_ce": float(np.sum(losses * labels) / np.sum(labels)), "eval_load": float(np.mean(loads))}


def train(step: Any, state: TrainState, batches: list[dict[str, jax.Array]]) -> tuple[TrainState, dict[str, Any]]:
    """(the last state, the run's figures and its curve of load)."""
    found: list[StepMetrics] = []
    start = 0.0
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        found.append(metrics)
        if number == 0:  # compiled by now
            jax.block_until_ready(state)
            start = time.perf_counter()
    jax.block_until_ready(state)
    ms = 1e3 * (time.perf_counter() - start) / (len(batches) - 1)
    host: StepMetrics = jax.tree.map(lambda *values: np.stack(values), *jax.device_get(found))
    load_N = np.stack([relative_load(counts_LE).max(axis=1) for counts_LE in host.counts]).mean(axis=1)
    fifth = max(len(batches) // 5, 1)
    return state, {
        "first_load": float(load_N[:fifth].mean()), "last_load": float(load_N[-fifth:].mean()),
        "last_dead": float(np.mean(host.counts[-fifth:] == 0)), "last_entropy": float(host.entropy[-fifth:].mean()),
        "last_ce": float(host.ce[-fifth:].mean()), "iterations": float(host.plan_iterations.mean()),
        "max_iterations": int(host.plan_iterations.max()),
        "max_bias": float(np.abs([host.bias_min[-1], host.bias_max[-1]]).max()), "ms": ms, "load": load_N.tolist(),
    }  # fmt: skip


def compare(args: argparse.Namespace, parallel: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Mode -> the figures of its runs, one a seed; a mode's step is compiled once for all of them."""
    moe_jax.init(parallel)
    config = model_config_of(MIXTRAL)
    make_abstract = partial(abstract_model, config, dtype=jnp.float32, source=None, remat="none")
    abstracts = {mode: make_abstract(moe=MODES[mode]) for mode in args.modes}
    own_routing = make_abstract(moe=MODES["none"])
    train_rows, eval_rows = load_rows(DataConfig(), args.length, config.vocab_size)
    held_out = [put_batch(batch, 1) for batch in eval_batches(eval_rows, args.batch)[: args.eval_batches]]
    held_out = [{name: array[0] for name, array in batch.items()} for batch in held_out]
    optimizer = make_optimizer(OPTIMIZER, args.steps)
    steps = {mode: make_train_step(optimizer, make_schedule(OPTIMIZER, args.steps)) for mode in args.modes}
    init_optimizer = jax.jit(optimizer.init)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    for seed in range(args.seeds):
        weights = initial_weights(seed, parallel)
        source = training_batches(train_rows, args.batch, seed)
        batches = [put_batch(source[number], 1) for number in range(args.steps)]
        for mode in args.modes:
            started = time.perf_counter()
            model = filled(abstracts[mode], weights)
            state = TrainState(model, init_optimizer(model), replicated(np.int32(0)))
            state, figures = train(steps[mode], state, batches)
            runs[mode].append({"seed": seed, **figures, **evaluate(state.model, own_routing, held_out)})
            print(f"seed {seed} {mode:<24} {time.perf_counter() - started:6.1f} s", file=sys.stderr, flush=True)
    for mode, step in steps.items():
        assert num_compilations(step) == 1, (mode, num_compilations(step))
    return runs


# ---- what is written ----


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table: mean (smallest to largest) over the seeds."""
    rows = [["mode", *(heading for heading, _ in COLUMNS.values())], ["---"] + ["---:"] * len(COLUMNS)]
    for mode, found in runs.items():
        rows.append([mode, *(_cell([run[name] for run in found], form) for name, (_, form) in COLUMNS.items())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(values: list[float], form: str) -> str:
    mean, low, high = (f"{value:{form}}" for value in (sum(values) / len(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Load over the steps, a line a mode, and the held-out loss of every seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for number, (mode, found) in enumerate(runs.items()):
        color = f"C{number}"
        load_N = np.mean([run["load"] for run in found], axis=0)
        window = min(SMOOTHED, len(load_N))
        smooth_N = np.lib.stride_tricks.sliding_window_view(load_N, window).mean(axis=-1)
        left.plot(np.arange(window, len(load_N) + 1), smooth_N, color=color, label=mode)
        losses = [run["eval_ce"] for run in found]
        right.plot(losses, [-number] * len(losses), "o", color=color, alpha=0.5)
        right.plot(np.mean(losses), -number, "|", color=color, markersize=18, markeredgewidth=2)
    left.axhline(1.0, color="k", linestyle="--", linewidth=1)
    left.set(
        title="Load of the fullest expert, mean over layers and seeds", xlabel="step", ylabel="tokens / even share"
    )
    right.set(title="Held-out loss, own routing", xlabel="cross entropy (nats per byte)")
    right.set_yticks([-number for number in range(len(runs))], list(runs))
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices; 0: what JAX finds")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--batch", type=int, default=32, help="rows a step, a multiple of the devices")
    parser.add_argument("--length", type=int, default=256, help="bytes a row")
    parser.add_argument("--eval-batches", type=int, default=7)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--out", type=Path, default=Path("runs/balancing"))
    args = parser.parse_args()
    if args.steps < 5 or args.seeds < 1:
        parser.error(f"--steps is {args.steps} and --seeds {args.seeds}, but must be at least 5 and 1")
    return args


def main() -> None:
    args = parse()
    if args.devices:
        simulate_devices(args.devices)
    parallel = {"expert_parallel_degree": 4 if args.devices and args.devices % 4 == 0 else 1}
    header = {
        "date": time.strftime("%Y-%m-%d"), "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "python": sys.version.split()[0], "jax": jax.__version__, **parallel, "seeds": args.seeds, "steps": args.steps,
        "tokens a step": args.batch * args.length, "command": shlex.join(["python", *sys.argv]),
    }  # fmt: skip
    started = time.perf_counter()
    runs = compare(args, parallel)
    header["seconds"] = round(time.perf_counter() - started)
    text = ", ".join(f"{name} {value}" for name, value in header.items()) + "\n\n" + table(runs)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "balancing.json").write_text(json.dumps({**header, "runs": runs}, indent=1) + "\n")
    (args.out / "balancing.md").write_text(text)
    draw(runs, args.out / "load_by_mode.png")
    print(text, end="")


if __name__ == "__main__":
    main()
