"""The experts of one device: a gated MLP each over the rows that name them, and its gradient, a block of pairs at a time.

M rows, K expert slots per row, E local experts, A (row, expert) pairs of a block, H hidden size, I expert width, F = 2 I.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.grouped_matmul import grouped_matmul, input_gradient, weight_gradient
from moe_jax.layers.mlp import gated
from moe_jax.moe.permute import inverse_permutation, sum_slots, take_or_zero


class Weights(NamedTuple):
    """The weights of the local experts in the compute dtype: gate and up [E, H, 2, I], down [E, I, H]."""

    gate_up_EHGI: jax.Array
    down_EIH: jax.Array

    @property
    def gate_up_EHF(self) -> jax.Array:
        """Gate and up as one matrix."""
        num_experts, hidden = self.gate_up_EHGI.shape[:2]
        return self.gate_up_EHGI.reshape(num_experts, hidden, -1)


class Block(NamedTuple):
    """One block of the (row, expert) pairs in expert order, rows in order within an expert.

    source_A: int32, the row of each pair (M: none). weights_A: float32, its combine weight. slots_MK: int32, a row's pairs in this
    block (A: none). group_sizes_E: int32, pairs of each expert in this block.
    """

    source_A: jax.Array
    weights_A: jax.Array
    slots_MK: jax.Array
    group_sizes_E: jax.Array


def make_block(
    expert_ids_MK: Int[Array, "M K"], weights_MK: Float[Array, "M K"], num_experts: int, num_pairs: int,
    index: jax.Array | int = 0,
) -> Block:  # fmt: skip
    """Block number `index` of `num_pairs` pairs. Id E means "no expert here"; a row names an expert at most once."""
    num_rows, num_slots = expert_ids_MK.shape
    flat_N = expert_ids_MK.reshape(-1)
    order_N = jnp.argsort(flat_N, stable=True).astype(jnp.int32)
    position_N = inverse_permutation(order_N)
    start = index * num_pairs
    padded_N = jnp.pad(order_N, (0, num_pairs))  # so that the last block can be cut out
    order_A = lax.dynamic_slice_in_dim(padded_N, start, num_pairs)
    expert_E = jnp.arange(num_experts, dtype=flat_N.dtype)
    sizes_E = jnp.sum(flat_N[:, None] == expert_E[None, :], axis=0, dtype=jnp.int32)
    ends_E = jnp.cumsum(sizes_E)
    is_used_A = start + jnp.arange(num_pairs, dtype=jnp.int32) < ends_E[-1]
    place_N = position_N - start
    is_here_N = (flat_N < num_experts) & (place_N >= 0) & (place_N < num_pairs)
    clip = lambda x: jnp.clip(x - start, 0, num_pairs)  # noqa: E731
    return Block(
        source_A=jnp.where(is_used_A, order_A // num_slots, num_rows),
        weights_A=jnp.where(is_used_A, take_or_zero(weights_MK.reshape(-1), order_A), 0.0),
        slots_MK=jnp.where(is_here_N, place_N, num_pairs).reshape(num_rows, num_slots),
        group_sizes_E=clip(ends_E) - clip(ends_E - sizes_E),
    )


def pre_activations(rows_MH: Float[Array, "M H"], block: Block, weights: Weights) -> Float[Array, "A F"]:
    """Gate and up of every pair."""
    return grouped_matmul(take_or_zero(rows_MH, block.source_A), weights.gate_up_EHF, block.group_sizes_E)


def experts_output(
    gate_up_AF: Float[Array, "A F"], weights_MK: Float[Array, "M K"], block: Block, weights: Weights,
    activation: Callable[[jax.Array], jax.Array],
) -> Float[Array, "M H"]:  # fmt: skip
    """sum_k weights[m, k] * expert[ids[m, k]](rows[m]) over the block's pairs, float32."""
    hidden_AI = _gated(gate_up_AF, activation)
    out_AH = grouped_matmul(hidden_AI, weights.down_EIH, block.group_sizes_E)
    return sum_slots(out_AH, block.slots_MK, weights_MK)


def experts_gradient(
    rows_MH: Float[Array, "M H"], gate_up_AF: Float[Array, "A F"], dy_MH: Float[Array, "M H"], block: Block,
    weights: Weights, activation: Callable[[jax.Array], jax.Array],
) -> tuple[Float[Array, "M H"], Float[Array, "M K"], Weights]:  # fmt: skip
    """(d rows float32, d combine weights float32, d weights in their dtype) of `experts_output`.

    The down product is not repeated: a weight's gradient is <dy W_down^T, hidden>, of which the first factor is needed anyway.
    """
    dy_AH = take_or_zero(dy_MH, block.source_A)
    hidden_AI, pull = jax.vjp(lambda gate_up: _gated(gate_up, activation), gate_up_AF)
    d_hidden_AI = input_gradient(dy_AH, weights.down_EIH, block.group_sizes_E)
    d_weight_A = jnp.sum(d_hidden_AI.astype(jnp.float32) * hidden_AI.astype(jnp.float32), axis=1)
    scale_A1 = block.weights_A[:, None]
    (d_gate_up_AF,) = pull((d_hidden_AI * scale_A1).astype(hidden_AI.dtype))
    d_down = weight_gradient((hidden_AI * scale_A1).astype(hidden_AI.dtype), dy_AH, block.group_sizes_E)
    d_gate_up = weight_gradient(take_or_zero(rows_MH, block.source_A), d_gate_up_AF, block.group_sizes_E)
    d_rows_AH = input_gradient(d_gate_up_AF, weights.gate_up_EHF, block.group_sizes_E)
    d_weights = Weights(
        d_gate_up.reshape(weights.gate_up_EHGI.shape).astype(weights.gate_up_EHGI.dtype),
        d_down.astype(weights.down_EIH.dtype),
    )
    return sum_slots(d_rows_AH, block.slots_MK), take_or_zero(d_weight_A, block.slots_MK), d_weights


def _gated(gate_up_AF: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return gated(gate_up_AF.reshape(gate_up_AF.shape[0], 2, -1), activation)
