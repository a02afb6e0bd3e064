"""What a training step sends between devices: by formula, and as read from a compiled program.

Counts and bytes are per device and step; bytes are those of a collective's result.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from moe_jax.config import LayerConfig, ModelConfig, MoEConfig
from moe_jax.model import layer_runs
from moe_jax.moe.exchange import ExchangeShape, layer_exchange

_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """A kind of collective ("all-gather", ...) with a result of so many bytes on each device."""

    kind: str
    num_bytes: int


Table = Mapping[Collective, int]  # -> how often in one step


def step_collectives(
    config: ModelConfig,
    mesh_shape: Mapping[str, int],
    *,
    rows: int,
    length: int,
    item_bytes: int,
    moe: MoEConfig,
    gradient_kind: str = "reduce-scatter",
) -> Table:
    """The collectives of one step over `rows` x `length` tokens, rematerialised ("full"), by formula.

    Of the exchange the first round of every chunk: how many more there are is up to the routing. Not for the "ragged" one, and
    without `global_token_shuffle`.

    item_bytes: size of the compute dtype. gradient_kind: how the gradient of a layer's dense weight is reduced: GPUs
    "reduce-scatter" it, XLA on CPU shows an "all-reduce" of the whole gradient. Left out: what is no larger than a norm's
    weight or a statistic (E numbers a layer).
    """
    table: collections.Counter[Collective] = collections.Counter()
    vocab_size = config.vocab_size * config.hidden_size
    _add_manual(table, vocab_size, ("fsdp", "expert"), mesh_shape, item_bytes)
    # A tied head uses the embedding that was gathered already, but its gradient is reduced apart.
    _add_manual(
        table, vocab_size, ("fsdp", "expert"), mesh_shape, item_bytes, gathers=0 if config.tie_word_embeddings else 1
    )
    tokens = rows * length // math.prod(mesh_shape.values())
    for run in layer_runs(config.layers):
        for layer in run.pattern:
            for size, stored in _dense_weights(config, layer):
                _add_dense(table, size, mesh_shape, stored or item_bytes, gathers=2, repeats=run.repeats,
                           gradient_kind=gradient_kind)  # fmt: skip
            if layer.is_moe:
                for columns in (2, 1):  # gate and up, down, of the rank's own experts
                    size = columns * config.hidden_size * config.moe_intermediate_size * config.num_experts
                    _add_manual(table, size // mesh_shape["expert"], ("fsdp",), mesh_shape, item_bytes, gathers=2,
                                repeats=run.repeats)  # fmt: skip
                exchange = layer_exchange(config, moe, tokens, mesh_shape["expert"])
                combine_bytes = item_bytes if moe.moe_combine_dtype == "compute" else 4
                for collective, count in _exchange(exchange, config.hidden_size, item_bytes, combine_bytes).items():
                    table[collective] += count * run.repeats * moe.moe_num_chunks
    return {collective: count for collective, count in table.items() if count}


def _dense_weights(config: ModelConfig, layer: LayerConfig) -> list[tuple[int, int]]:
    """(elements, item size; 0: the compute dtype) of each matrix of a layer that is cut over fsdp and expert."""
    hidden, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = [(hidden * heads, 0), (hidden * kv, 0), (hidden * kv, 0), (heads * hidden, 0)]
    if layer.is_moe:
        return [*weights, (hidden * config.num_experts, 4)]
    return [*weights, (2 * hidden * config.intermediate_size, 0), (config.intermediate_size * hidden, 0)]


def _add_dense(
    table: collections.Counter[Collective], size: int, mesh_shape: Mapping[str, int], item_bytes: int, *, gathers: int,
    repeats: int, gradient_kind: str,
) -> None:  # fmt: skip
    """A weight gathered `gathers` times and its gradient reduced, `repeats` times."""
    shards = mesh_shape["fsdp"] * mesh_shape["expert"]
    if shards > 1:
        table[Collective("all-gather", size * item_bytes)] += gathers * repeats
    if shards * mesh_shape["replica"] > 1:
        reduced = size // shards if gradient_kind == "reduce-scatter" else size
        table[Collective(gradient_kind, reduced * item_bytes)] += repeats


def _add_manual(
    table: collections.Counter[Collective], size: int, axes: tuple[str, ...], mesh_shape: Mapping[str, int],
    item_bytes: int, *, gathers: int = 1, repeats: int = 1,
) -> None:  # fmt: skip
    """A weight of `size` elements gathered over `axes` in `shard_map`: its gradient is scattered, then summed over replicas."""
    shards, replica = math.prod(mesh_shape[axis] for axis in axes), mesh_shape["replica"]
    if shards > 1:
        table[Collective("all-gather", size * item_bytes)] += gathers * repeats
        table[Collective("reduce-scatter", size // shards * item_bytes)] += repeats
    if replica > 1:
        table[Collective("all-reduce", size // shards * item_bytes)] += repeats


def _exchange(shape: ExchangeShape, hidden: int, item_bytes: int, combine_bytes: int) -> Table:
    """One chunk's first round: rows there (forward, recomputed, and dy), results and dx back; routing twice, its gradient."""
    if shape.kind == "local":
        return {}
    table: collections.Counter[Collective] = collections.Counter()
    gathers, rows = shape.kind == "all_gather", shape.num_rows(0)
    there = "all-gather" if gathers else "all-to-all"
    table[Collective(there, rows * hidden * item_bytes)] += 3
    table[Collective(there, rows * 2 * shape.top_k * 4)] += 2
    for columns, num_bytes in ((hidden, combine_bytes), (hidden, item_bytes), (shape.top_k, 4)):
        if gathers and num_bytes == 4:
            table[Collective("reduce-scatter", shape.num_tokens * columns * num_bytes)] += 1
        else:
            table[Collective("all-to-all", rows * columns * num_bytes)] += 1
    return table


def read_collectives(hlo: str, min_bytes: int = 0, *, data_loops: int = 0) -> Table:
    """The collectives of a compiled program's text (`compiled.as_text()`), with results of at least `min_bytes`.

    A loop of known trip count counts that often; one whose length is data (further rounds of an exchange, the iterations of a
    plan) counts `data_loops` times, and so does each branch of a condition. Groups of one device send nothing and are left out.
    The parts of a combined collective count one by one, except for the parts of one all-to-all, which are one buffer.
    """
    times = _loop_counts(hlo, data_loops)
    table: collections.Counter[Collective] = collections.Counter()
    for computation, body in _computations(hlo):
        for shapes, kind in _collectives_of(body):
            sizes = [sum(shapes)] if kind == "all-to-all" else shapes
            for size in sizes:
                if size >= min_bytes:
                    table[Collective(kind, size)] += times.get(computation, 1)
    return {collective: count for collective, count in table.items() if count}


def _computations(hlo: str) -> list[tuple[str, str]]:
    """(name, text) of each computation: a line that opens a brace at column 0, up to the closing one."""
    return re.findall(r"^(?:ENTRY )?%?([\w.\-]+)[^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)


def _collectives_of(body: str) -> list[tuple[list[int], str]]:
    """(bytes of each result, kind) of a computation's collectives; of an asynchronous pair the done has the result."""
    found, started = [], {}
    for line in body.splitlines():
        match = re.match(rf"\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ({'|'.join(_KINDS)})(-start|-done)?\(%?([\w.\-]+)", line)
        if not match:
            continue
        name, result, kind, half, operand = match.groups()
        size = _group_size(line) if half != "-done" else started[operand]
        started[name] = size
        if half != "-start" and size > 1:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
            found.append(
                ([_ITEM_BYTES[t] * math.prod(int(d) for d in dims.split(",") if d) for t, dims in shapes], kind)
            )
    return found


def _group_size(line: str) -> int:
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(match[1].split(","))
    return 2  # a permute, or groups that are left out because they hold all devices


def _loop_counts(hlo: str, data_loops: int) -> dict[str, int]:
    """Computation -> how often the loops around it run."""
    inside: dict[str, tuple[str, int]] = {}
    for computation, body in _computations(hlo):
        for line in body.splitlines():
            if match := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                count = re.search(r'known_trip_count[":{\s]+n[":\s]+(\d+)', line)
                inside[match[1]] = (computation, int(count[1]) if count else data_loops)
            for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
                inside.setdefault(called, (computation, 1))
            for called in re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", line):
                inside[called] = (computation, data_loops)
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in re.findall(r"[\w.\-]+", branches):
                    inside[called] = (computation, data_loops)

    def times(name: str) -> int:
        total = 1
        while name in inside:
            name, count = inside[name]
            total *= count
        return total

    return {name: times(name) for name in inside}
