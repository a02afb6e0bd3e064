"""Speed on CPU, with two threads: `python benchmarks/cpu_block.py [--out FOLDER] [--parts legs step]`.

legs: the three legs of the grouped product (forward, gradient of x, gradient of w) in float32, each over the time of one plain
product [M, D] x [D, F], which has the same number of operations; beside it the plain product x^T dy, which XLA on CPU computes more
slowly. Group sizes are drawn from a Dirichlet distribution: "even" is
what a router with a balancing loss gives, "skewed" one without.

step: a training step (forward, backward, AdamW) of a small Mixtral in float32 through `moe_jax.transform` and `make_train_step`,
and through transformers with experts_implementation="grouped_mm" and torch's fused AdamW. Both start from the same weights, see
the same tokens, have neither a balancing loss nor clipping and recompute nothing; their first losses must agree.

Every case runs in processes of its own, each of which keeps to --threads cores and waits while another one is measured: runs
are interleaved, and the median of --rounds of them counts.

M rows, D and F inner and outer width, E groups, V vocabulary.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from exchange import table

LEGS = ("forward", "gradient of x", "gradient of w")
CONCENTRATIONS = {"even": 100.0, "skewed": 2.0}  # of the Dirichlet distribution of group sizes
ROWS, LENGTH = 8, 256  # of a batch of the step
LOSS_TOLERANCE = 1e-4  # of the first loss, relative; float32 sums in another order
WARM_UP = 2
# glibc: memory that is freed stays with the process, in one heap. Otherwise XLA's temporary buffer, mapped anew in every
# step, is zeroed by the kernel page by page. Costs: the memory stays taken, and threads share one lock.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 28), "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
TARGET_LEG, TARGET_STEP = 1.5, 1.5


@dataclasses.dataclass(frozen=True)
class Product:
    """One case of the legs."""

    rows: int
    inner: int
    outer: int
    groups: int
    sizes: str = "even"

    def __str__(self) -> str:
        return f"M {self.rows:,}, D {self.inner}, F {self.outer}, E {self.groups}, {self.sizes}"


PRODUCTS = [
    Product(4096, 256, 1024, 8), Product(4096, 512, 256, 8), Product(16384, 256, 1024, 8), Product(16384, 256, 256, 64),
    Product(16384, 128, 256, 64), Product(4096, 256, 1024, 8, "skewed"), Product(16384, 256, 256, 64, "skewed"),
]  # fmt: skip
# Name -> what differs from a Mixtral of 4 layers, hidden size 256.
MODELS: dict[str, dict[str, Any]] = {
    "8 experts, top 2": {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    "64 experts, top 8": {"intermediate_size": 128, "num_local_experts": 64, "num_experts_per_tok": 8},
}


def hf_config(name: str, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "mixtral", "vocab_size": vocabulary, "hidden_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096, "sliding_window": None,
        "tie_word_embeddings": False, "rope_theta": 10000.0, **MODELS[name],
    }  # fmt: skip


# ---- what the processes measure: each gives functions that run once and wait ----


def legs(case: Product) -> dict[str, Callable[[], Any]]:
    """The plain products and the three legs."""
    import jax
    import jax.numpy as jnp

    from moe_jax.kernels.grouped_matmul import grouped_matmul, input_gradient, weight_gradient

    rng = np.random.default_rng(0)
    shares_E = rng.dirichlet(np.full(case.groups, CONCENTRATIONS[case.sizes]))
    sizes_E = jnp.asarray(rng.multinomial(case.rows, shares_E), jnp.int32)
    x_MD, w_EDF, dy_MF = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in (
            (case.rows, case.inner),
            (case.groups, case.inner, case.outer),
            (case.rows, case.outer),
        )
    )
    plain = jax.jit(lambda x_MD, w_DF: x_MD @ w_DF)
    calls = {
        "plain": (plain, (x_MD, w_EDF[0])),
        "plain x^T dy": (jax.jit(lambda x_MD, dy_MF: x_MD.T @ dy_MF), (x_MD, dy_MF)),
        LEGS[0]: (jax.jit(grouped_matmul), (x_MD, w_EDF, sizes_E)),
        LEGS[1]: (jax.jit(input_gradient), (dy_MF, w_EDF, sizes_E)),
        LEGS[2]: (jax.jit(weight_gradient), (x_MD, dy_MF, sizes_E)),
    }
    return {name: lambda f=f, args=args: jax.block_until_ready(f(*args)) for name, (f, args) in calls.items()}


def batches_of(vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (ROWS, LENGTH), np.int32)


def torch_model(name: str, vocabulary: int, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = MixtralConfig(**hf_config(name, vocabulary))
    return AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm", dtype=torch.float32)


def transformers_step(name: str, vocabulary: int, threads: int) -> Callable[[], float]:
    import torch

    model = torch_model(name, vocabulary, threads).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokens = torch.from_numpy(batches_of(vocabulary)).long()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def moe_jax_step(name: str, vocabulary: int, threads: int) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    import moe_jax
    from moe_jax.checkpoint import TrainState
    from moe_jax.optim import make_optimizer, make_schedule
    from moe_jax.run_config import OptimizerConfig
    from moe_jax.train_step import make_train_step, put_batch

    moe_jax.init()
    switches = moe_jax.MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0)
    model = moe_jax.transform(torch_model(name, vocabulary, threads), config=switches, dtype="float32", remat="none")
    settings = OptimizerConfig(learning_rate=1e-4, warmup_steps=0, weight_decay=0.1, clip_norm=0.0)
    optimizer, schedule = make_optimizer(settings, 1000), make_schedule(settings, 1000)
    train_step = make_train_step(optimizer, schedule)
    state = TrainState(model, jax.jit(optimizer.init)(model), jnp.zeros((), jnp.int32))
    tokens = batches_of(vocabulary)
    batch = put_batch({"tokens": tokens, "segment_ids": np.ones_like(tokens)}, 1)

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        return float(metrics.loss)

    return step


STEPS = {"moe_jax": moe_jax_step, "transformers": transformers_step}


# ---- processes ----


def work(request: dict[str, Any]) -> None:
    """A child: makes the functions and warms them up; then for every line runs each once and answers with the seconds."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["threads"]])
    if request["part"] == "legs":
        functions = legs(Product(**request["product"]))
    else:
        step = STEPS[request["side"]](request["model"], request["vocabulary"], request["threads"])
        functions = {request["side"]: step}
    first = {name: function() for name, function in functions.items()}
    for _ in range(WARM_UP):
        for function in functions.values():
            function()
    print(json.dumps({name: value for name, value in first.items() if isinstance(value, float)}), flush=True)
    for _ in sys.stdin:
        seconds = {}
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            seconds[name] = time.perf_counter() - started
        print(json.dumps(seconds), flush=True)


def interleaved(requests: list[dict[str, Any]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """(median seconds by name; what the first call gave, where that is a number): a child a request, one at a time."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(requests[0]["threads"]), "HF_HUB_OFFLINE": "1",
    } | (KEEP_MEMORY if requests[0]["malloc"] == "keep" else {})  # fmt: skip
    children, first, seconds = [], {}, {}
    try:
        for request in requests:
            command = [sys.executable, __file__, "--work", json.dumps(request)]
            child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            children.append(child)
            first |= _answer(child)
        for _ in range(rounds):
            for child in children:
                child.stdin.write("\n")
                child.stdin.flush()
                for name, value in _answer(child).items():
                    seconds.setdefault(name, []).append(value)
    finally:
        for child in children:
            child.stdin.close()
            child.wait()
    return {name: statistics.median(values) for name, values in seconds.items()}, first


def _answer(child: subprocess.Popen) -> dict[str, float]:
    """The child's next line; libraries may print others."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"a process ended early: {child.args}")


# ---- tables ----


def measure_legs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in PRODUCTS:
        request = {"part": "legs", "product": dataclasses.asdict(case), "threads": args.threads, "malloc": args.malloc}
        seconds, _ = interleaved([request], 3 * args.rounds)
        yield {"name": str(case), "seconds": seconds, "ratio": {leg: seconds[leg] / seconds["plain"] for leg in LEGS}}


def measure_steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in MODELS:
        requests = [
            {
                "part": "step", "side": side, "model": name, "vocabulary": args.vocabulary, "threads": args.threads,
                "malloc": args.malloc,
            }
            for side in STEPS
        ]  # fmt: skip
        seconds, losses = interleaved(requests, args.rounds)
        ours, theirs = losses["moe_jax"], losses["transformers"]
        if abs(ours - theirs) > LOSS_TOLERANCE * theirs:
            raise RuntimeError(f"{name}: the first losses differ: {losses}")
        yield {
            "name": name, "seconds": seconds, "first loss": losses, "ratio": seconds["transformers"] / seconds["moe_jax"],
            "tokens/s": {side: ROWS * LENGTH / value for side, value in seconds.items()},
        }  # fmt: skip


def leg_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for record in records:
        seconds = record["seconds"]
        cells = [f"{seconds[leg] * 1e3:.2f} ms ({record['ratio'][leg]:.2f} x)" for leg in LEGS]
        plain = (f"{seconds[name] * 1e3:.2f} ms" for name in ("plain", "plain x^T dy"))
        rows.append([record["name"], *plain, *cells])
    header = (f"float32; wanted: at most {TARGET_LEG:g} x of the plain product", "plain product", "plain x^T dy", *LEGS)
    yield from table(header, rows)


def step_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for record in records:
        cells = [f"{record['tokens/s'][side]:,.0f} tokens/s ({record['seconds'][side] * 1e3:.0f} ms)" for side in STEPS]
        rows.append([record["name"], *cells, f"{record['ratio']:.2f} x"])
    yield from table((f"training step; wanted: at least {TARGET_STEP:g} x", *STEPS, "moe_jax is faster"), rows)


def header_line(args: argparse.Namespace) -> str:
    packages = ("jax", "jaxlib", "torch", "transformers", "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return (f"{time.strftime('%Y-%m-%d')}, {versions}; {cpu_name()}, {args.threads} of {os.cpu_count()} cores; {ROWS} x {LENGTH} "
            f"tokens a step, vocabulary {args.vocabulary}, median of {args.rounds} rounds (legs: {3 * args.rounds}); "
            f"python {' '.join(sys.argv)}")  # fmt: skip


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for cpu_block.json and cpu_block.md")
    parser.add_argument("--parts", nargs="+", choices=("legs", "step"), default=["legs", "step"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument(
        "--malloc", choices=("default", "keep"), default="default", help="keep: KEEP_MEMORY, for both sides"
    )
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    lines = [header_line(args)]
    print(lines[0], flush=True)
    found: dict[str, Any] = {"header": lines[0]}
    for part, measure, show in (("legs", measure_legs, leg_lines), ("step", measure_steps, step_lines)):
        if part in args.parts:
            found[part] = list(measure(args))
            lines += ["", *show(found[part])]
            print("", *show(found[part]), sep="\n", flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cpu_block.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "cpu_block.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
