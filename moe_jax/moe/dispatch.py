"""Dispatchers: how tokens reach the ranks that hold their experts, and how the results come back.

A dispatcher is a pair of pure functions that run inside `shard_map`. T tokens of this rank, K experts per token, P ranks of the
`expert` axis, E experts in all, M rows that this rank gets, H hidden size. Rank r holds the experts [r E/P, (r+1) E/P); E/P in
the received ids means "not on this rank".

Every dispatcher is exact under any routing, and sends a token to a rank once, however many of its experts live there; its
weighted results come back as one float32 sum.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import ConfigError
from moe_jax.moe.permute import expand_rows, sum_rows
from moe_jax.moe.router import Routing

EXPERT_AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Received:
    """The rows that a rank computes: rows_MH, their local expert ids (int32 [M, K]) and weights (float32 [M, K])."""

    rows_MH: jax.Array
    expert_ids_MK: jax.Array
    weights_MK: jax.Array


class Dispatcher(NamedTuple):
    """dispatch(x_TH, routing, num_experts) -> (Received, plan); combine(y_MH float32, plan) -> float32 [T, H]."""

    dispatch: Callable[[jax.Array, Routing, int], tuple[Received, Any]]
    combine: Callable[[jax.Array, Any], jax.Array]


def _local_dispatch(x_TH: jax.Array, routing: Routing, num_experts: int) -> tuple[Received, None]:
    return Received(x_TH, routing.expert_ids_TK, routing.weights_TK), None


def _to_local_ids(expert_ids: jax.Array, first: jax.Array | int, num_local: int) -> jax.Array:
    """Global ids -> ids on the rank whose first expert is `first`; `num_local` for those that live elsewhere."""
    local = expert_ids - first
    return jnp.where((local >= 0) & (local < num_local), local, num_local)


def _all_gather_dispatch(x_TH: jax.Array, routing: Routing, num_experts: int) -> tuple[Received, None]:
    num_local = num_experts // lax.axis_size(EXPERT_AXIS)
    gathered = [lax.all_gather(a, EXPERT_AXIS, tiled=True) for a in (x_TH, routing.expert_ids_TK, routing.weights_TK)]
    rows_MH, ids_MK, weights_MK = gathered
    first = lax.axis_index(EXPERT_AXIS) * num_local
    return Received(rows_MH, _to_local_ids(ids_MK, first, num_local), weights_MK), None


def _all_gather_combine(y_MH: jax.Array, plan: None) -> jax.Array:
    return lax.psum_scatter(y_MH, EXPERT_AXIS, scatter_dimension=0, tiled=True)


class AllToAllPlan(NamedTuple):
    """source_S: the token in each of the S = P * T send slots (T: empty); slots_TP: the slot of a token for each rank (S: none)."""

    source_S: jax.Array
    slots_TP: jax.Array


def _plan_all_to_all(expert_ids_TK: jax.Array, num_local: int, num_ranks: int) -> AllToAllPlan:
    """Send slots: rank p's block of T slots holds, without gaps, the tokens that have an expert there, in order."""
    num_tokens = expert_ids_TK.shape[0]
    rank_P = jnp.arange(num_ranks, dtype=jnp.int32)
    goes_TP = jnp.any(expert_ids_TK[:, :, None] // num_local == rank_P[None, None, :], axis=1)
    slots_TP = jnp.cumsum(goes_TP, axis=0, dtype=jnp.int32) - 1 + rank_P[None, :] * num_tokens
    slots_TP = jnp.where(goes_TP, slots_TP, num_ranks * num_tokens)
    token_TP = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], slots_TP.shape)
    empty_S = jnp.full(num_ranks * num_tokens, num_tokens, jnp.int32)
    return AllToAllPlan(empty_S.at[slots_TP].set(token_TP, mode="drop", unique_indices=False), slots_TP)


def _exchange(rows: jax.Array) -> jax.Array:
    """Block p of the rows goes to rank p; block p of the result came from rank p."""
    return lax.all_to_all(rows, EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)


def _all_to_all_dispatch(x_TH: jax.Array, routing: Routing, num_experts: int) -> tuple[Received, AllToAllPlan]:
    num_ranks, num_tokens = lax.axis_size(EXPERT_AXIS), x_TH.shape[0]
    num_local = num_experts // num_ranks
    plan = _plan_all_to_all(routing.expert_ids_TK, num_local, num_ranks)
    first_S = (jnp.arange(num_ranks * num_tokens, dtype=jnp.int32) // num_tokens * num_local)[:, None]
    ids_SK = routing.expert_ids_TK.at[plan.source_S].get(mode="fill", fill_value=num_experts)
    local_ids_SK = _to_local_ids(ids_SK, first_S, num_local)
    weights_SK = expand_rows(routing.weights_TK, plan.source_S, plan.slots_TP)
    rows_SH = expand_rows(x_TH, plan.source_S, plan.slots_TP)
    return Received(_exchange(rows_SH), _exchange(local_ids_SK), _exchange(weights_SK)), plan


def _all_to_all_combine(y_MH: jax.Array, plan: AllToAllPlan) -> jax.Array:
    return sum_rows(_exchange(y_MH), plan.source_S, plan.slots_TP)


DISPATCHERS = {
    "local": Dispatcher(_local_dispatch, lambda y_MH, plan: y_MH),
    "all_gather": Dispatcher(_all_gather_dispatch, _all_gather_combine),
    "all_to_all": Dispatcher(_all_to_all_dispatch, _all_to_all_combine),
}


def get_dispatcher(name: str) -> Dispatcher:
    """The dispatcher of that name; an unknown one is refused with the list."""
    if name not in DISPATCHERS:
        raise ConfigError(f"dispatcher is {name!r}, but must be one of {', '.join(map(repr, DISPATCHERS))}")
    return DISPATCHERS[name]
