"""The exactly balanced assignment of tokens to experts (BASE layers, arXiv:2103.16716), found in place on all devices.

T tokens of this device, E experts, K experts per token, N real tokens of all devices. Prices per expert bring the tokens' own
top-K near balance; a few moves with the least regret then make it exact. Everything that crosses devices is an integer, a
maximum or a minimum, and everything else is rounded once, so that the ids are the same bit for bit on every mesh.

Cost, in passes over [T, E] (one comparison or reduction; nothing larger is stored) and in collectives (at most 3 E numbers each):
a price step takes 2 K + 27 passes and 10 collectives, a repair round about 110 and 35 (205 and 67 with equal regrets), the finisher
passes over [T, 1] only and 18 (34) collectives for each expert. Normal logits took 2 to 10 price steps and 1 to 7 rounds; 64
experts with K = 1 and logits of rank 3 all 32 steps and 3 rounds. At most 32 steps, 16 rounds, and the finisher, which did not
run on any of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe_jax.collectives import vary, varying_axes, zeros_like_type
from moe_jax.moe.ranking import LARGEST, keep_best, ordered_key, smallest_key, sum_over

MAX_PRICE_STEPS = 32
MAX_REPAIR_ROUNDS = 16
# Prices are good enough once this part of all N K slots is on the wrong expert: fewer are cheaper to move one by one.
TOLERATED_EXCESS = 1 / 1024
# Leading bits of a margin that a price step looks at: sign, exponent, 7 of 23 bits of the mantissa.
MARGIN_BITS = 16
# Scores beyond it are cut, so that sums of differences stay finite.
LARGEST_SCORE = 1e30
# Equal scores are told apart by this part of themselves (32 units in the last place), or of the floor.
TIE_BREAK, TIE_BREAK_FLOOR = 2.0**-18, 2.0**-10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BalanceDiagnostics:
    """How an assignment was found.

    prices_E: float32, what was added to the scores before the top-K; only differences matter.
    iterations: int32, price steps. repair_rounds: int32, rounds of moves after them.
    finished: bool, whether the column-by-column finisher had to run.
    """

    prices_E: jax.Array
    iterations: jax.Array
    repair_rounds: jax.Array
    finished: jax.Array


def balanced_assignment(
    scores_TE: Float[Array, "T E"],
    mask_T: Bool[Array, " T"],
    token_T: Int[Array, " T"],
    num_experts_per_tok: int,
    axes: tuple[str, ...],
) -> tuple[Int[Array, "T K"], BalanceDiagnostics]:
    """(K distinct experts of every token, diagnostics): each expert gets floor or ceil of N K / E of the real tokens.

    Among such assignments one with nearly the largest sum of scores. The N K mod E experts that tokens want most get one more.
    The ids of a token are ordered by its score, highest first, equal scores by the lowest id. A padding token's ids are valid
    but mean nothing: the caller masks them. No gradient flows.

    scores_TE: float32 router logits; a NaN is the lowest score. token_T: int32 global index of the token, not negative, no two
    alike over the devices of `axes`. axes: the mesh axes over which the tokens are spread; () balances this device by itself.
    """
    num_experts, top_k = scores_TE.shape[1], num_experts_per_tok
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"num_experts_per_tok is {top_k}, but must be from 1 to the number of experts, {num_experts}")
    scores_TE = lax.stop_gradient(scores_TE).astype(jnp.float32)
    scores_TE = jnp.where(jnp.isnan(scores_TE), -LARGEST_SCORE, jnp.clip(scores_TE, -LARGEST_SCORE, LARGEST_SCORE))
    others = (varying_axes(scores_TE) | varying_axes(mask_T) | varying_axes(token_T)) - frozenset(axes)
    no_steps = vary(jnp.zeros((), jnp.int32), others)
    if top_k == num_experts:
        prices_E = vary(jnp.zeros(num_experts, jnp.float32), others)
        diagnostics = BalanceDiagnostics(prices_E, no_steps, no_steps, no_steps > 0)
        return _best_ids(scores_TE, top_k), diagnostics

    num_tokens = sum_over(jnp.sum(mask_T, dtype=jnp.int32), axes)
    with jax.named_scope("prices"):
        distinct_TE = _break_ties(scores_TE - jnp.max(scores_TE, axis=1, keepdims=True), token_T)
        prices_E, iterations = _find_prices(distinct_TE, mask_T, num_tokens, top_k, axes, others)
        values_TE = distinct_TE + prices_E[None, :]
        held_TE = _hold_best(values_TE, mask_T, top_k)[0]
        quota_E = _quotas(_count(held_TE, axes), prices_E, num_tokens, top_k)
    with jax.named_scope("repair"):
        held_TE, repair_rounds = _repair(held_TE, values_TE, token_T, quota_E, axes, others)
    with jax.named_scope("finish"):
        finished = jnp.any(_count(held_TE, axes) != quota_E)
        held_TE = _finish(held_TE, values_TE, mask_T, token_T, quota_E, top_k, axes, finished)
    ids_TK = _best_ids(jnp.where(held_TE, scores_TE, -jnp.inf), top_k)
    return ids_TK, BalanceDiagnostics(prices_E, iterations, repair_rounds, finished)


def _break_ties(scores_TE: jax.Array, token_T: jax.Array) -> jax.Array:
    """The scores, each lowered by a hash of its token and expert, so that prices can part tokens with equal scores.

    The step is a power of two, so that the product is exact: a fused multiply-add gives the same as two operations.
    """
    num_experts = scores_TE.shape[1]
    expert_E = jnp.arange(num_experts, dtype=jnp.uint32)
    hash_TE = token_T.astype(jnp.uint32)[:, None] * jnp.uint32(num_experts) + expert_E[None, :]
    for multiplier in (0x7FEB352D, 0x846CA68B):  # "lowbias32", Chris Wellons
        hash_TE = (hash_TE ^ (hash_TE >> 16)) * jnp.uint32(multiplier)
    unit_TE = (hash_TE >> 8).astype(jnp.float32) * 2.0**-24
    size_TE = jnp.maximum(jnp.abs(scores_TE), TIE_BREAK_FLOOR)
    power_TE = lax.bitcast_convert_type(lax.bitcast_convert_type(size_TE, jnp.uint32) & 0x7F800000, jnp.float32)
    return scores_TE - (power_TE * TIE_BREAK) * unit_TE


def _count(held_TE: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return sum_over(jnp.sum(held_TE, axis=0, dtype=jnp.int32), axes)


def _quotas(counts_E: jax.Array, prices_E: jax.Array, num_tokens: jax.Array, top_k: int) -> jax.Array:
    """int32 [E], floor(N K / E), and one more for the N K mod E experts with the lowest prices, then the highest counts.

    The lowest prices are on the experts whose next token would add most to the sum of scores.
    """
    num_experts = counts_E.shape[0]
    # N K may not fit into int32; its quotient and remainder do.
    rest = num_tokens % num_experts * top_k
    floor, num_ceil = num_tokens // num_experts * top_k + rest // num_experts, rest % num_experts
    expert_E = jnp.arange(num_experts)
    ahead_EE = expert_E[None, :] < expert_E[:, None]
    for key_E in (-counts_E, prices_E):  # the last one counts most
        ahead_EE = (key_E[None, :] < key_E[:, None]) | ((key_E[None, :] == key_E[:, None]) & ahead_EE)
    return floor + (jnp.sum(ahead_EE, axis=1, dtype=jnp.int32) < num_ceil)


def _next_best(values_TE: jax.Array, value_T: jax.Array, id_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(value, id) of each row's best entry after this one, in the order of falling values and, where equal, rising ids.

    Two row reductions an entry; lax.top_k took 20 to 40 times as long on a CPU (16384 x 64, K = 1 to 7).
    """
    num_experts = values_TE.shape[1]
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    after_TE = (values_TE == value_T[:, None]) & (expert_E[None, :] > id_T[:, None])
    after_TE = after_TE | (values_TE < value_T[:, None])
    next_T = jnp.max(jnp.where(after_TE, values_TE, -jnp.inf), axis=1)
    is_next_TE = after_TE & (values_TE == next_T[:, None])
    return next_T, jnp.min(jnp.where(is_next_TE, expert_E[None, :], num_experts), axis=1)


def _before_best(values_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `_next_best` starts from."""
    start_T = zeros_like_type(values_TE.shape[:1], jnp.float32, values_TE)
    return start_T + jnp.inf, start_T.astype(jnp.int32) - 1


def _best_ids(values_TE: jax.Array, top_k: int) -> Int[Array, "T K"]:
    """The ids of the K highest values of each row, highest first, equal ones by the lowest id."""

    def take(last: tuple[jax.Array, jax.Array], _):
        last = _next_best(values_TE, *last)
        return last, last[1]

    return lax.scan(take, _before_best(values_TE), length=top_k)[1].T


def _hold_best(values_TE: jax.Array, mask_T: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """(each real token's K best experts [T, E], margins [T, E]): how far each value is above the K-th of the others."""
    value_T, id_T = lax.fori_loop(0, top_k, lambda _, last: _next_best(values_TE, *last), _before_best(values_TE))
    expert_E = jnp.arange(values_TE.shape[1], dtype=jnp.int32)
    equal_TE = (values_TE == value_T[:, None]) & (expert_E[None, :] <= id_T[:, None])
    held_TE = (values_TE > value_T[:, None]) | equal_TE
    next_T = jnp.max(jnp.where(held_TE, -jnp.inf, values_TE), axis=1)
    return held_TE & mask_T[:, None], values_TE - jnp.where(held_TE, next_T[:, None], value_T[:, None])


def _find_prices(
    scores_TE: jax.Array,
    mask_T: jax.Array,
    num_tokens: jax.Array,
    top_k: int,
    axes: tuple[str, ...],
    others: frozenset[str],
) -> tuple[jax.Array, jax.Array]:
    """(prices [E] under which the tokens' own top-K is nearly balanced, number of steps).

    Coordinate steps on the dual of the assignment problem, all experts at once: with the other prices fixed, an expert meets its
    quota q when its price moves by minus its q-th largest margin, which only compares and subtracts, whatever the scale of
    the scores. A step goes 7/8 of the way; half where it turned back, since two experts that share their tokens would swap them.
    """
    num_experts = scores_TE.shape[1]
    tolerated = (num_tokens.astype(jnp.float32) * (top_k * TOLERATED_EXCESS)).astype(jnp.int32)

    def evaluate(prices_E: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(margins, counts, quotas) of the top-K under these prices."""
        held_TE, margin_TE = _hold_best(scores_TE + prices_E[None, :], mask_T, top_k)
        counts_E = _count(held_TE, axes)
        return margin_TE, counts_E, _quotas(counts_E, prices_E, num_tokens, top_k)

    def change(margin_TE: jax.Array, quota_E: jax.Array) -> jax.Array:
        """The change of each price that leaves `quota` margins positive, the other prices fixed."""
        key_TE = jnp.where(mask_T[:, None], ~ordered_key(margin_TE), jnp.uint32(LARGEST))
        digits_E = smallest_key(key_TE, jnp.maximum(quota_E, 1), axes, num_bits=MARGIN_BITS) >> MARGIN_BITS
        inside_TE = mask_T[:, None] & (key_TE >> MARGIN_BITS <= digits_E[None, :])
        outside_TE = mask_T[:, None] & ~inside_TE
        # Halfway between the last margin inside and the first one outside.
        inside_E = jnp.max(jnp.where(inside_TE, -margin_TE, -jnp.inf), axis=0)
        outside_E = jnp.max(jnp.where(outside_TE, margin_TE, -jnp.inf), axis=0)
        edges_2E = jnp.stack([inside_E, outside_E])
        inside_E, outside_E = lax.pmax(edges_2E, axes) if axes else edges_2E
        return jnp.where(outside_E == -jnp.inf, inside_E, (inside_E - outside_E) * 0.5)

    def unfinished(carry) -> jax.Array:
        _, (_, counts_E, quota_E), last_E, _, _, step = carry
        return (_excess(counts_E, quota_E) > tolerated) & jnp.any(last_E != 0) & (step < MAX_PRICE_STEPS)

    def iterate(carry):
        prices_E, (margin_TE, counts_E, quota_E), last_E, best_E, least, step = carry
        change_E = jnp.where(counts_E == quota_E, 0.0, change(margin_TE, quota_E))
        # Powers of two: exact products, so that a fused multiply-add gives the same as two operations.
        kept_back_E = jnp.where(change_E * last_E < 0, 0.5, 0.125)
        prices_E = prices_E + (change_E - change_E * kept_back_E)
        prices_E = prices_E - jnp.max(prices_E)
        found = evaluate(prices_E)
        excess = _excess(found[1], found[2])
        best_E = jnp.where(excess < least, prices_E, best_E)
        return prices_E, found, change_E, best_E, jnp.minimum(excess, least), step + 1

    zeros_E = vary(jnp.zeros(num_experts, jnp.float32), others)
    found = evaluate(zeros_E)
    start = (
        zeros_E,
        found,
        zeros_E + 1.0,
        zeros_E,
        _excess(found[1], found[2]),
        vary(jnp.zeros((), jnp.int32), others),
    )
    *_, best_E, _, steps = lax.while_loop(unfinished, iterate, start)
    return best_E, steps


def _excess(counts_E: jax.Array, quota_E: jax.Array) -> jax.Array:
    """Slots that must move."""
    return jnp.sum(jnp.maximum(counts_E - quota_E, 0))


def _repair(
    held_TE: jax.Array,
    values_TE: jax.Array,
    token_T: jax.Array,
    quota_E: jax.Array,
    axes: tuple[str, ...],
    others: frozenset[str],
) -> tuple[jax.Array, jax.Array]:
    """(held, number of rounds): each round moves slots from experts above their quota to experts below it.

    A token offers its cheapest move; an expert above its quota lets the cheapest offers go, as many as it has too many, and one
    below takes the cheapest of those, as many as it lacks. No count passes its quota, and a round moves something as long as any
    token holds an expert above and does not hold one below.
    """
    expert_E = jnp.arange(values_TE.shape[1], dtype=jnp.int32)

    def unfinished(carry) -> jax.Array:
        _, counts_E, progress, rounds = carry
        return (_excess(counts_E, quota_E) > 0) & progress & (rounds < MAX_REPAIR_ROUNDS)

    def move(carry):
        held_TE, counts_E, _, rounds = carry
        surplus_E, lack_E = jnp.maximum(counts_E - quota_E, 0), jnp.maximum(quota_E - counts_E, 0)
        leave_TE = jnp.where(held_TE & (surplus_E > 0)[None, :], values_TE, jnp.inf)
        enter_TE = jnp.where(~held_TE & (lack_E > 0)[None, :], values_TE, -jnp.inf)
        regret_T = jnp.min(leave_TE, axis=1) - jnp.max(enter_TE, axis=1)  # inf: no move
        leaves_TE = jnp.argmin(leave_TE, axis=1)[:, None] == expert_E[None, :]
        enters_TE = jnp.argmax(enter_TE, axis=1)[:, None] == expert_E[None, :]
        regret_TE = jnp.broadcast_to(ordered_key(regret_T)[:, None], held_TE.shape)
        offered_TE = keep_best(regret_TE, leaves_TE & (regret_T < jnp.inf)[:, None], token_T, surplus_E, axes)
        offers_T = jnp.any(offered_TE, axis=1)
        taken_TE = keep_best(regret_TE, enters_TE & offers_T[:, None], token_T, lack_E, axes)
        moves_T1 = jnp.any(taken_TE, axis=1, keepdims=True)
        held_TE = (held_TE & ~(leaves_TE & moves_T1)) | taken_TE
        moved_counts_E = _count(held_TE, axes)
        return held_TE, moved_counts_E, jnp.any(moved_counts_E != counts_E), rounds + 1

    counts_E = _count(held_TE, axes)
    start = (held_TE, counts_E, counts_E[0] >= 0, vary(jnp.zeros((), jnp.int32), others))
    held_TE, _, _, rounds = lax.while_loop(unfinished, move, start)
    return held_TE, rounds


def _finish(
    held_TE: jax.Array,
    values_TE: jax.Array,
    mask_T: jax.Array,
    token_T: jax.Array,
    quota_E: jax.Array,
    top_k: int,
    axes: tuple[str, ...],
    needed: jax.Array,
) -> jax.Array:
    """An exact assignment, whatever `held` is; `held` itself unless `needed`.

    Experts are filled one after another. With R of them left, a token that still needs R experts must take this one; the
    others that need any fill the quota up, those that hold it first, then by their value. It never fails: no token needs more
    than R, and the quotas left, which sum to all needs, are floor or ceil of their mean, as long as all quotas differ by at most
    one. So at most mean, hence at most floor(mean) <= quota, tokens need R, and at least mean, hence at least ceil(mean) >=
    quota, need one or more; and afterwards no token needs more than R - 1.
    """
    num_experts = values_TE.shape[1]

    def fill(expert: jax.Array, carry):
        held_TE, need_T = carry
        column_T1 = lax.dynamic_slice_in_dim(held_TE, expert, 1, axis=1)
        value_T1 = lax.dynamic_slice_in_dim(values_TE, expert, 1, axis=1)
        forced_T1 = (need_T == num_experts - expert)[:, None]
        key_T1 = (~ordered_key(value_T1) >> 1) | jnp.where(column_T1, jnp.uint32(0), jnp.uint32(1 << 31))
        key_T1 = jnp.where(forced_T1, jnp.uint32(0), key_T1 | 1)
        quota_1 = lax.dynamic_slice_in_dim(quota_E, expert, 1)
        taken_T1 = keep_best(key_T1, (need_T > 0)[:, None], token_T, quota_1, axes)
        held_TE = lax.dynamic_update_slice_in_dim(held_TE, taken_T1, expert, axis=1)
        return held_TE, need_T - taken_T1[:, 0].astype(jnp.int32)

    need_T = jnp.where(mask_T, top_k, 0).astype(jnp.int32)
    return lax.fori_loop(0, jnp.where(needed, num_experts, 0), fill, (held_TE, need_T))[0]
