"""Schedules and memory of programs for many GPUs, compiled on a host with one: `python benchmarks/scaling.py --out FOLDER`.

Ahead of time, for 8, 16 and 64 GPUs (expert degree 8 x fsdp) that need not be there: the MoE layer, forward and backward, and the
whole training step with AdamW (of two layers, scanned), of three published models, bf16, 4,096 tokens a row. Read from each
compiled program: its collectives, which of them are asynchronous, what the schedule places between their start and their end, and
memory per device. Nothing runs; the figures say what may overlap, not how long it takes.

A case that fails is a row with its error. --limit-seconds starts no further case. --target-config compiles without any GPU, from a
text file that describes one. --simulate 8 is one small case on CPU devices, where nothing is asynchronous: a test of this script.
"""

import argparse
import collections
import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from exchange import further_loops, table, unpacked
from jax.sharding import AxisType, Mesh

import moe_jax
from moe_jax.checkpoint import TrainState
from moe_jax.cli import simulate_devices
from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.hf import abstract_model, model_config_of
from moe_jax.mesh import AXES
from moe_jax.moe.layer import MoE
from moe_jax.optim import make_optimizer, make_schedule
from moe_jax.run_config import OptimizerConfig
from moe_jax.sharding import BATCH, P, batch_spec, parameter_shardings
from moe_jax.train_step import make_train_step

LAYERS, LENGTH, EXPERT_RANKS = 2, 4096, 8
SMALL_BYTES = 1_000_000  # of a collective; smaller ones are norms, statistics, expert ids
# The sizes of the published config.json files, but for the number of layers.
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 40960, "rope_theta": 1e6, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
        "sliding_window": None,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    },
    "tiny": {
        "model_type": "mixtral", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}  # fmt: skip
TOPOLOGIES = {8: "1x1x8", 16: "2x1x8", 64: "8x1x8"}  # slices x hosts of a slice x GPUs of a host
# Name -> XLA's options. The latency-hiding scheduler starts a collective early and ends it late, one in flight at a time.
HIDING = "xla_gpu_enable_latency_hiding_scheduler"
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "hiding on": {HIDING: True},
    "hiding off": {HIDING: False},
    "4 in flight": {HIDING: True, "xla_gpu_experimental_parallel_collective_overlap_limit": 4},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program. part: "layer" (the MoE layer, forward and backward) or "step"."""

    model: str = "Mixtral-8x7B"
    part: str = "layer"
    devices: int = 8
    exchange: Literal["all_to_all", "all_gather", "ragged"] = "all_to_all"
    chunks: int = 1
    flags: str = "hiding on"
    combine: Literal["float32", "compute"] = "float32"
    rows: int = 1  # of LENGTH tokens, a device

    def __str__(self) -> str:
        extra = "" if self.combine == "float32" else ", combine 'compute'"
        extra += "" if self.rows == 1 else f", {self.rows} rows"
        return (f"{self.model} {self.part}, {self.devices} devices, {self.exchange}, {self.chunks} chunks, "
                f"{self.flags}{extra}")  # fmt: skip


def all_cases() -> list[Case]:
    """The most telling first."""
    models = ("Mixtral-8x7B", "Qwen3-30B-A3B", "OLMoE-1B-7B")
    cases = [Case(chunks=2), Case(chunks=1), Case(part="step", chunks=2), Case(part="step", chunks=1)]
    cases += [Case(chunks=2, flags=flags) for flags in FLAGS]
    cases += [Case(model="Qwen3-30B-A3B", chunks=chunks) for chunks in (2, 1)]
    cases += [Case(exchange="ragged", chunks=2), Case(exchange="all_gather", chunks=2), Case(chunks=4)]
    cases += [Case(model="Qwen3-30B-A3B", part="step", chunks=2), Case(part="step", chunks=2, flags="default")]
    cases += [Case(part=part, devices=devices, chunks=2) for devices in (64, 16) for part in ("layer", "step")]
    cases += [
        Case(model=model, part=part, devices=devices, exchange=exchange, chunks=chunks)
        for model in models for part in ("layer", "step") for chunks in (2, 1, 4) for devices in (8, 64, 16)
        for exchange in ("all_to_all", "ragged", "all_gather")
    ]  # fmt: skip
    cases += [Case(combine="compute", chunks=2)]
    cases += [Case(model=model, part="step", chunks=2, rows=2) for model in models]
    return list(dict.fromkeys(cases))


# ---- programs ----


def use_mesh(devices: list[Any], expert: int) -> Mesh:
    """Makes a mesh of devices that need not be there the library's; `moe_jax.init` cannot."""
    moe_jax.init(devices=jax.devices()[:1])
    mesh = Mesh(np.array(devices).reshape(1, -1, expert), AXES, axis_types=(AxisType.Explicit,) * 3)
    moe_jax.state._mesh = mesh
    return mesh


def shaped(shape: tuple[int, ...], dtype: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(moe_jax.state.mesh, spec))


def lowered_layer(config: ModelConfig, moe: MoEConfig, rows: int, length: int) -> Any:
    """All gradients of the MoE layer in bf16."""
    layer = jax.eval_shape(lambda: MoE(config, moe, key=jax.random.key(0)))
    sharded = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
    layer = jax.tree.map(sharded, layer, parameter_shardings(layer))

    def objective(layer, x_BSH, mask_BS):
        y_BSH, statistics, _ = layer(x_BSH, mask_BS, jnp.bfloat16, train=True)
        return jnp.sum(y_BSH.astype(jnp.float32) ** 2) + statistics.aux_loss

    x = shaped((rows, length, config.hidden_size), jnp.bfloat16, batch_spec(3))
    return jax.jit(jax.grad(objective, argnums=(0, 1))).lower(
        layer, x, shaped((rows, length), jnp.bool_, batch_spec(2))
    )


def lowered_step(config: ModelConfig, moe: MoEConfig, rows: int, length: int) -> Any:
    """The step of `moe-jax train`: rematerialised layers, clipping, AdamW, metrics."""
    model = abstract_model(config, moe, jnp.bfloat16, None)
    optimizer, schedule = make_optimizer(OptimizerConfig(), 10), make_schedule(OptimizerConfig(), 10)
    state = TrainState(model, jax.eval_shape(optimizer.init, model), jax.ShapeDtypeStruct((), jnp.int32))
    batch = {n: shaped((1, rows, length), np.int32, P(None, BATCH, None)) for n in ("tokens", "segment_ids")}
    return make_train_step(optimizer, schedule).lower(state, batch)


def compiled(case: Case, mesh: Mesh, length: int) -> Any:
    moe = MoEConfig(
        moe_load_balancing="aux_loss", moe_exchange=case.exchange, moe_num_chunks=case.chunks,
        moe_combine_dtype=case.combine,
    )  # fmt: skip
    lower = lowered_layer if case.part == "layer" else lowered_step
    with jax.set_mesh(mesh):
        lowered = lower(model_config_of(MODELS[case.model]), moe, case.rows * mesh.size, length)
        return lowered.compile(compiler_options=FLAGS[case.flags] or None)


# ---- reading a schedule ----

_KINDS = ("ragged-all-to-all", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_WORK = ("fusion", "custom-call", "while", "dot", "convolution", "sort", "conditional", "call", "scatter", "gather")
_SCOPES = ("router", "balance", "gather_experts", "experts", "statistics")


@dataclasses.dataclass
class Found:
    """A collective as scheduled.

    where: "straight", "scanned" (a loop of known trip count: the layers) or "further" (the rounds of an overflow).
    between: name of work -> how often it stands between start and end; None where the collective is synchronous.
    """

    kind: str
    num_bytes: int
    phase: str
    where: str
    between: dict[str, int] | None

    @property
    def hides(self) -> bool:
        """Whether a product (a matmul, a loop over row groups) stands beside it."""
        return bool(self.between) and any(name.startswith("product") for name in self.between)


def result_bytes(result: str) -> int:
    sizes = [
        math.prod(int(d) for d in dims.split(",") if d) * (1 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0]) // 8)
        for dtype, dims in re.findall(r"\b(pred|bf16|[fsu]\d+)\w*\[([\d,]*)\]", result)
    ]  # fmt: skip
    return sum(sizes)


_LINE = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")


def schedule(hlo: str) -> list[Found]:
    """Every collective of a scheduled program with what runs beside it; text order is the schedule."""
    bodies = unpacked(hlo)
    further, scanned = further_loops(hlo), _scanned(bodies)
    wrapped = {name: kind for name, body in bodies.items() if (kind := _kind_within(body))}
    found = []
    for name, body in bodies.items():
        if name in wrapped and len(body.splitlines()) < 12 and f"calls=%{name}" in hlo:
            continue  # the inside of an async wrapper, counted where it is called
        where = "further" if name in further else "scanned" if name in scanned else "straight"
        found += _schedule_of(body, where, wrapped, bodies)
    return found


def _kind_within(body: str) -> str | None:
    match = re.search(rf" ({'|'.join(_KINDS)})\(", body)
    return match[1] if match else None


def _scanned(bodies: dict[str, str]) -> set[str]:
    """Computations within loops of known trip count that have collectives: the scanned layers."""
    lines = [line for body in bodies.values() for line in body.splitlines() if " while(" in line]
    return {
        match[1] for line in lines if "known_trip_count" in line and (match := re.search(r"body=%([\w.\-]+)", line))
    }


def _schedule_of(body: str, where: str, wrapped: dict[str, str], bodies: dict[str, str]) -> list[Found]:
    found, open_ = [], {}
    for line in body.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        name, result, opcode, rest = match.groups()
        kind = next((k for k in _KINDS if opcode in (k, f"{k}-start", f"{k}-done")), None)
        called = re.search(r"calls=%([\w.\-]+)", rest)
        if opcode == "async-start" and called and called[1] in wrapped:
            kind = wrapped[called[1]]
        operand = re.match(r"%?([\w.\-]+)", rest)
        # An instruction of `platform_dependent` (the ragged exchange) does not say.
        phase = "backward" if "transpose(" in line else "forward" if "jvp(" in line else "?"
        if opcode.endswith("-start") and kind:
            # A collective that nothing can run beside is marked as synchronous, though it is written as a pair.
            is_sync = bool(re.search(r'"is_sync":\s*true', rest))
            open_[name] = Found(kind, 0, phase, where, None if is_sync else {})
        elif opcode.endswith("-done") and operand and operand[1] in open_:
            done = open_.pop(operand[1])
            done.num_bytes = result_bytes(result)
            found.append(done)
        elif kind and _num_devices(rest) > 1:
            found.append(Found(kind, result_bytes(result), phase, where, None))
        elif opcode in _WORK:
            work = _work_name(opcode, line, bodies)
            for other in open_.values():
                if other.between is not None and work:
                    other.between[work] = other.between.get(work, 0) + 1
    return found


def _num_devices(rest: str) -> int:
    """Devices of a group; 2 where the text does not say."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(match[1].split(","))
    match = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(match[1]) if match else 2


def _work_name(opcode: str, line: str, bodies: dict[str, str]) -> str:
    """What an instruction does, with the library's scope and the phase that its metadata names."""
    op_name = (re.search(r'op_name="([^"]*)"', line) or ["", ""])[1]
    scope = next((s for s in reversed(re.findall(r"\w+", op_name)) if s in _SCOPES), op_name.split("/")[-1] or "?")
    if _multiplies(line, bodies):
        opcode = "product loop" if opcode == "while" else "product"
    return f"{opcode} {scope}{' (backward)' if 'transpose(' in op_name else ''}"


_PRODUCT = re.compile(r" (dot|convolution|ragged-dot)\(|triton_gemm|triton_nested_gemm|__cublas|cutlass|mosaic")


def _multiplies(line: str, bodies: dict[str, str]) -> bool:
    """Whether an instruction is a matrix product, or calls one."""
    if _PRODUCT.search(line):
        return True
    called = re.findall(r"(?:calls|body|to_apply)=%([\w.\-]+)", line)
    return any(_multiplies(inside, bodies) for name in called for inside in bodies.get(name, "").splitlines())


def measure(case: Case, mesh: Mesh, length: int) -> dict[str, Any]:
    """What the compiled program of a case shows, or its error."""
    started = time.perf_counter()
    record: dict[str, Any] = {"case": dataclasses.asdict(case), "name": str(case)}
    try:
        program = compiled(case, mesh, length)
        sizes = program.memory_analysis()
        record["memory"] = {k: getattr(sizes, f"{k}_size_in_bytes") for k in ("temp", "argument", "output", "alias")}
        record["collectives"] = [dataclasses.asdict(f) | {"hides": f.hides} for f in schedule(program.as_text() or "")]
    except Exception as error:  # one combination that XLA refuses must not end the run
        record["error"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]
    record["seconds"] = time.perf_counter() - started
    return record


# ---- tables ----


def summary_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """A row a case: of the large collectives outside the further rounds, how many (bytes) are asynchronous and beside a product."""
    rows = []
    for record in records:
        if "error" in record:
            rows.append([record["name"], record["error"].replace("|", "/"), *[""] * 6])
            continue
        large = [c for c in record["collectives"] if c["where"] != "further" and c["num_bytes"] >= SMALL_BYTES]
        parts = (large, [c for c in large if c["between"] is not None], [c for c in large if c["hides"]])
        memory = record["memory"]
        rows.append([
            record["name"], *(f"{len(p)} ({sum(c['num_bytes'] for c in p) / 1e6:,.0f} MB)" for p in parts),
            *(f"{memory[k] / 1e9:.2f}" for k in ("temp", "argument", "output")), f"{record['seconds']:.0f}",
        ])  # fmt: skip
    yield from table(
        ("case", "large collectives", "asynchronous", "beside a product", "temp GB", "argument GB", "output GB", "compile s"),
        rows,
    )  # fmt: skip


def detail_lines(record: dict[str, Any]) -> Iterator[str]:
    """The collectives of one program: equal ones in one row."""
    groups: dict[tuple[Any, ...], int] = collections.Counter()
    small = 0
    for c in record.get("collectives", []):
        if c["num_bytes"] < SMALL_BYTES:
            small += 1
            continue
        between = "synchronous"
        if c["between"] is not None:
            work = sorted(c["between"].items(), key=lambda item: (not item[0].startswith("product"), -item[1]))
            between = ", ".join(f"{n} {name}" for name, n in work[:6]) or "asynchronous, nothing beside it"
            between += f", {len(work) - 6} more kinds" if len(work) > 6 else ""
        groups[c["kind"], c["num_bytes"], c["phase"], c["where"], between] += 1
    yield f"\n{record['name']} ({small} smaller than {SMALL_BYTES / 1e6:g} MB left out)\n"
    yield from table(
        ("collective", "MB", "phase", "where", "how many", "between start and end"),
        ([kind, f"{size / 1e6:,.1f}", phase, where, str(count), between]
         for (kind, size, phase, where, between), count in sorted(groups.items(), key=lambda g: (g[0][2:4], -g[0][1]))),
    )  # fmt: skip


def write(out: Path | None, header: str, records: list[dict[str, Any]]) -> None:
    """After every case, so that a run that is stopped leaves what it has."""
    if out:
        (out / "scaling.json").write_text(json.dumps({"header": header, "records": records}, indent=1) + "\n")
        lines = [
            header,
            "",
            *summary_lines(records),
            *(line for r in records if "error" not in r for line in detail_lines(r)),
        ]
        (out / "scaling.md").write_text("\n".join(lines) + "\n")


def described_devices(args: argparse.Namespace) -> dict[int, list[Any]]:
    """Number of devices -> these devices; a topology that XLA does not give is left out, and its cases say so."""
    from jax.experimental import topologies

    options = {"target_config": args.target_config.read_text()} if args.target_config else {}
    found = {}
    for devices, topology in TOPOLOGIES.items():
        try:
            description = topologies.get_topology_desc(topology_name="", platform="cuda", topology=topology, **options)
            found[devices] = list(description.devices)
        except Exception as error:
            print(f"no topology {topology}: {next(iter(str(error).splitlines()), '')}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for scaling.json and scaling.md")
    parser.add_argument("--limit-seconds", type=float, default=300.0)
    parser.add_argument("--target-config", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--simulate", type=int, default=0)
    args = parser.parse_args()
    if args.simulate:
        simulate_devices(args.simulate)
        cases, length = [Case(model="tiny", part=part, chunks=2, flags="default", devices=args.simulate)
                         for part in ("layer", "step")], 32  # fmt: skip
        devices_of = {args.simulate: jax.devices()}
    else:
        cases, length, devices_of = all_cases(), LENGTH, described_devices(args)
    device = args.target_config.name if args.target_config else jax.devices()[0].device_kind
    header = (f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__}, {device}; python {' '.join(sys.argv)}; {LAYERS} layers in a "
              f"step, {length} tokens a row, mode aux_loss, remat full")  # fmt: skip
    print(header, flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    started, records = time.perf_counter(), []
    for case in (case for case in cases if args.only in str(case)):
        elapsed = time.perf_counter() - started
        if elapsed > args.limit_seconds:
            print(f"{elapsed:.0f} s: limit reached, further cases not started", flush=True)
            break
        if case.devices not in devices_of:
            continue
        mesh = use_mesh(devices_of[case.devices], math.gcd(EXPERT_RANKS, case.devices))
        records.append(measure(case, mesh, length))
        line = list(summary_lines(records[-1:]))[-1]
        print(f"{time.perf_counter() - started:6.0f} s {line}", flush=True)
        write(args.out, header, records)
    print("\n".join(line for r in records[:8] if "error" not in r for line in detail_lines(r)))
    return 0 if records and not all("error" in r for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
