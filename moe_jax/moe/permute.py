"""Moving rows by index, with gathers in both directions: no scatter-add of rows, so no order of additions to differ.

M input rows, A assigned rows (one for each (row, expert) pair), K slots per input row, H width. `source_A` names the input
row of an assigned row, `slots_MK` the assigned rows of an input row; each is the inverse of the other. M in `source_A` and A in
`slots_MK` mean "none".
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def take_or_zero(rows_MH: jax.Array, index_A: jax.Array) -> jax.Array:
    """rows[index], and zeros where the index is out of range."""
    return rows_MH.at[index_A].get(mode="fill", fill_value=0)


@jax.custom_vjp
def expand_rows(
    rows_MH: Float[Array, "M H"], source_A: Int[Array, " A"], slots_MK: Int[Array, "M K"]
) -> Float[Array, "A H"]:
    """Row `source_A[a]` for each a; zeros where there is none. Its gradient sums over a row's slots, in float32."""
    return take_or_zero(rows_MH, source_A)


def _expand_forward(rows_MH, source_A, slots_MK):
    return expand_rows(rows_MH, source_A, slots_MK), slots_MK


def _expand_backward(slots_MK, d_AH):
    return _sum_slots(d_AH, slots_MK).astype(d_AH.dtype), None, None


expand_rows.defvjp(_expand_forward, _expand_backward)


def _sum_slots(rows_AH: jax.Array, slots_MK: jax.Array) -> jax.Array:
    """sum_k rows[slots[m, k]], float32, one gather of rows at a time: nothing K times as large as the result."""
    first_M, *rest = jnp.unstack(slots_MK, axis=1)
    total_MH = take_or_zero(rows_AH, first_M).astype(jnp.float32)
    for slots_M in rest:
        total_MH = total_MH + take_or_zero(rows_AH, slots_M).astype(jnp.float32)
    return total_MH


@jax.custom_vjp
def sum_rows(
    rows_AH: Float[Array, "A H"], source_A: Int[Array, " A"], slots_MK: Int[Array, "M K"]
) -> Float[Array, "M H"]:
    """sum_k rows[slots[m, k]], float32: the transpose of `expand_rows`."""
    return _sum_slots(rows_AH, slots_MK)


def _sum_forward(rows_AH, source_A, slots_MK):
    return _sum_slots(rows_AH, slots_MK), (source_A, rows_AH[:0])


def _sum_backward(residuals, d_MH):
    source_A, like = residuals
    return take_or_zero(d_MH, source_A).astype(like.dtype), None, None


sum_rows.defvjp(_sum_forward, _sum_backward)


@jax.custom_vjp
def combine_rows(
    rows_AH: Float[Array, "A H"],
    weights_MK: Float[Array, "M K"],
    source_A: Int[Array, " A"],
    slots_MK: Int[Array, "M K"],
) -> Float[Array, "M H"]:
    """sum_k weights[m, k] * rows[slots[m, k]], float32. Slots that hold none add nothing and get no weight gradient."""
    total_MH = jnp.zeros((), jnp.float32)
    for weights_M, slots_M in zip(jnp.unstack(weights_MK, axis=1), jnp.unstack(slots_MK, axis=1), strict=True):
        total_MH = total_MH + weights_M[:, None] * take_or_zero(rows_AH, slots_M).astype(jnp.float32)
    return total_MH


def _combine_forward(rows_AH, weights_MK, source_A, slots_MK):
    return combine_rows(rows_AH, weights_MK, source_A, slots_MK), (rows_AH, weights_MK, source_A, slots_MK)


def _combine_backward(residuals, d_MH):
    rows_AH, weights_MK, source_A, slots_MK = residuals
    d_weights = [
        jnp.sum(d_MH * take_or_zero(rows_AH, slots_M).astype(jnp.float32), axis=1)
        for slots_M in jnp.unstack(slots_MK, axis=1)
    ]
    d_rows_AH = _weight_of_assigned(weights_MK, source_A, slots_MK)[:, None] * take_or_zero(d_MH, source_A)
    return d_rows_AH.astype(rows_AH.dtype), jnp.stack(d_weights, axis=1), None, None


def _weight_of_assigned(weights_MK, source_A, slots_MK) -> jax.Array:
    """weights_MK in assigned order [A]: of the source row's K slots, the one that points back at a."""
    index_A = jnp.arange(source_A.shape[0], dtype=slots_MK.dtype)
    points_back_AK = take_or_zero(slots_MK + 1, source_A) == index_A[:, None] + 1
    return jnp.sum(jnp.where(points_back_AK, take_or_zero(weights_MK, source_A), 0.0), axis=1)


combine_rows.defvjp(_combine_forward, _combine_backward)


def inverse_permutation(order_N: Int[Array, " N"]) -> Int[Array, " N"]:
    """inverse[order[n]] = n."""
    return jnp.zeros_like(order_N).at[order_N].set(lax.iota(order_N.dtype, order_N.shape[0]), unique_indices=True)
