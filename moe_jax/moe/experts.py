"""The experts of one device: a gated MLP each, over the rows that name them.

M rows, K expert slots per row, E local experts, A assigned rows (a (row, expert) pair each), H hidden size, I expert width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.grouped_matmul import grouped_matmul
from moe_jax.layers.mlp import gated
from moe_jax.moe.permute import combine_rows, expand_rows, inverse_permutation


def expert_mlp(
    rows_MH: Float[Array, "M H"],
    expert_ids_MK: Int[Array, "M K"],
    weights_MK: Float[Array, "M K"],
    gate_up_EHGI: Float[Array, "E H 2 I"],
    down_EIH: Float[Array, "E I H"],
    activation: Callable[[jax.Array], jax.Array],
) -> Float[Array, "M H"]:
    """sum_k weights[m, k] * expert[expert_ids[m, k]](rows[m]), float32.

    Id E means "no expert here". A row names an expert at most once, so at most min(K, E) of its slots are in use.
    """
    num_experts, hidden, _, width = gate_up_EHGI.shape
    source_A, slots_MK, group_sizes_E = assign_rows(expert_ids_MK, num_experts)
    x_AH = expand_rows(rows_MH, source_A, slots_MK)
    gate_up_AF = grouped_matmul(x_AH, gate_up_EHGI.reshape(num_experts, hidden, 2 * width), group_sizes_E)
    hidden_AI = gated(gate_up_AF.reshape(-1, 2, width), activation)
    out_AH = grouped_matmul(hidden_AI, down_EIH, group_sizes_E)
    return combine_rows(out_AH, weights_MK, source_A, slots_MK)


def assign_rows(expert_ids_MK: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(source_A, slots_MK, group_sizes_E): the (row, expert) pairs in expert order, rows in order within an expert."""
    num_rows, num_slots = expert_ids_MK.shape
    num_assigned = num_rows * min(num_slots, num_experts)
    flat_N = expert_ids_MK.reshape(-1)
    order_N = jnp.argsort(flat_N, stable=True).astype(jnp.int32)
    used_N = jnp.take(flat_N, order_N[:num_assigned]) < num_experts
    source_A = jnp.where(used_N, order_N[:num_assigned] // num_slots, num_rows)
    position_N = inverse_permutation(order_N)
    slots_MK = jnp.where(flat_N < num_experts, position_N, num_assigned).reshape(num_rows, num_slots)
    expert_E = jnp.arange(num_experts, dtype=flat_N.dtype)
    group_sizes_E = jnp.sum(flat_N[:, None] == expert_E[None, :], axis=0, dtype=jnp.int32)
    return source_A, slots_MK, group_sizes_E
