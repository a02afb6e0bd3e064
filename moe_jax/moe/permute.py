"""Moving rows by index, with gathers in both directions: no scatter-add of rows, so no order of additions to differ.

M input rows, A assigned rows, K slots per input row, H width. `source_A` names the input row of an assigned row, `slots_MK` the
assigned rows of an input row; each is the inverse of the other. M in `source_A` and A in `slots_MK` mean "none".
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def take_or_zero(rows_MH: jax.Array, index_A: jax.Array) -> jax.Array:
    """rows[index], and zeros where the index is out of range."""
    return rows_MH.at[index_A].get(mode="fill", fill_value=0)


def sum_slots(rows_AH: jax.Array, slots_MK: jax.Array, weights_MK: jax.Array | None = None) -> jax.Array:
    """sum_k weights[m, k] * rows[slots[m, k]], float32; without weights the plain sum.

    One gather of rows at a time: nothing K times as large as the result.
    """
    total_MH = jnp.zeros((), jnp.float32)
    for k, slots_M in enumerate(jnp.unstack(slots_MK, axis=1)):
        rows_MH = take_or_zero(rows_AH, slots_M).astype(jnp.float32)
        total_MH = total_MH + (rows_MH if weights_MK is None else weights_MK[:, k, None] * rows_MH)
    return total_MH


@jax.custom_vjp
def expand_rows(
    rows_MH: Float[Array, "M H"], source_A: Int[Array, " A"], slots_MK: Int[Array, "M K"]
) -> Float[Array, "A H"]:
    """Row `source_A[a]` for each a; zeros where there is none. Its gradient sums over a row's slots, in float32."""
    return take_or_zero(rows_MH, source_A)


def _expand_forward(rows_MH, source_A, slots_MK):
    return expand_rows(rows_MH, source_A, slots_MK), slots_MK


def _expand_backward(slots_MK, d_AH):
    return sum_slots(d_AH, slots_MK).astype(d_AH.dtype), None, None


expand_rows.defvjp(_expand_forward, _expand_backward)
