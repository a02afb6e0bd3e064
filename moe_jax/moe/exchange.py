"""Exchanges: how tokens reach the ranks that hold their experts, and how the results come back.

An exchange runs inside `shard_map` in rounds. `make_plan` says which token travels in which round; `send` carries one value per
token to the ranks of its experts, and `give_back`, its transpose, brings one value per received row back and adds up what
belongs to a token. A token goes to a rank once, however many of its experts live there, and every (token, rank) pair that has an
expert travels in exactly one round.

T tokens of this rank, K experts per token, E experts in all, P ranks of the `expert` axis, of which rank r holds the experts
[r E/P, (r+1) E/P), M rows that a rank gets in a round, C of them from each rank, R rounds at most, A (row, expert) pairs that a
rank computes at a time.
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
from moe_jax.moe.permute import sum_slots
from moe_jax.sharding import BATCH

EXPERT_AXIS = "expert"

logger = logging.getLogger("moe_jax")


@dataclasses.dataclass(frozen=True)
class ExchangeShape:
    """The static sizes of an exchange, the same on all ranks.

    rows_per_pair: C, rows that a rank sends to each rank in a round. num_rounds: R, enough for any routing.
    pairs_per_block: A; max_blocks: how many times A a round may need.
    """

    kind: str
    num_ranks: int
    num_experts: int
    num_tokens: int
    top_k: int
    rows_per_pair: int
    num_rounds: int
    pairs_per_block: int
    max_blocks: int

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_rows(self) -> int:
        """M: rows that a rank gets in a round."""
        return self.num_ranks * self.rows_per_pair

    @property
    def may_overflow(self) -> bool:
        """Whether some routing needs more than one pass; where not, the passes after the first are not even compiled."""
        return self.num_rounds * self.max_blocks > 1


def exchange_shape(
    kind: str, *, num_tokens: int, top_k: int, num_experts: int, num_ranks: int, buffer_factor: float
) -> ExchangeShape:
    """Sizes for `num_tokens` tokens a rank: buffers hold `buffer_factor` times what a balanced routing needs.

    Balanced: a token's experts are K different ones, each set as likely as another, so it goes to a given rank with probability
    1 - C(E - E/P, K) / C(E, K), and a rank computes T K pairs.
    """
    num_local = num_experts // num_ranks
    slots = num_ranks * num_tokens * max(top_k, 2)  # of rows, with the padding of the last round
    require(
        slots < 2**31, "tokens of a device x ranks x experts per token", slots, "below 2^31, or more moe_num_chunks"
    )
    rows = num_tokens
    if kind in ("all_to_all", "ragged"):
        goes = 1 - math.comb(num_experts - num_local, top_k) / math.comb(num_experts, top_k)
        rows = max(1, min(num_tokens, math.ceil(buffer_factor * num_tokens * goes)))
    most_pairs = num_ranks * rows * min(top_k, num_local)
    pairs = max(1, min(most_pairs, math.ceil(buffer_factor * num_tokens * top_k)))
    return ExchangeShape(
        kind=kind, num_ranks=num_ranks, num_experts=num_experts, num_tokens=num_tokens, top_k=top_k, rows_per_pair=rows,
        num_rounds=-(-num_tokens // rows), pairs_per_block=pairs, max_blocks=-(-most_pairs // pairs),
    )  # fmt: skip


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
    """ "all_to_all" or "all_gather", whichever sends fewer rows; logs which and why, once for each case."""
    shape = exchange_shape(
        "all_to_all", num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks,
        buffer_factor=buffer_factor,
    )  # fmt: skip
    kind = "all_to_all" if shape.rows_per_pair < num_tokens else "all_gather"
    _log_choice(kind, shape.rows_per_pair / num_tokens, top_k, num_experts, num_ranks, buffer_factor)
    return kind


@functools.cache
def _log_choice(
    kind: str, part: float, top_k: int, num_experts: int, num_ranks: int, buffer_factor: float
) -> None:  # fmt: skip
    logger.info(
        "moe_exchange 'auto' takes %r: with %d of %d experts per token on %d ranks and moe_buffer_factor %g, all_to_all sends "
        "%.0f %% of all_gather's rows",
        kind, top_k, num_experts, num_ranks, buffer_factor, 100 * part,
    )  # fmt: skip


class Plan(NamedTuple):
    """Who travels when, for one routing.

    source_S: int32, S = P R C: the token in each send slot, ordered by rank, round and place (T: empty).
    slots_TJ: int32, the send slots of a token, one for each rank it goes to (S: none), J = min(K, P).
    blocks_R: int32, how many blocks of A pairs the fullest rank has to compute in each round; 0: the round is not needed. Equal on
        all devices of the mesh.
    """

    source_S: jax.Array
    slots_TJ: jax.Array
    blocks_R: jax.Array


def make_plan(shape: ExchangeShape, expert_ids_TK: jax.Array) -> Plan:
    """The plan for a routing; ids of E go nowhere."""
    if shape.kind in ("local", "all_gather"):
        nothing = jnp.zeros((0,), jnp.int32)
        rank_TK = expert_ids_TK // shape.num_local_experts
        return Plan(nothing, nothing, _blocks(shape, rank_TK, jnp.zeros_like(rank_TK)))
    ranks, rounds, rows = shape.num_ranks, shape.num_rounds, shape.rows_per_pair
    rank_TK = expert_ids_TK // shape.num_local_experts
    rank_P = jnp.arange(ranks, dtype=jnp.int32)
    goes_TP = jnp.any(rank_TK[:, :, None] == rank_P[None, None, :], axis=1)
    place_TP = jnp.cumsum(goes_TP, axis=0, dtype=jnp.int32) - 1
    slot_TP = rank_P[None, :] * (rounds * rows) + place_TP
    num_slots = ranks * rounds * rows
    slots_TP = jnp.where(goes_TP, slot_TP, num_slots)
    slot_TK = jnp.min(jnp.where(rank_TK[:, :, None] == rank_P[None, None, :], slots_TP[:, None, :], num_slots), axis=2)
    slots_TJ = slots_TP
    if shape.top_k < ranks:  # a token's slots by choice, each rank at its first choice only
        earlier_KK = jnp.tri(shape.top_k, k=-1, dtype=bool)
        again_TK = jnp.any((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK[None], axis=2)
        slots_TJ = jnp.where(again_TK, num_slots, slot_TK)
    token_TJ = jnp.broadcast_to(jnp.arange(slots_TJ.shape[0], dtype=jnp.int32)[:, None], slots_TJ.shape)
    empty_S = jnp.full(num_slots, shape.num_tokens, jnp.int32)
    source_S = empty_S.at[slots_TJ].set(token_TJ, mode="drop")
    round_TK = slot_TK % (rounds * rows) // rows
    return Plan(source_S, slots_TJ, _blocks(shape, rank_TK, round_TK))


def _blocks(shape: ExchangeShape, rank_TK: jax.Array, round_TK: jax.Array) -> jax.Array:
    """`Plan.blocks_R` from the rank and round of every (token, expert) pair; a rank of P or more: none."""
    if not shape.may_overflow:
        return jnp.ones(1, jnp.int32)
    ranks, rounds = shape.num_ranks, shape.num_rounds
    bins_TK = jnp.where(rank_TK < ranks, rank_TK * rounds + round_TK, ranks * rounds)
    pairs_PR = jnp.zeros(ranks * rounds, jnp.int32).at[bins_TK].add(1, mode="drop").reshape(ranks, rounds)
    pairs_R = lax.psum_scatter(pairs_PR, EXPERT_AXIS, scatter_dimension=0, tiled=True)[0] if ranks > 1 else pairs_PR[0]
    pairs_R = lax.pmax(pairs_R, BATCH)
    # Rounds fill up one after the other; the first one runs always.
    least_R = (jnp.arange(rounds) == 0).astype(jnp.int32)
    return jnp.maximum(-(-pairs_R // shape.pairs_per_block), least_R)


def send(
    shape: ExchangeShape, plan: Plan, round_index: jax.Array | int, values_TX: jax.Array, fill: float | int = 0
) -> jax.Array:
    """[T, X] of this rank -> [M, X]: what the ranks sent here in that round; rows that hold no token are `fill`."""
    if shape.kind == "local":
        return values_TX
    if shape.kind == "all_gather":
        return lax.all_gather(values_TX, EXPERT_AXIS, tiled=True)
    source_M = _slots_of_round(shape, plan, round_index)
    rows = values_TX.at[source_M].get(mode="fill", fill_value=fill)
    if shape.kind == "all_to_all":
        return _all_to_all(rows)
    return _ragged_all_to_all(shape, rows, source_M < shape.num_tokens, fill)


def give_back(
    shape: ExchangeShape, plan: Plan, round_index: jax.Array | int, rows_MX: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
    """[M, X] of this rank -> [T, X] float32: for each token the sum of the rows that it had on all ranks in that round.

    dtype: what the rows travel in; None for their own.
    """
    rows_MX = rows_MX if dtype is None else rows_MX.astype(dtype)
    if shape.kind == "local":
        return rows_MX.astype(jnp.float32)
    if shape.kind == "all_gather":
        return lax.psum_scatter(rows_MX, EXPERT_AXIS, scatter_dimension=0, tiled=True).astype(jnp.float32)
    if shape.kind == "all_to_all":
        back_MX = _all_to_all(rows_MX)
    else:
        is_sent_M = _slots_of_round(shape, plan, round_index) < shape.num_tokens
        back_MX = _ragged_all_to_all(shape, rows_MX, _all_to_all(is_sent_M), 0)
    rounds, rows = shape.num_rounds, shape.rows_per_pair
    rank_TJ, place_TJ = jnp.divmod(plan.slots_TJ, rounds * rows)
    place_TJ = place_TJ - round_index * rows
    is_here = (rank_TJ < shape.num_ranks) & (place_TJ >= 0) & (place_TJ < rows)
    return sum_slots(back_MX, jnp.where(is_here, rank_TJ * rows + place_TJ, shape.num_rows))


def local_expert_ids(shape: ExchangeShape, expert_ids: jax.Array) -> jax.Array:
    """Global expert ids -> this rank's own, from 0; E / P for those that live elsewhere."""
    num_local = shape.num_local_experts
    first = 0 if shape.num_ranks == 1 else lax.axis_index(EXPERT_AXIS) * num_local
    local = expert_ids - first
    return jnp.where((local >= 0) & (local < num_local), local, num_local)


def _slots_of_round(shape: ExchangeShape, plan: Plan, round_index: jax.Array | int) -> jax.Array:
    """The tokens in the send slots of one round, ordered by rank: [M]."""
    source_PS = plan.source_S.reshape(shape.num_ranks, -1)
    start = round_index * shape.rows_per_pair
    return lax.dynamic_slice_in_dim(source_PS, start, shape.rows_per_pair, axis=1).reshape(-1)


def _all_to_all(rows: jax.Array) -> jax.Array:
    """Block p of the rows goes to rank p; block p of the result came from rank p."""
    return lax.all_to_all(rows, EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)


def _ragged_all_to_all(shape: ExchangeShape, rows_MX: jax.Array, is_used_M: jax.Array, fill: float | int) -> jax.Array:
    """`_all_to_all` that sends only the rows in use, which lead their block; the others of the result are `fill`.

    XLA has this on GPU only; elsewhere the whole blocks travel, with the same result.
    """

    def ragged(rows_MX: jax.Array, is_used_M: jax.Array) -> jax.Array:
        used_P = jnp.sum(is_used_M.reshape(shape.num_ranks, -1), axis=1, dtype=jnp.int32)
        block_P = jnp.arange(shape.num_ranks, dtype=jnp.int32) * shape.rows_per_pair
        # Every rank writes into its own block of the others' results.
        at_P = jnp.full(shape.num_ranks, lax.axis_index(EXPERT_AXIS) * shape.rows_per_pair, jnp.int32)
        empty_MX = jnp.full_like(rows_MX, fill)
        received_P = _all_to_all(used_P)
        return lax.ragged_all_to_all(rows_MX, empty_MX, block_P, used_P, at_P, received_P, axis_name=EXPERT_AXIS)

    def dense(rows_MX: jax.Array, is_used_M: jax.Array) -> jax.Array:
        return _all_to_all(jnp.where(is_used_M[:, None], rows_MX, jnp.asarray(fill, rows_MX.dtype)))

    return lax.platform_dependent(rows_MX, is_used_M, cuda=ragged, default=dense)
