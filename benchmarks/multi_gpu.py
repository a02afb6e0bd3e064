"""Expert parallelism on several GPUs of one host, checked and measured: `python benchmarks/multi_gpu.py --out FOLDER`.

1. Checks against one device of the same host, default XLA flags (in float32 with full-precision products): results and gradients
   of the MoE layer, and losses and SGD's momentum (all gradients) of three steps of a model of two layers, by relative norm; each
   EP degree (the rest is fsdp) and exchange; 2 experts a rank (1 per token) and 16 (4 per token); routing natural, one set (all
   tokens to the same experts, of one rank) and half empty. In bf16 near-tied tokens of the second layer change experts, so steps
   are held to the limit by their losses, and by the norm of all gradients only under "one set".
2. Rates, bf16, all_to_all, equal tokens a GPU: the layer, forward and backward, and the step of `moe-jax train` (AdamW, remat
   full), naturally routed by random weights; "further" rounds were needed beyond the first. TFLOP/s: products of the forward pass
   three times, nothing recomputed. "no exchange": the same program, but a rank computes the rows that it would have sent, so that
   the work is equal over all ranks. "alone": the compiled program's all-to-alls and nothing else, one after another. With t the
   time: exposed = (t - no exchange) / t, share = alone / t, hidden = 1 - (t - no exchange) / alone. GB/s: what a GPU sends to
   others over the time alone; of the link, one large all-to-all, and a permutation by one rank. "1 GPU" sends nothing.
3. 200 steps of a small model on all devices in two chunks. Whatever stays silent for STUCK_SECONDS ends the run with exit code 1.

JSON and tables are written after each case; a group of cases that would not fit into the limit (by the longest of its kind so far)
is not started, and listed. --simulate 8 tests this script on CPU devices.
"""

import os

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from exchange import table
from scaling import MODELS

import moe_jax
from moe_jax.checkpoint import TrainState
from moe_jax.cli import simulate_devices
from moe_jax.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.hf import abstract_model, model_config_of
from moe_jax.moe import exchange, routed
from moe_jax.moe.layer import MoE
from moe_jax.optim import leaf_names, make_optimizer, make_schedule
from moe_jax.plan import Collective, Table, read_collectives
from moe_jax.run_config import OptimizerConfig
from moe_jax.sharding import BATCH, P, batch_spec, parameter_shardings
from moe_jax.train_step import make_train_step, put_batch

FLOAT32, BF16 = 1e-5, 1e-2  # relative norms
ROUTINGS = ("natural", "one set", "half empty")
BIAS = 4.0  # of a chosen expert's logit, whose noise is below 1
STEPS, HANG_STEPS, STUCK_SECONDS = 3, 200, 240
SCALE = 0.05  # of weights: no layer amplifies rounding
SGD = optax.sgd(0.05, momentum=0.9)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def use(ep: int, devices: int | None = None) -> None:
    moe_jax.init({"expert_parallel_degree": ep}, devices=jax.devices()[:devices])


def degrees() -> list[int]:
    return [ep for ep in (1, 2, 4, 8) if jax.device_count() % ep == 0]


def put(array: np.ndarray) -> jax.Array:
    return jax.device_put(array, jax.NamedSharding(moe_jax.state.mesh, batch_spec(array.ndim)))


def compile_all(lowered: list[Any], workers: int) -> list[Any]:
    """At once; an error in the place of a program that XLA refuses."""

    def compiled(one: Any) -> Any:
        try:
            return one.compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(compiled, lowered))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160].replace("|", "/")


def both(layer: MoE, x: jax.Array, mask: jax.Array, dy: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """The results of a layer, forward and backward, in the dtype of x; further rounds."""

    def forward(layer: MoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, figures, _ = layer(x, mask, x.dtype, train=True)
        return y, figures.further_rounds

    y, pull, rounds = jax.vjp(forward, layer, x, has_aux=True)
    d_layer, dx = pull(dy)
    grads = dict(zip(leaf_names(d_layer), jax.tree.leaves(d_layer), strict=True))
    return {"y": y, "dx": dx, **grads}, rounds


# ---- checks ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A program of one layer or one step; the routing is in its data."""

    part: str
    dtype: str
    experts: int
    top_k: int
    ep: int = 1
    exchange: Any = "all_to_all"
    devices: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        return (f"{self.part} {self.dtype}, {self.experts // self.ep} experts a rank, EP{self.ep} x FSDP"
                f"{self.devices // self.ep}, {self.exchange}")  # fmt: skip

    @property
    def moe(self) -> MoEConfig:
        return MoEConfig(moe_load_balancing="aux_loss", moe_exchange=self.exchange, moe_num_chunks=self.chunks)


def small_config(check: Check, *, tiny: bool) -> ModelConfig:
    hidden = 64 if tiny else 256
    return ModelConfig(
        family="mixtral", vocab_size=128, hidden_size=hidden, intermediate_size=hidden, moe_intermediate_size=hidden // 2,
        num_experts=check.experts, num_experts_per_tok=check.top_k, num_heads=4, num_kv_heads=2, head_dim=hidden // 4,
        layers=(LayerConfig(),) * 2, rope=RopeConfig(), norm_topk_prob=False,
    )  # fmt: skip


def drawn(name: str, shape: tuple[int, ...], check: Check, routing: str) -> np.ndarray:
    """A parameter of that name, the same on every mesh; what is seen by row 0 of a router is positive for all tokens."""
    if name.split(".")[-2:-1] and "norm" in name.split(".")[-2]:
        return np.ones(shape, np.float32)
    value = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)
    value *= 0.5 if name.startswith("embed") else SCALE
    if name.endswith("router"):
        chosen = {"natural": 0, "one set": check.top_k, "half empty": max(check.top_k, check.experts // 2)}[routing]
        value[..., 0, :] = BIAS * (np.arange(check.experts) < chosen)
    elif name.startswith("embed"):
        value[:, 0] = 0.5  # about 1 after the norm
    return value


def filled(abstract: Any, check: Check, routing: str) -> Any:
    leaves, shardings = jax.tree.leaves(abstract), jax.tree.leaves(parameter_shardings(abstract))
    values = [
        jax.device_put(drawn(name, leaf.shape, check, routing), sharding)
        for name, leaf, sharding in zip(leaf_names(abstract), leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), values)


def arguments(check: Check, routing: str, *, tiny: bool) -> tuple[Any, ...]:
    """Of the program of a check, on the current mesh, the same values on every mesh; some tokens are padding."""
    config, rng = small_config(check, tiny=tiny), np.random.default_rng(0)
    dtype, rows, length = DTYPES[check.dtype], 8, 24 if tiny else 64
    mask = np.arange(length) < rng.integers(length // 2, length + 1, rows)[:, None]
    if check.part == "layer":
        layer = filled(jax.eval_shape(lambda: MoE(config, check.moe, key=jax.random.key(0))), check, routing)
        x, dy = (rng.normal(size=(rows, length, config.hidden_size)).astype(dtype) for _ in range(2))
        x[:, :, 0] = 1
        return layer, put(x), put(mask), put(dy)
    model = filled(abstract_model(config, check.moe, dtype, None), check, routing)
    batch = {
        "tokens": rng.integers(0, config.vocab_size, mask.shape).astype(np.int32),
        "segment_ids": mask.astype(np.int32),
    }
    step = jax.device_put(np.int32(0), jax.NamedSharding(moe_jax.state.mesh, P()))
    return TrainState(model, SGD.init(model), step), put_batch(batch, 1)


def lowered_check(check: Check, *, tiny: bool) -> Any:
    use(check.ep, check.devices)
    program = jax.jit(both) if check.part == "layer" else make_train_step(SGD, optax.constant_schedule(0.05))
    with jax.default_matmul_precision("highest") if check.dtype == "float32" else contextlib.nullcontext():
        return program.lower(*arguments(check, "natural", tiny=tiny))


def on_host(arrays: Any) -> list[np.ndarray]:
    return [np.asarray(a).astype(np.float64) for a in jax.tree.leaves(arrays)]


def results(program: Any, check: Check, routing: str, *, tiny: bool) -> dict[str, np.ndarray]:
    """Name -> values; of a step the losses, and the momentum: the gradients without the rounding of the parameters."""
    use(check.ep, check.devices)
    first, *rest = arguments(check, routing, tiny=tiny)
    if check.part == "layer":
        found, rounds = program(first, *rest)
        return {**dict(zip(sorted(found), on_host(found), strict=True)), "rounds": np.asarray(rounds)}
    state, losses = first, []
    for _ in range(STEPS):
        state, metrics = program(state, *rest)
        losses.append(float(metrics.loss))
    momentum = dict(zip(leaf_names(state.model), on_host(state.opt_state), strict=True))
    return {"loss": np.array(losses), **momentum, "rounds": np.asarray(metrics.further_rounds)}


def compared(
    check: Check, routing: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> dict[str, Any]:
    """A record of the relative norms; ok: all that are held to the limit are below it (NaN is not)."""
    norms = {n: (np.linalg.norm(found[n] - e), np.linalg.norm(e)) for n, e in expected.items() if n != "rounds"}
    if check.part == "step":
        norms["gradients"] = tuple(np.linalg.norm([v for n, v in norms.items() if n != "loss"], axis=0))
    errors = {name: float(wrong / size) if size else float(wrong) for name, (wrong, size) in norms.items()}
    limit, held = FLOAT32, errors
    if check.dtype == "bfloat16":
        limit = BF16
        if check.part == "step":
            held = {name: errors[name] for name in (("loss", "gradients") if routing == "one set" else ("loss",))}
    worst = max(held, key=lambda name: np.nan_to_num(held[name], nan=np.inf))
    return {"kind": "check", "name": str(check), **dataclasses.asdict(check), "routing": routing, "errors": errors,
            "limit": limit, "worst": held[worst], "worst_of": worst, "ok": held[worst] < limit,
            "rounds": int(found["rounds"].max())}  # fmt: skip


def check_groups(simulated: bool) -> Iterator[list[Check]]:
    """Programs that are compiled together; the first of an expert number is on one device, the reference of the others."""
    kinds = ("all_to_all",) if simulated else ("all_to_all", "all_gather", "ragged", "auto")
    eps = degrees() if not simulated else degrees()[-1:]
    for (local, top_k), dtype in itertools.product(((2, 1), (16, 4)), DTYPES):
        for part in ("layer", "step"):
            if simulated and (local == 16) != ((part, dtype) == ("layer", "bfloat16")):
                continue  # each part and dtype once
            group = []
            for ep in reversed(eps):
                base = Check(part=part, dtype=dtype, experts=local * ep, top_k=top_k)
                here = ("all_to_all",) if ep == 1 else kinds if (local, part) != (16, "step") else kinds[::2]
                devices = jax.device_count()
                group += [base, *(dataclasses.replace(base, ep=ep, exchange=kind, devices=devices) for kind in here)]
            yield group


def run_checks(run: "Run") -> None:
    part = 0.45 if run.args.only == "all" else 0.95
    for group in check_groups(run.tiny):
        name = f"checks: {group[0].part} {group[0].dtype}, {group[0].top_k} per token"
        if not run.starts("checks", name, part):
            continue
        programs = compile_all([lowered_check(check, tiny=run.tiny) for check in group], run.workers)
        expected: dict[str, Any] = {}
        for check, program in zip(group, programs, strict=True):
            try:
                if isinstance(program, Exception):
                    raise program
                found = {routing: results(program, check, routing, tiny=run.tiny) for routing in ROUTINGS}
            except Exception as error:
                expected = expected if check.devices > 1 else {}
                run.add({"kind": "check", "name": str(check), "note": first_line(error), "ok": False})
                continue
            if check.devices == 1:
                expected = found
                continue
            for routing in ROUTINGS if expected else ():
                run.add(compared(check, routing, found[routing], expected[routing]))


def run_hang_test(run: "Run") -> None:
    ep = degrees()[-1]
    check = Check(part="step", dtype="bfloat16", experts=2 * ep, top_k=2, ep=ep, devices=jax.device_count(), chunks=2)
    program, losses, started = lowered_check(check, tiny=True).compile(), [], time.perf_counter()
    state, batch = arguments(check, "natural", tiny=True)
    for number in range(1, HANG_STEPS + 1):
        state, metrics = program(state, batch)
        if number % 20 == 0 or run.tiny:
            losses.append(float(metrics.loss))
        if number % 20 == 0:
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            print(f"        step {number}: loss {losses[-1]:.4f}, {time.perf_counter() - started:.1f} s", flush=True)
    run.add({"kind": "hang", "name": f"{HANG_STEPS} steps, {check}", "losses": losses, "ok": losses[-1] < losses[0]})


# ---- rates ----


def seconds(call: Callable[[], Any], *, repeats: int = 5, target: float = 0.2) -> tuple[float, float, float]:
    """(median, least, most) seconds of a call; calls are queued, and the last is waited for."""

    def clock(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count - 1):
            out = call()
            if jax.default_backend() == "cpu":  # simulated devices run dry of threads where programs queue up
                jax.block_until_ready(out)
        jax.block_until_ready(call())
        return (time.perf_counter() - started) / count

    clock(2)
    count = min(max(round(target / clock(1)), 2), 100)
    times = [clock(count) for _ in range(repeats)]
    return statistics.median(times), min(times), max(times)


@contextlib.contextmanager
def without_exchange() -> Iterator[None]:
    """What is traced in here sends nothing: a rank takes the rows that it would have sent for received ones.

    Of a row in block p the experts of rank p count, so that all pairs are computed, once; this needs as much work as the real
    exchange under an even load.
    """

    def local_by_block(shape: exchange.ExchangeShape, ids_MK: jax.Array) -> jax.Array:
        block_M = jnp.arange(ids_MK.shape[0]) // (ids_MK.shape[0] // shape.num_ranks)
        local = ids_MK - block_M[:, None] * shape.num_local_experts
        return jnp.where((local >= 0) & (local < shape.num_local_experts), local, shape.num_local_experts)

    real = exchange.swap_blocks, routed.local_expert_ids
    exchange.swap_blocks, routed.local_expert_ids = lambda rows: rows, local_by_block
    jax.clear_caches()
    try:
        yield
    finally:
        exchange.swap_blocks, routed.local_expert_ids = real
        jax.clear_caches()


def collectives_seconds(sizes: Table, one: Callable[[jax.Array], jax.Array]) -> float:
    """Of nothing but collectives with results of so many bytes a device, so often, one after another."""
    ep, world = moe_jax.state.expert_size, moe_jax.state.world_size

    def all_of(*buffers: jax.Array) -> list[jax.Array]:
        out = []
        for buffer, count in zip(buffers, sizes.values(), strict=True):
            for _ in range(count):  # not a loop on the device, which would copy its carry
                buffer = one(buffer)
            out.append(buffer)
        return out

    def zeros(num_bytes: int) -> jax.Array:
        size = -(-num_bytes // (2 * ep)) * ep * world  # equal parts of two-byte numbers
        return jnp.zeros(size, jnp.bfloat16, device=jax.NamedSharding(moe_jax.state.mesh, P(BATCH)))

    program = jax.jit(jax.shard_map(all_of, in_specs=P(BATCH), out_specs=P(BATCH)))
    return seconds(functools.partial(program, *(zeros(c.num_bytes) for c in sizes)))[0]


def sent_rate(sizes: Table, taken: float) -> float:
    """GB/s that a device sends to others in all-to-alls."""
    ep = moe_jax.state.expert_size
    return sum(c.num_bytes * n for c, n in sizes.items()) * (ep - 1) / ep / taken / 1e9


@functools.cache
def link_rates(ep: int, num_bytes: int) -> dict[str, float]:
    """GB/s over the expert axis of the current mesh."""
    around = [(r, (r + 1) % ep) for r in range(ep)]
    sizes = {Collective("all-to-all", num_bytes): 1}
    shift = collectives_seconds(sizes, lambda x: jax.lax.ppermute(x, "expert", around))
    plain = collectives_seconds(sizes, exchange.swap_blocks)
    return {"link": sent_rate(sizes, plain), "permute": num_bytes / shift / 1e9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """What is timed on one mesh."""

    model: str
    part: str
    devices: int
    ep: int

    def __str__(self) -> str:
        split = f"EP{self.ep} x FSDP{self.devices // self.ep}" if self.devices > 1 else "1 GPU"
        return f"{self.model} {self.part}, {split}"


def rate_cases(models: Sequence[str]) -> list[Rate]:
    """The most telling first."""
    n, eps = jax.device_count(), degrees()
    first = [(n, 1), (n, eps[-1]), (1, 1)]
    splits = (first, [(n, ep) for ep in eps[1:-1]])
    return [Rate(model=m, part=part, devices=devices, ep=ep)
            for split in splits for m in models for part in ("layer", "step") for devices, ep in split]  # fmt: skip


def flops_per_token(config: ModelConfig, part: str, length: int) -> float:
    """Forward and backward; causal attention half of the square."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    experts = config.num_experts_per_tok * 3 * hidden * config.moe_intermediate_size
    if part == "layer":
        return 6.0 * experts
    attention = hidden * (2 * heads + 2 * config.num_kv_heads * config.head_dim) + heads * length
    layer = attention + experts + hidden * config.num_experts
    return 6.0 * (layer * config.num_layers + hidden * config.vocab_size)


def rate_inputs(
    case: Rate, hf: dict[str, Any], rows: int, length: int
) -> tuple[Any, list[Any], Callable[[MoEConfig], Any]]:
    """(program, its arguments, the structure of the first of them under a `MoEConfig`), on the current mesh."""
    config, bf16 = model_config_of(hf), jnp.bfloat16
    if case.part == "layer":

        def make(moe: MoEConfig) -> MoE:
            return jax.tree.map(lambda a: a.astype(bf16), MoE(config, moe, key=jax.random.key(0)))

        abstract = lambda moe: jax.eval_shape(lambda: make(moe))  # noqa: E731
        shardings = parameter_shardings(abstract(MoEConfig()))
        layer = jax.jit(lambda: jax.tree.leaves(make(MoEConfig())), out_shardings=jax.tree.leaves(shardings))()
        shape, sharding = (rows, length, config.hidden_size), jax.NamedSharding(moe_jax.state.mesh, batch_spec(3))
        draw = jax.jit(lambda n: jax.random.normal(jax.random.key(n), shape, bf16), out_shardings=sharding)
        return jax.jit(both), [layer, draw(1), put(np.ones((rows, length), bool)), draw(2)], abstract
    settings = OptimizerConfig(learning_rate=0.0)  # so that the routing stays
    optimizer = make_optimizer(settings, 1000)

    def abstract_state(moe: MoEConfig) -> TrainState:
        model = abstract_model(config, moe, bf16, None)
        return TrainState(model, jax.eval_shape(optimizer.init, model), jax.ShapeDtypeStruct((), jnp.int32))

    model = moe_jax.transform(hf, MoEConfig(moe_load_balancing="aux_loss"), dtype="bfloat16")
    step = jax.device_put(np.int32(0), jax.NamedSharding(moe_jax.state.mesh, P()))
    leaves = jax.tree.leaves(TrainState(model, jax.jit(optimizer.init)(model), step))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    batch = put_batch({"tokens": tokens, "segment_ids": np.ones_like(tokens)}, 1)
    return make_train_step(optimizer, make_schedule(settings, 1000)), [leaves, batch], abstract_state


def time_program(case: Rate, program: Any, arguments: list[Any], structure: Any) -> tuple[tuple[float, ...], int]:
    """(seconds, further rounds); a step's state is donated, so its new leaves take the place of the old ones."""
    rounds = 0

    def call() -> Any:
        nonlocal rounds
        first = jax.tree.unflatten(structure, arguments[0])
        out, figures = program(first, *arguments[1:])
        if case.part == "step":
            arguments[0] = jax.tree.leaves(out)
        rounds = figures if case.part == "layer" else figures.further_rounds
        return out

    taken = seconds(call)
    return taken, int(np.max(np.asarray(rounds)))


def measure_rates(run: "Run", case: Rate) -> None:
    """Rows of one mesh, by number of chunks."""
    use(case.ep, case.devices)
    rows, length = run.args.rows * case.devices, run.length
    hf = MODELS[case.model] | {"num_hidden_layers": run.args.layers}
    program, arguments, abstract = rate_inputs(case, hf, rows, length)
    keys = [(chunks, silent) for chunks in run.chunks[: case.ep] for silent in (False, True)[: case.ep]]
    lowered, structures = [], []
    for chunks, silent in keys:
        structures.append(jax.tree.structure(abstract(MoEConfig(moe_load_balancing="aux_loss", moe_num_chunks=chunks))))
        with without_exchange() if silent else contextlib.nullcontext():
            lowered.append(program.lower(jax.tree.unflatten(structures[-1], arguments[0]), *arguments[1:]))
    programs = dict(zip(keys, compile_all(lowered, run.workers), strict=True))
    for one in programs.values():
        if isinstance(one, Exception):
            raise one
    sent = {key: {c: n for c, n in read_collectives(one.as_text()).items() if c.kind == "all-to-all"}
            for key, one in programs.items()}  # fmt: skip
    timed = {key: time_program(case, programs[key], arguments, structures[i]) for i, key in enumerate(keys)}
    del programs, lowered
    tokens, flops = run.args.rows * length, flops_per_token(model_config_of(hf), case.part, length)
    for chunks in sorted({chunks for chunks, _ in keys}):
        (taken, least, most), rounds = timed[chunks, False]
        record: dict[str, Any] = {
            "kind": "rate", "name": str(case), **dataclasses.asdict(case), "chunks": chunks, "rounds": rounds, "seconds": taken,
            "least": least, "most": most, "tokens_per_second": tokens / taken, "tflops": flops * tokens / taken / 1e12,
        }  # fmt: skip
        if case.ep > 1:
            if not sent[chunks, False] or sent[chunks, True]:
                raise ValueError(f"all-to-alls, and without exchange: {sent[chunks, False]}, {sent[chunks, True]}")
            alone, silent = collectives_seconds(sent[chunks, False], exchange.swap_blocks), timed[chunks, True][0][0]
            record |= {"no_exchange": silent, "alone": alone, "exposed": 1 - silent / taken, "share": alone / taken,
                       "hidden": 1 - (taken - silent) / alone, "rate": sent_rate(sent[chunks, False], alone),
                       **link_rates(case.ep, run.args.link_mib * 2**20)}  # fmt: skip
        run.add(record)


# ---- output ----


def check_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """Worst error by part, dtype, split and exchange, each routing a column."""
    rows: dict[str, dict[str, Any]] = {}
    for r in records:
        rows.setdefault(r["name"], {})[r.get("routing", "note")] = r
    cells = [
        [name, *(f"{by[n]['worst']:.1e} ({by[n]['rounds']})" if n in by else "-" for n in ROUTINGS),
         by["note"]["note"] if "note" in by else f"{next(iter(by.values()))['limit']:g}",
         "ok" if all(r["ok"] for r in by.values()) else "FAIL"]
        for name, by in rows.items()
    ]  # fmt: skip
    yield from table(("worst relative norm (further rounds)", *ROUTINGS, "limit", "result"), cells)


def rate_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    base = {(r["model"], r["part"]): r["tflops"] for r in records if r.get("ep") == 1 and r["devices"] > 1}
    rows = []
    for r in records:
        if "note" in r:
            rows.append([r["name"], r["note"], *[""] * 15])
            continue
        ratio = f"{r['tflops'] / base[r['model'], r['part']]:.2f}" if (r["model"], r["part"]) in base else "-"
        cells = [r["name"], str(r["chunks"]), str(r["rounds"]), f"{r['seconds'] * 1e3:.2f} ({r['least'] * 1e3:.2f}-"
                 f"{r['most'] * 1e3:.2f})", f"{r['tokens_per_second']:,.0f}", f"{r['tflops']:.3g}", ratio]  # fmt: skip
        milli = [f"{r[n] * 1e3:.2f}" if n in r else "-" for n in ("no_exchange", "alone")]
        parts = [f"{r[n]:.0%}" if n in r else "-" for n in ("exposed", "share", "hidden")]
        rows.append([*cells, *milli, *parts, *(f"{r[n]:.3g}" if n in r else "-" for n in ("rate", "link", "permute"))])
    yield from table(
        ("case", "chunks", "further", "ms (least-most)", "tokens/s a GPU", "TFLOP/s a GPU", "of EP1", "no exchange ms", "alone ms",
         "exposed", "share", "hidden", "GB/s", "link all-to-all", "link permute"), rows,
    )  # fmt: skip


class Run:
    """The records so far, written after each case, and the time."""

    def __init__(self, args: argparse.Namespace, header: str) -> None:
        self.args, self.header, self.tiny = args, header, bool(args.simulate)
        self.length = 32 if self.tiny else 4096
        self.workers = 1 if self.tiny else 16
        self.chunks = (2,) if self.tiny else (1, 2)
        self.records: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.started = self.group_started = time.perf_counter()
        self.longest: dict[str, float] = {}
        self.group = ""

    def starts(self, kind: str, name: str, part: float) -> bool:
        """Whether there is time in that part of the limit for a group as long as the longest of its kind."""
        now = time.perf_counter()
        self.longest[self.group] = max(self.longest.get(self.group, 0.0), now - self.group_started)
        self.group, self.group_started = kind, now
        fits = now - self.started + self.longest.get(kind, 0.0) < part * self.args.limit_seconds
        if not fits:
            self.left_out.append(name)
        print(f"{now - self.started:6.0f} s  {name}{'' if fits else ': not started, limit'}", flush=True)
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        return fits

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        print("  ", record["name"], json.dumps({n: v for n, v in record.items() if n in SHOWN}), flush=True)
        self.write()

    def lines(self) -> list[str]:
        of = {kind: [r for r in self.records if r["kind"] == kind] for kind in ("check", "rate", "hang")}
        failed = sorted({r["name"] for r in self.records if not r.get("ok", True)})
        hang = [
            f"{r['name']}: {'ok' if r['ok'] else 'FAIL'}, losses {r['losses'][0]:.3f} to {r['losses'][-1]:.3f}"
            for r in of["hang"]
        ]
        return [self.header, "", *rate_lines(of["rate"]), "", *check_lines(of["check"]), "", *hang, "",
                f"failed: {failed or 'none'}; left out: {self.left_out or 'none'}"]  # fmt: skip

    def write(self) -> None:
        if self.args.out:
            self.args.out.mkdir(parents=True, exist_ok=True)
            content = {"header": self.header, "left_out": self.left_out, "records": self.records}
            (self.args.out / "multi_gpu.json").write_text(json.dumps(content, indent=1) + "\n")
            (self.args.out / "multi_gpu.md").write_text("\n".join(self.lines()) + "\n")


SHOWN = ("routing", "worst", "worst_of", "ok", "rounds", "note", "chunks", "seconds", "tflops", "exposed", "share", "hidden",
         "rate", "link", "permute")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for multi_gpu.json and multi_gpu.md")
    parser.add_argument("--limit-seconds", type=float, default=540.0)
    parser.add_argument("--only", choices=("all", "checks", "rates"), default="all")
    parser.add_argument("--models", default="Mixtral-8x7B,Qwen3-30B-A3B,OLMoE-1B-7B")
    parser.add_argument("--layers", type=int, default=2, help="of a step's model")
    parser.add_argument("--rows", type=int, default=2, help="of 4,096 tokens, a GPU")
    parser.add_argument("--link-mib", type=int, default=512, help="size of the link's test a GPU")
    parser.add_argument("--simulate", type=int, default=0)
    args = parser.parse_args()
    if args.simulate:
        simulate_devices(args.simulate)
        args.models, args.link_mib = "tiny", 1
    header = (f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}; "
              f"python {' '.join(sys.argv)}; {args.rows} rows a GPU, {args.layers} layers in a step")  # fmt: skip
    print(header, flush=True)
    run = Run(args, header)
    if args.only != "rates":
        run_checks(run)
    for case in rate_cases(args.models.split(",")) if args.only != "checks" else ():
        if run.starts("rates", str(case), 0.93):
            try:
                measure_rates(run, case)
            except Exception as error:  # one that does not fit must not end the run
                run.add({"kind": "rate", "name": str(case), "note": first_line(error), "ok": False})
    if run.starts("hang", "steps against a hang", 1.0):
        run_hang_test(run)
    faulthandler.cancel_dump_traceback_later()
    run.write()
    print(*run.lines(), f"{time.perf_counter() - run.started:.0f} s", sep="\n")
    return 0 if run.records and all(r.get("ok", True) for r in run.records) else 1


if __name__ == "__main__":
    sys.exit(main())
