"""The global token shuffle: a keyed permutation of the tokens over the ranks of one expert group, and its inverse.

T tokens of this rank, P ranks of the `expert` axis. Each rank permutes its tokens and sends an equal part of them to every rank;
so each rank ends with T tokens of which about T / P come from every rank. Rows move by gathers both ways.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives import vary_like
from moe_jax.moe.exchange import EXPERT_AXIS, swap_blocks
from moe_jax.moe.permute import expand_rows, take_or_zero
from moe_jax.sharding import BATCH


class Shuffle(NamedTuple):
    """This rank's permutation of its T tokens, padded to S, a multiple of P: order_S (T: padding) and its inverse, slot_T."""

    order_S: jax.Array
    slot_T: jax.Array


def make_shuffle(key: jax.Array, num_tokens: int, like: jax.Array) -> Shuffle:
    """This rank's permutation; another one for each device. like: any array of this rank, for the type."""
    num_ranks = lax.axis_size(EXPERT_AXIS)
    padded = -(-num_tokens // num_ranks) * num_ranks
    device_key = jax.random.fold_in(key, lax.axis_index(BATCH))
    order_S = jax.random.permutation(device_key, jnp.arange(padded, dtype=jnp.int32))
    order_S = vary_like(order_S, like)
    slot_S = jnp.argsort(order_S).astype(jnp.int32)
    return Shuffle(jnp.minimum(order_S, num_tokens), slot_S[:num_tokens])


def shuffle(plan: Shuffle, rows_TX: jax.Array) -> jax.Array:
    """[T, X] of this rank -> [S, X] of all ranks of its expert group; rows of padding are zeros."""
    return swap_blocks(_take(rows_TX, plan.order_S, plan.slot_T))


def unshuffle(plan: Shuffle, rows_SX: jax.Array) -> jax.Array:
    """The inverse of `shuffle`: every row back at its place, [T, X]."""
    return _take(swap_blocks(rows_SX), plan.slot_T, plan.order_S)


def _take(rows: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows[index], zeros where the index is out of range; `inverse` makes the gradient a gather, too."""
    if jnp.issubdtype(rows.dtype, jnp.floating):
        return expand_rows(rows, index, inverse[:, None])
    return take_or_zero(rows, index)
