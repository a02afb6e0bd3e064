"""Exchanges: how tokens reach the ranks that hold their experts, and how the results come back.

An exchange runs inside `shard_map` in rounds: a first one, whose buffers hold what a balanced routing needs, and smaller further
ones for what does not fit. `make_plan` says which token travels in which round; `send` carries one value per token to the ranks of
its experts, and `give_back`, its transpose, brings one value per received row back and adds up what belongs to a token. A token
goes to a rank once, however many of its experts live there, and every (token, rank) pair that has an expert travels in exactly
one round.

T tokens of this rank, K experts per token, E experts in all, P ranks of the `expert` axis, of which rank r holds the experts
[r E/P, (r+1) E/P), M rows that a rank gets in a round, C of them from each rank.
"""

import dataclasses
import functools
import logging
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.errors import require
from moe_jax.kernels.tiles import ROW_ALIGNMENT
from moe_jax.moe.permute import sum_slots
from moe_jax.sharding import BATCH

EXPERT_AXIS = "expert"

logger = logging.getLogger("moe_jax")


# A further round, and a further block of pairs, is this part of the first: one row too many should not cost a whole round.
FURTHER_PART = 4
# Standard deviations: with 5 a balanced routing overflows in fewer than one of 1,000 exchanges, up to 64 ranks.
FLUCTUATION = 5.0


@dataclasses.dataclass(frozen=True)
class ExchangeShape:
    """The static sizes of an exchange, the same on all ranks.

    first_rows, further_rows: C, rows that a rank sends to each rank in the first and in every further round.
    max_further_rounds: so many are enough for any routing.
    first_pairs, further_pairs: (row, expert) pairs that a rank computes at a time, of the first round at first and then.
    """

    kind: str
    num_ranks: int
    num_experts: int
    num_tokens: int
    top_k: int
    first_rows: int
    further_rows: int
    max_further_rounds: int
    first_pairs: int
    further_pairs: int

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def slots_per_rank(self) -> int:
        """Places for rows to one rank in all rounds together, at least T."""
        return self.first_rows + self.max_further_rounds * self.further_rows

    def rows_per_pair(self, round_index: jax.Array | int) -> int:
        """C of that round; 0 is the first one, a traced number a further one."""
        return self.first_rows if _is_first(round_index) else self.further_rows

    def num_rows(self, round_index: jax.Array | int) -> int:
        """M: rows that a rank gets in that round."""
        return self.num_ranks * self.rows_per_pair(round_index)

    @property
    def most_pairs(self) -> int:
        """(row, expert) pairs that a rank may have to compute in the first round."""
        return self.num_rows(0) * min(self.top_k, self.num_local_experts)


def _is_first(round_index: jax.Array | int) -> bool:
    return isinstance(round_index, int) and round_index == 0


def exchange_shape(
    kind: str, *, num_tokens: int, top_k: int, num_experts: int, num_ranks: int, buffer_factor: float
) -> ExchangeShape:
    """Sizes for `num_tokens` tokens a rank: the first round holds `buffer_factor` times the balanced load, and its fluctuation.

    Balanced: a token's experts are K different ones, each set as likely as another, so it goes to a given rank with probability
    p = 1 - C(E - E/P, K) / C(E, K), and a rank computes T K pairs. Such a routing still fluctuates, with a standard deviation of
    sqrt(T p (1 - p)) rows and about sqrt(T K) pairs; FLUCTUATION times that is added.
    """
    num_local = num_experts // num_ranks
    slots = num_ranks * num_tokens * max(top_k, 2)  # of rows, with the padding of the last round
    require(
        slots < 2**31, "tokens of a device x ranks x experts per token", slots, "below 2^31, or more moe_num_chunks"
    )
    first = num_tokens
    if kind in ("all_to_all", "ragged"):
        goes = 1 - math.comb(num_experts - num_local, top_k) / math.comb(num_experts, top_k)
        rows = buffer_factor * num_tokens * goes + FLUCTUATION * math.sqrt(num_tokens * goes * (1 - goes))
        first = max(1, min(num_tokens, math.ceil(rows)))
    further = -(-first // FURTHER_PART)
    most_pairs = num_ranks * first * min(top_k, num_local)
    pairs = buffer_factor * num_tokens * top_k + FLUCTUATION * math.sqrt(num_tokens * top_k)
    pairs = max(1, min(most_pairs, _round_up(math.ceil(pairs))))
    return ExchangeShape(
        kind=kind, num_ranks=num_ranks, num_experts=num_experts, num_tokens=num_tokens, top_k=top_k, first_rows=first,
        further_rows=further, max_further_rounds=-(-(num_tokens - first) // further), first_pairs=pairs,
        further_pairs=min(pairs, _round_up(-(-pairs // FURTHER_PART))),
    )  # fmt: skip


def _round_up(num_pairs: int) -> int:
    """To what the Hopper kernels take without a padded copy."""
    return -(-num_pairs // ROW_ALIGNMENT) * ROW_ALIGNMENT


def layer_exchange(config: ModelConfig, moe: MoEConfig, num_tokens: int, num_ranks: int) -> ExchangeShape:
    """The exchange of one chunk of a layer's `num_tokens` tokens a rank, as the switches say."""
    sizes = {
        "num_tokens": -(-num_tokens // moe.moe_num_chunks),
        "top_k": config.num_experts_per_tok,
        "num_experts": config.num_experts,
        "num_ranks": num_ranks,
        "buffer_factor": moe.moe_buffer_factor,
    }
    kind = moe.moe_exchange or ("all_to_all" if moe.moe_all_to_all_dispatcher else "all_gather")
    if num_ranks == 1:
        kind = "local"
    elif kind == "auto":
        kind = choose_exchange(**sizes)
    return exchange_shape(kind, **sizes)


def choose_exchange(
    *, num_tokens: int, top_k: int, num_experts: int, num_ranks: int, buffer_factor: float
) -> str:  # fmt: skip
    """The kind that sends fewer rows, all_to_all or all_gather; logs which and why, once for each case."""
    shape = exchange_shape(
        "all_to_all", num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks,
        buffer_factor=buffer_factor,
    )  # fmt: skip
    kind = "all_to_all" if shape.first_rows < num_tokens else "all_gather"
    _log_choice(kind, shape.first_rows / num_tokens, top_k, num_experts, num_ranks, buffer_factor)
    return kind


@functools.cache
def _log_choice(
    kind: str, part: float, top_k: int, num_experts: int, num_ranks: int, buffer_factor: float
) -> None:  # fmt: skip
    logger.warning(  # so that a script without any logging set up shows it
        "moe_exchange 'auto' takes %r: with %d of %d experts per token on %d ranks and moe_buffer_factor %g, all_to_all sends "
        "%.0f %% of all_gather's rows",
        kind, top_k, num_experts, num_ranks, buffer_factor, 100 * part,
    )  # fmt: skip


class Plan(NamedTuple):
    """Who travels when, for one routing.

    source_S: int32, S = P x slots per rank: the token in each send slot, ordered by rank and place (T: empty).
    slots_TJ: int32, the send slots of a token, one for each rank it goes to (S: none), J = min(K, P).
    further_rounds: int32, how many rounds after the first are needed; equal on all devices of the mesh.
    """

    source_S: jax.Array
    slots_TJ: jax.Array
    further_rounds: jax.Array


def make_plan(shape: ExchangeShape, expert_ids_TK: jax.Array) -> Plan:
    """The plan for a routing; ids of E go nowhere."""
    if shape.kind in ("local", "all_gather"):
        nothing = jnp.zeros((0,), jnp.int32)
        return Plan(nothing, nothing, jnp.zeros((), jnp.int32))
    ranks, slots = shape.num_ranks, shape.slots_per_rank
    rank_TK = expert_ids_TK // shape.num_local_experts
    rank_P = jnp.arange(ranks, dtype=jnp.int32)
    is_rank_TKP = rank_TK[:, :, None] == rank_P[None, None, :]
    goes_TP = jnp.any(is_rank_TKP, axis=1)
    place_TP = jnp.cumsum(goes_TP, axis=0, dtype=jnp.int32) - 1
    slots_TP = jnp.where(goes_TP, rank_P[None, :] * slots + place_TP, ranks * slots)
    slots_TJ = slots_TP
    if shape.top_k < ranks:  # a token's slots by choice, each rank at its first choice only
        slot_TK = jnp.min(jnp.where(is_rank_TKP, slots_TP[:, None, :], ranks * slots), axis=2)
        earlier_KK = jnp.tri(shape.top_k, k=-1, dtype=bool)
        again_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK[None], axis=2)
        slots_TJ = jnp.where(again_TK, ranks * slots, slot_TK)
    token_TJ = jnp.broadcast_to(jnp.arange(slots_TJ.shape[0], dtype=jnp.int32)[:, None], slots_TJ.shape)
    empty_S = jnp.full(ranks * slots, shape.num_tokens, jnp.int32)
    source_S = empty_S.at[slots_TJ].set(token_TJ, mode="drop")
    return Plan(source_S, slots_TJ, _further_rounds(shape, place_TP[-1] + 1))


def _further_rounds(shape: ExchangeShape, rows_P: jax.Array) -> jax.Array:
    """`Plan.further_rounds` from the number of rows for each rank."""
    if not shape.max_further_rounds:
        return jnp.zeros((), jnp.int32)
    overflow = jnp.maximum(lax.pmax(jnp.max(rows_P), BATCH) - shape.first_rows, 0)
    return -(-overflow // shape.further_rows)


def send(
    shape: ExchangeShape, plan: Plan, round_index: jax.Array | int, values_TX: jax.Array, fill: float | int = 0
) -> jax.Array:
    """[T, X] of this rank -> [M, X]: what the ranks sent here in that round; rows that hold no token are `fill`.

    round_index: 0 for the first round; a further one may be traced.
    """
    if shape.kind == "local":
        return values_TX
    if shape.kind == "all_gather":
        return lax.all_gather(values_TX, EXPERT_AXIS, tiled=True)
    source_M = _slots_of_round(shape, plan, round_index)
    rows = values_TX.at[source_M].get(mode="fill", fill_value=fill)
    if shape.kind == "all_to_all":
        return swap_blocks(rows)
    return _ragged_all_to_all(shape, rows, source_M < shape.num_tokens, fill)


def give_back(
    shape: ExchangeShape, plan: Plan, round_index: jax.Array | int, rows_MX: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
    """[M, X] of this rank -> [T, X] float32: for each token the sum of the rows that it had on all ranks in that round.

    dtype: what the rows travel in; None for their own.
    """
    if shape.kind == "local":  # nothing travels
        return rows_MX.astype(jnp.float32)
    rows_MX = rows_MX if dtype is None else rows_MX.astype(dtype)
    if shape.kind == "all_gather":
        if rows_MX.dtype == jnp.float32:
            return lax.psum_scatter(rows_MX, EXPERT_AXIS, scatter_dimension=0, tiled=True)
        # A reduce-scatter would add up in the narrow dtype; this sends as much.
        parts_PTX = swap_blocks(rows_MX).reshape(shape.num_ranks, shape.num_tokens, -1)
        return jnp.sum(parts_PTX, axis=0, dtype=jnp.float32)
    if shape.kind == "all_to_all":
        back_MX = swap_blocks(rows_MX)
    else:
        is_sent_M = _slots_of_round(shape, plan, round_index) < shape.num_tokens
        back_MX = _ragged_all_to_all(shape, rows_MX, swap_blocks(is_sent_M), 0)
    rows = shape.rows_per_pair(round_index)
    rank_TJ, place_TJ = jnp.divmod(plan.slots_TJ, shape.slots_per_rank)
    place_TJ = place_TJ - _first_place(shape, round_index)
    is_here = (rank_TJ < shape.num_ranks) & (place_TJ >= 0) & (place_TJ < rows)
    return sum_slots(back_MX, jnp.where(is_here, rank_TJ * rows + place_TJ, shape.num_ranks * rows))


def local_expert_ids(shape: ExchangeShape, expert_ids: jax.Array) -> jax.Array:
    """Global expert ids -> this rank's own, from 0; E / P for those that live elsewhere."""
    num_local = shape.num_local_experts
    first = 0 if shape.num_ranks == 1 else lax.axis_index(EXPERT_AXIS) * num_local
    local = expert_ids - first
    return jnp.where((local >= 0) & (local < num_local), local, num_local)


def _slots_of_round(shape: ExchangeShape, plan: Plan, round_index: jax.Array | int) -> jax.Array:
    """The tokens in the send slots of one round, ordered by rank: [M]."""
    source_PS = plan.source_S.reshape(shape.num_ranks, -1)
    start, rows = _first_place(shape, round_index), shape.rows_per_pair(round_index)
    return lax.dynamic_slice_in_dim(source_PS, start, rows, axis=1).reshape(-1)


def _first_place(shape: ExchangeShape, round_index: jax.Array | int) -> jax.Array | int:
    """The first of a rank's send slots that travels in that round."""
    return 0 if _is_first(round_index) else shape.first_rows + (round_index - 1) * shape.further_rows


def swap_blocks(rows: jax.Array) -> jax.Array:
    """Block p of the rows goes to rank p; block p of the result came from rank p."""
    return lax.all_to_all(rows, EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)


def _ragged_all_to_all(shape: ExchangeShape, rows_MX: jax.Array, is_used_M: jax.Array, fill: float | int) -> jax.Array:
    """`swap_blocks` that sends only the rows in use, which lead their block; the others of the result are `fill`.

    XLA has this on GPU only; elsewhere the whole blocks travel, with the same result.
    """

    def ragged(rows_MX: jax.Array, is_used_M: jax.Array) -> jax.Array:
        used_P = jnp.sum(is_used_M.reshape(shape.num_ranks, -1), axis=1, dtype=jnp.int32)
        rows = rows_MX.shape[0] // shape.num_ranks
        block_P = jnp.arange(shape.num_ranks, dtype=jnp.int32) * rows
        # Every rank writes into its own block of the others' results.
        at_P = jnp.full(shape.num_ranks, lax.axis_index(EXPERT_AXIS) * rows, jnp.int32)
        empty_MX = jnp.full_like(rows_MX, fill)
        received_P = swap_blocks(used_P)
        return lax.ragged_all_to_all(rows_MX, empty_MX, block_P, used_P, at_P, received_P, axis_name=EXPERT_AXIS)

    def dense(rows_MX: jax.Array, is_used_M: jax.Array) -> jax.Array:
        return swap_blocks(jnp.where(is_used_M[:, None], rows_MX, jnp.asarray(fill, rows_MX.dtype)))

    return lax.platform_dependent(rows_MX, is_used_M, cuda=ragged, default=dense)
