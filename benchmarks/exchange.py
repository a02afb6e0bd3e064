"""What the exchange sends and holds: `python benchmarks/exchange.py [--ep 2 4 8 16 32 64] [--json FILE]`.

The routed block (`routed_experts` in `shard_map`, forward and backward) is compiled for so many simulated CPU devices, a
process for each expert degree, with 1,024 tokens a device; up to 8 devices it is also run. Printed, and written with --json:

1. Bytes: of every collective in the compiled program, beside the least that a routing needs (a row for each (token, remote rank)
   pair) and beside one copy for each remote (token, expert) pair; for balanced (uniform random), Zipf and one-set routing.
2. Memory: temporary bytes of the compiled program, beside the balanced need (factor 1, no further rounds) and a worst-case buffer.
3. Rounds beyond the first that balanced random routing needs, by moe_buffer_factor (NumPy, the plan's integer logic).

The compute dtype is float16: XLA on CPU sends bfloat16 as float32, which would be twice the bytes that a GPU sends.

T tokens of a device, K experts per token, E experts, P ranks, M received rows of a round, H hidden size.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax.collectives import vary_like
from moe_jax.moe.exchange import FURTHER_PART, ExchangeShape, exchange_shape
from moe_jax.moe.experts import Weights
from moe_jax.moe.routed import RoutedSettings, routed_experts
from moe_jax.plan import Collective, read_collectives
from moe_jax.sharding import BATCH, P

TOKENS, HIDDEN, WIDTH = 1024, 512, 64
SIZES = ((8, 2), (64, 8), (128, 8))  # (experts, experts per token): Mixtral, OLMoE, Qwen3-30B-A3B
DEGREES = (2, 4, 8, 16, 32, 64)
MOST_RUN = 8  # devices; programs for more are compiled only
FACTOR = moe_jax.MoEConfig().moe_buffer_factor
WORST = 1e9  # a buffer factor under which nothing can overflow
KINDS = ("all_to_all", "all_gather", "ragged")
ROUTINGS = ("balanced", "zipf", "one set")
ITEM_BYTES = 2

# The table of further rounds: (experts, experts per token, ranks), tokens a rank, factors.
ROUND_CASES = ((8, 2, 8), (64, 8, 8), (64, 8, 64), (128, 8, 8), (128, 8, 16), (128, 8, 64))
ROUND_TOKENS = (512, 4096, 16384)
ROUND_FACTORS = (1.0, 1.05, 1.1, 1.25, 1.5)
RARE = 1e-3  # a factor is given under which so small a part of the exchanges overflows


# ---- routings and what they need, in NumPy ----


def random_ids(rng: np.random.Generator, num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """[T, K]: sets of K distinct experts, each as likely as another (Floyd's sampling)."""
    ids_TK = np.empty((num_tokens, top_k), np.int32)
    for slot, last in enumerate(range(num_experts - top_k, num_experts)):
        drawn_T = rng.integers(0, last + 1, num_tokens)
        taken_T = np.any(ids_TK[:, :slot] == drawn_T[:, None], axis=1)
        ids_TK[:, slot] = np.where(taken_T, last, drawn_T)
    return ids_TK


def routing(name: str, num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """[T, K] expert ids. "zipf": expert e drawn by weight 1 / (e + 1), none twice. "one set": all take experts 0 to K - 1."""
    rng = np.random.default_rng(0)
    if name == "balanced":
        return random_ids(rng, num_tokens, num_experts, top_k)
    if name == "zipf":
        keys_TE = rng.gumbel(size=(num_tokens, num_experts)) - np.log(np.arange(1, num_experts + 1))
        return np.argsort(-keys_TE, axis=1)[:, :top_k].astype(np.int32)
    return np.broadcast_to(np.arange(top_k, dtype=np.int32), (num_tokens, top_k)).copy()


def goes_to(shape: ExchangeShape, ids_TK: np.ndarray) -> np.ndarray:
    """[T, P]: whether a token has an expert on that rank."""
    goes_TP = np.zeros((ids_TK.shape[0], shape.num_ranks), bool)
    goes_TP[np.arange(ids_TK.shape[0])[:, None], ids_TK // shape.num_local_experts] = True
    return goes_TP


def remote_rows(shape: ExchangeShape, ids_PTK: np.ndarray) -> tuple[float, float]:
    """(distinct (token, remote rank) pairs, (token, remote expert) pairs) that a rank sends, mean over the ranks."""
    rank_P11 = np.arange(shape.num_ranks)[:, None, None]
    goes = sum(goes_to(shape, ids_TK).sum() - goes_to(shape, ids_TK)[:, r].sum() for r, ids_TK in enumerate(ids_PTK))
    pairs = np.sum(ids_PTK // shape.num_local_experts != rank_P11)
    return float(goes) / shape.num_ranks, float(pairs) / shape.num_ranks


def further_rounds(shape: ExchangeShape, ids_PTK: np.ndarray) -> int:
    """Rounds beyond the first, as `make_plan` counts them."""
    if not shape.max_further_rounds:
        return 0
    most = max(int(goes_to(shape, ids_TK).sum(axis=0).max()) for ids_TK in ids_PTK)
    return -(-max(most - shape.first_rows, 0) // shape.further_rows)


def rare_factor(num_experts: int, top_k: int, ranks: int, tokens: int) -> float:
    """The buffer factor at which a random routing overflows some (rank, rank) buffer with probability RARE (a union bound)."""
    num_local = num_experts // ranks
    goes = 1 - math.comb(num_experts - num_local, top_k) / math.comb(num_experts, top_k)
    if goes == 1:
        return 1.0
    log_tail, rows = -math.inf, tokens
    while rows > tokens * goes:  # adds up Binomial(T, goes) from its upper end
        log_term = (math.lgamma(tokens + 1) - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1)
                    + rows * math.log(goes) + (tokens - rows) * math.log1p(-goes))  # fmt: skip
        log_tail = float(np.logaddexp(log_tail, log_term))
        if log_tail + 2 * math.log(ranks) > math.log(RARE):
            break
        rows -= 1
    return max(rows / (tokens * goes), 1.0)


def round_table(num_seeds: int) -> list[dict[str, Any]]:
    """Further rounds under balanced random routing: mean, and part of the seeds with any."""
    rows = []
    for experts, top_k, ranks in ROUND_CASES:
        for tokens in ROUND_TOKENS:
            shapes = [
                exchange_shape("all_to_all", num_tokens=tokens, top_k=top_k, num_experts=experts, num_ranks=ranks,
                               buffer_factor=factor) for factor in ROUND_FACTORS
            ]  # fmt: skip
            seeds = max(num_seeds * 4096 // max(tokens * ranks // 16, 4096), 4)
            found = []
            for seed in range(seeds):
                ids = random_ids(np.random.default_rng(seed), ranks * tokens, experts, top_k)
                found.append([further_rounds(shape, ids.reshape(ranks, tokens, top_k)) for shape in shapes])
            found = np.array(found)
            rows.append({
                "experts": experts, "top_k": top_k, "ranks": ranks, "tokens": tokens, "seeds": seeds,
                "mean_further": dict(zip(map(str, ROUND_FACTORS), found.mean(0).tolist(), strict=True)),
                "overflowing": dict(zip(map(str, ROUND_FACTORS), (found > 0).mean(0).tolist(), strict=True)),
                "rare_factor": rare_factor(experts, top_k, ranks, tokens),
            })  # fmt: skip
    return rows


# ---- the compiled block ----


def block_shape(kind: str, experts: int, top_k: int, ranks: int, factor: float, tokens: int = TOKENS) -> ExchangeShape:
    return exchange_shape(
        kind, num_tokens=tokens, top_k=top_k, num_experts=experts, num_ranks=ranks, buffer_factor=factor
    )


def compiled_block(shape: ExchangeShape, combine_dtype: Any = None) -> Any:
    """Value and gradients of the block on the current mesh: (x, combine weights, ids, weights) -> ((loss, rounds), gradients)."""
    settings = RoutedSettings(shape=shape, num_chunks=1, activation="silu", combine_dtype=combine_dtype)

    def local(x_TH, weights_TK, ids_TK, weights):
        varying = jax.tree.map(lambda a: vary_like(a, x_TH), weights)
        found: Any = routed_experts(settings, x_TH, weights_TK, ids_TK, varying)
        return found[:2]

    block = jax.shard_map(local, in_specs=(P(BATCH), P(BATCH), P(BATCH), P("expert")), out_specs=(P(BATCH), P()))

    def objective(*args):
        y_TH, further = block(*args)
        return jnp.sum(y_TH.astype(jnp.float32) ** 2), further

    gradient = jax.value_and_grad(objective, argnums=(0, 1, 3), has_aux=True)
    return jax.jit(gradient).lower(*block_arguments(shape, jax.ShapeDtypeStruct)).compile()


def block_arguments(shape: ExchangeShape, make: Callable[..., Any]) -> tuple[Any, ...]:
    """`make(shape, dtype, sharding=)` of every argument of the block."""
    experts, tokens, mesh = shape.num_experts, shape.num_ranks * shape.num_tokens, moe_jax.state.mesh
    batch, by_rank = (jax.NamedSharding(mesh, spec) for spec in (P(BATCH), P("expert")))
    return (
        make((tokens, HIDDEN), jnp.float16, sharding=batch), make((tokens, shape.top_k), jnp.float32, sharding=batch),
        make((tokens, shape.top_k), jnp.int32, sharding=batch),
        Weights(make((experts, HIDDEN, 2, WIDTH), jnp.float16, sharding=by_rank),
                make((experts, WIDTH, HIDDEN), jnp.float16, sharding=by_rank)),
    )  # fmt: skip


def run_block(compiled: Any, shape: ExchangeShape, ids_PTK: np.ndarray) -> int:
    """Runs the block on random rows and returns the further rounds that it reports."""
    rng = np.random.default_rng(1)

    def make(shape: tuple[int, ...], dtype: Any, *, sharding: Any) -> jax.Array:
        values = ids_PTK.reshape(shape) if dtype == jnp.int32 else rng.normal(size=shape) * 0.02
        return jax.device_put(values.astype(dtype), sharding)

    (_, further), _ = jax.block_until_ready(compiled(*block_arguments(shape, make)))
    return int(further)


def unpacked(hlo: str) -> dict[str, str]:
    """Name -> text of each computation of a compiled program."""
    return dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+)[^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL))


def further_loops(hlo: str) -> set[str]:
    """The computations within loops of unknown trip count: those of the further rounds, and of blocks and products."""
    bodies = unpacked(hlo)
    calls = r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
    to_visit = [
        match[1] for body in bodies.values() for line in body.splitlines()
        if (match := re.search(r" while\(.*body=%?([\w.\-]+)", line)) and "known_trip_count" not in line
    ]  # fmt: skip
    for body in bodies.values():  # the further blocks of one chunk are a condition
        for line in body.splitlines():
            if " conditional(" in line:
                to_visit += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
                to_visit += re.findall(r"[\w.\-]+", "".join(re.findall(r"branch_computations=\{([^}]*)\}", line)))
    loops: set[str] = set()
    while to_visit:
        name = to_visit.pop()
        if name not in loops:
            loops.add(name)
            to_visit += re.findall(calls, bodies.get(name, ""))
    return loops


def split_collectives(hlo: str) -> dict[tuple[str, str], dict[Collective, int]]:
    """("forward" or "backward", "first" or "further") -> what one round sends."""
    bodies, loops = unpacked(hlo), further_loops(hlo)

    def table(phase: str, place: str) -> dict[Collective, int]:
        text = ""
        for name, body in bodies.items():
            if (name in loops) == (place == "further"):
                kept = [line for line in body.splitlines() if ("transpose(" in line) == (phase == "backward")]
                text += f"%{name} () {{\n" + "\n".join(kept) + "\n}\n"
        return dict(read_collectives(text))

    return {(phase, place): table(phase, place) for phase in ("forward", "backward") for place in ("first", "further")}


def wire_bytes(collective: Collective, ranks: int) -> float:
    """Bytes that a device sends to others for a collective with that result."""
    part = (ranks - 1) / ranks
    return collective.num_bytes * {"reduce-scatter": ranks - 1, "all-reduce": 2 * part}.get(collective.kind, part)


def named_collectives(
    shape: ExchangeShape, combine_bytes: int, round_index: int, phase: str
) -> dict[str, Collective]:  # fmt: skip
    """What is sent in one round, by name; the result's size tells them apart."""
    gathers = shape.kind == "all_gather"
    rows, there = shape.num_rows(round_index), "all-gather" if gathers else "all-to-all"

    def back(columns: int, item_bytes: int) -> Collective:
        if gathers and item_bytes == 4:
            return Collective("reduce-scatter", shape.num_tokens * columns * item_bytes)
        return Collective("all-to-all", rows * columns * item_bytes)  # narrow parts are added up after they came

    routing = Collective(there, rows * 2 * 4 * shape.top_k)
    if phase == "forward":
        return {
            "rows there": Collective(there, rows * HIDDEN * ITEM_BYTES), "routing there": routing,
            "results back": back(HIDDEN, combine_bytes),
        }  # fmt: skip
    again = (
        {}
        if round_index == 0
        else {"rows again": Collective(there, rows * HIDDEN * ITEM_BYTES), "routing again": routing}
    )
    return again | {
        "dy there": Collective(there, rows * HIDDEN * ITEM_BYTES),
        "dx back": back(HIDDEN, ITEM_BYTES),
        "d weights back": back(shape.top_k, 4),
    }


def attribute(shape: ExchangeShape, hlo: str, combine_bytes: int) -> dict[str, dict[str, float]]:
    """ "first" and "further" -> name -> bytes on the wire per device in such a round; "other" for what has no name."""
    found: dict[tuple[str, str], dict[Collective, int]] = split_collectives(hlo)
    sent: dict[str, dict[str, float]] = {"first": {}, "further": {}}
    for (phase, place), left in found.items():
        if place == "first" or shape.max_further_rounds:
            for name, collective in named_collectives(shape, combine_bytes, int(place == "further"), phase).items():
                if not left.get(collective):
                    raise ValueError(f"{shape.kind}, {shape.num_ranks} ranks: no {collective} for {name!r} in {left}")
                left[collective] -= 1
                sent[place][name] = wire_bytes(collective, shape.num_ranks)
        sent[place][f"other {phase}"] = sum(n * wire_bytes(c, shape.num_ranks) for c, n in left.items())
    return sent


def memory(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def only_first_round(shape: ExchangeShape) -> ExchangeShape:
    """The same buffers with no code for further rounds, and next to none for further blocks: what a routing that fits needs."""
    return dataclasses.replace(shape, max_further_rounds=0, further_pairs=1)


def measure_case(experts: int, top_k: int, ranks: int) -> dict[str, Any]:
    """Bytes, memory and rounds of one model size on `ranks` devices."""
    ids = {n: routing(n, ranks * TOKENS, experts, top_k).reshape(ranks, TOKENS, top_k) for n in ROUTINGS}
    shapes = {kind: block_shape(kind, experts, top_k, ranks, FACTOR) for kind in ("all_to_all", "all_gather")}
    ours = shapes["all_to_all"]
    sent, temp = {}, {}
    for kind, combine in (("all_to_all", "float32"), ("all_to_all", "compute"), ("all_gather", "float32")):
        compiled = compiled_block(shapes[kind], jnp.float16 if combine == "compute" else None)
        sent[f"{kind} {combine}"] = attribute(shapes[kind], compiled.as_text(), 4 if combine == "float32" else 2)
        temp[f"{kind} {combine}"] = memory(compiled)
        if ranks <= MOST_RUN and combine == "float32":
            for name in ROUTINGS:
                counted, ran = further_rounds(shapes[kind], ids[name]), run_block(compiled, shapes[kind], ids[name])
                if ran != counted:
                    raise ValueError(f"{kind}, {ranks} ranks, {name}: ran {ran} further rounds, NumPy says {counted}")
    others = {
        "balanced need": only_first_round(block_shape("all_to_all", experts, top_k, ranks, 1.0)),
        "only first round": only_first_round(ours),
        "worst case": block_shape("all_to_all", experts, top_k, ranks, WORST),
    }
    if ranks == MOST_RUN:
        others["twice the tokens"] = block_shape("all_to_all", experts, top_k, ranks, FACTOR, 2 * TOKENS)
    temp |= {name: memory(compiled_block(shape)) for name, shape in others.items()}
    return {
        "experts": experts, "top_k": top_k, "ranks": ranks, "tokens": TOKENS, "shape": dataclasses.asdict(ours),
        "sent": sent, "temp": temp, "further": {n: further_rounds(ours, ids[n]) for n in ROUTINGS},
        "remote": {n: remote_rows(ours, ids[n]) for n in ROUTINGS},
    }  # fmt: skip


def measure(ranks: int) -> list[dict[str, Any]]:
    """All cases of one expert degree, in this process."""
    moe_jax.init({"expert_parallel_degree": ranks})
    cases = []
    for experts, top_k in SIZES:
        if experts % ranks == 0:
            started = time.perf_counter()
            cases.append(measure_case(experts, top_k, ranks))
            print(f"EP{ranks}, {experts} experts: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return cases


# ---- tables ----


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a Markdown table, the first column to the left."""
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def name_of(case: dict[str, Any]) -> str:
    return f"E {case['experts']}, k {case['top_k']}, EP{case['ranks']}"


def per_token(case: dict[str, Any], num_bytes: float) -> str:
    """In rows of H x 2 bytes for each token of the device."""
    return f"{num_bytes / (case['tokens'] * HIDDEN * ITEM_BYTES):.2f}"


def all_bytes(round_: dict[str, float]) -> float:
    return sum(num_bytes for name, num_bytes in round_.items())


def sent_lines(cases: list[dict[str, Any]]) -> Iterator[str]:
    """What the first round sends, per token, and all of a further one."""
    names = ("rows there", "routing there", "results back", "dy there", "dx back", "d weights back")
    rows = []
    for case in cases:
        least, copies = (f"{n / case['tokens']:.2f}" for n in case["remote"]["balanced"])
        for program, sent in case["sent"].items():
            first, further = sent["first"], sent["further"]
            cells = [per_token(case, first[name]) for name in names]
            sums = [per_token(case, all_bytes(first)), per_token(case, all_bytes(further)) if len(further) > 2 else "-"]
            rows.append([f"{name_of(case)}, {program}", least, copies, *cells, *sums])
    yield from table(("case", "least", "copies", *names, "first round", "further round"), rows)


def ratio_lines(cases: list[dict[str, Any]]) -> Iterator[str]:
    """Rows there and results back ("compute"), all rounds, over the least, and over one copy per pair."""
    rows = []
    for case in cases:
        sent, gathered = case["sent"]["all_to_all compute"], case["sent"]["all_gather float32"]["first"]["rows there"]
        for name in ROUTINGS:
            least, copies = (n * HIDDEN * ITEM_BYTES for n in case["remote"][name])
            further = case["further"][name]
            there, back = (
                sent["first"][n] + further * sent["further"].get(n, 0.0) for n in ("rows there", "results back")
            )
            ratios = (there / least, back / least, there / copies, gathered / least, least / copies)
            rows.append([f"{name_of(case)}, {name}", str(further), *(f"{ratio:.2f}" for ratio in ratios)])
    yield from table(
        ("case", "further rounds", "there / least", "back ('compute') / least", "there / copies", "all_gather: there / least",
         "ragged: there / copies"), rows,
    )  # fmt: skip


def memory_lines(cases: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for case in cases:
        temp = case["temp"]
        ours, need, worst = temp["all_to_all float32"], temp["balanced need"], temp["worst case"]
        mega = [temp[n] / 1e6 for n in ("balanced need", "all_to_all float32", "all_to_all compute", "only first round",
                                        "all_gather float32", "worst case")]  # fmt: skip
        twice = f"{temp['twice the tokens'] / ours:.2f}" if "twice the tokens" in temp else ""
        rows.append([name_of(case), *(f"{m:,.0f}" for m in mega), f"{ours / need:.2f}", f"{worst / ours:.2f}", twice])
    yield from table(
        ("MB a device", "balanced need", f"all_to_all {FACTOR:g}", "'compute'", "only first round", "all_gather",
         "worst case", f"{FACTOR:g} / need", f"worst / {FACTOR:g}", "2 T / T"), rows,
    )  # fmt: skip


def round_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Mean further rounds (part of the routings that overflow), and the cheapest of the factors."""
    lines = []
    for row in rows:
        cells = [f"{row['mean_further'][f]:.2f} ({row['overflowing'][f]:.0%})" for f in row["mean_further"]]
        cost = {f: float(f) * (1 + further / FURTHER_PART) for f, further in row["mean_further"].items()}
        name = f"E {row['experts']}, k {row['top_k']}, EP{row['ranks']}, T {row['tokens']:,}"
        lines.append([name, *cells, min(cost, key=lambda f: cost[f]), f"{row['rare_factor']:.2f}", str(row["seeds"])])
    yield from table(
        ("case", *(f"factor {f:g}" for f in ROUND_FACTORS), "fewest bytes", f"factor for {RARE:g}", "seeds"), lines
    )


def header_lines() -> list[str]:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    return [
        f"{time.strftime('%Y-%m-%d')}, {versions}, simulated CPU devices; python {' '.join(sys.argv)}",
        f"{TOKENS} tokens a device, hidden {HIDDEN}, expert width {WIDTH}, float16 for bfloat16, factor {FACTOR:g}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, nargs="*", default=DEGREES, help="expert degrees; none for the rounds alone")
    parser.add_argument("--seeds", type=int, default=40, help="routings of a case of 4,096 tokens on 16 ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    print("\n".join(header_lines()), flush=True)
    cases = []
    for ranks in args.ep:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"}
        done = subprocess.run([sys.executable, __file__, "--measure", str(ranks)], check=True, env=env,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
        cases += json.loads(done.stdout)
    cases.sort(key=lambda case: (case["experts"], case["ranks"]))
    rounds = round_table(args.seeds)
    if cases:
        print("\nSent by a device, in rows of H x 2 bytes a token, balanced routing\n", *sent_lines(cases), sep="\n")
        print("\nAgainst the least, forward, all rounds\n", *ratio_lines(cases), sep="\n")
        print("\nTemporary memory, forward and backward\n", *memory_lines(cases), sep="\n")
    print(
        "\nFurther rounds of all_to_all under balanced random routing: mean (part with any)\n",
        *round_lines(rounds),
        sep="\n",
    )
    if args.json:
        args.json.write_text(json.dumps({"header": header_lines(), "cases": cases, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
