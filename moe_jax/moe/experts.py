"""The experts of one device: a gated MLP each over the rows that name them, and its gradient, a block of pairs at a time.

M rows, K expert slots per row, E local experts, A (row, expert) pairs of a block, H hidden size, I expert width, F = 2 I.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.choice import is_gpu
from moe_jax.kernels.grouped_matmul import grouped_matmul, input_gradient, weight_gradient
from moe_jax.kernels.rows import Activation, gated_gradient, spread_rows
from moe_jax.layers.mlp import gated
from moe_jax.moe.permute import sum_slots, take_or_zero

# Pairs that are compared with one another. XLA on CPU fuses a comparison into its sum only up to so many; with 256, the pairs
# of 16,384 tokens with 8 of 128 experts would take 204 MB, not 7.
COUNTED_PAIRS, COUNTED_PAIRS_GPU = 32, 256


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


class Pairs(NamedTuple):
    """All N = M K expert slots of the received rows, sorted by expert.

    order_N: int32, the used slots in order. position_N: int32, the place of a slot (N: unused). ends_E: int32, the place after
    the last pair of each expert. weights_MK: float32, the combine weights.
    """

    order_N: jax.Array
    position_N: jax.Array
    ends_E: jax.Array
    weights_MK: jax.Array

    @property
    def num_pairs(self) -> jax.Array:
        return self.ends_E[-1]


def sort_pairs(
    expert_ids_MK: Int[Array, "M K"], weights_MK: Float[Array, "M K"], num_experts: int
) -> Pairs:  # fmt: skip
    """The pairs of the rows with their experts. Id E means "no expert here"; a row names an expert at most once.

    By counting, a block of pairs at a time: a pair's place is the sum of the pairs of lower experts, of its expert's pairs in
    earlier blocks, and of those before it in its block.
    """
    flat_N = expert_ids_MK.reshape(-1)
    num_pairs, size = flat_N.shape[0], COUNTED_PAIRS_GPU if is_gpu() else COUNTED_PAIRS
    num_blocks = -(-num_pairs // size)
    padding = num_blocks * size - num_pairs
    ids_BC = jnp.pad(flat_N, (0, padding), constant_values=num_experts).reshape(num_blocks, size)
    expert_E = jnp.arange(num_experts, dtype=flat_N.dtype)
    counts_BE = jnp.sum(ids_BC[:, :, None] == expert_E[None, None, :], axis=1, dtype=jnp.int32)
    ends_BE = jnp.cumsum(counts_BE, axis=0)
    ends_E = jnp.cumsum(ends_BE[-1])
    starts_BE = ends_BE - counts_BE + (ends_E - ends_BE[-1])[None, :]
    index_C = jnp.arange(size)
    is_before_BCC = (ids_BC[:, :, None] == ids_BC[:, None, :]) & (index_C[None, None, :] < index_C[None, :, None])
    rank_BC = jnp.sum(is_before_BCC, axis=2, dtype=jnp.int32)
    place_BC = jnp.take_along_axis(starts_BE, jnp.minimum(ids_BC, num_experts - 1), axis=1) + rank_BC
    position_N = jnp.where(ids_BC < num_experts, place_BC, num_pairs).reshape(-1)[:num_pairs]
    slot_N = jnp.arange(num_pairs, dtype=jnp.int32)
    order_N = jnp.zeros_like(slot_N).at[position_N].set(slot_N, mode="drop")
    return Pairs(order_N, position_N, ends_E, weights_MK)


def cut_block(pairs: Pairs, start: jax.Array | int, num_pairs: int) -> Block:
    """The block of `num_pairs` pairs from place `start` on; those past the last pair are empty."""
    num_rows, num_slots = pairs.weights_MK.shape
    place_A = start + jnp.arange(num_pairs, dtype=jnp.int32)
    slot_A = take_or_zero(pairs.order_N, place_A)
    is_used_A = place_A < pairs.num_pairs
    place_N = pairs.position_N - start
    is_here_N = (pairs.position_N < pairs.order_N.shape[0]) & (place_N >= 0) & (place_N < num_pairs)
    ends_E = jnp.clip(pairs.ends_E - start, 0, num_pairs)
    return Block(
        source_A=jnp.where(is_used_A, slot_A // num_slots, num_rows),
        weights_A=jnp.where(is_used_A, take_or_zero(pairs.weights_MK.reshape(-1), slot_A), 0.0),
        slots_MK=jnp.where(is_here_N, place_N, num_pairs).reshape(num_rows, num_slots),
        group_sizes_E=jnp.diff(ends_E, prepend=0),
    )


def hidden_activations(
    rows_MH: Float[Array, "M H"], block: Block, weights: Weights, activation: Activation
) -> tuple[Float[Array, "A F"], Float[Array, "A I"]]:
    """(gate and up, activation(gate) * up) of every pair."""
    rows_AH = spread_rows(rows_MH, block.source_A, block.slots_MK)
    gate_up_AF = grouped_matmul(rows_AH, weights.gate_up_EHF, block.group_sizes_E)
    return gate_up_AF, gated(gate_up_AF.reshape(gate_up_AF.shape[0], 2, -1), activation)


def experts_output(
    hidden_AI: Float[Array, "A I"], weights_MK: Float[Array, "M K"], block: Block, weights: Weights
) -> Float[Array, "M H"]:
    """sum_k weights[m, k] * expert[ids[m, k]](rows[m]) over the block's pairs, float32."""
    out_AH = grouped_matmul(hidden_AI, weights.down_EIH, block.group_sizes_E)
    return sum_slots(out_AH, block.slots_MK, weights_MK)


def experts_gradient(
    rows_MH: Float[Array, "M H"], gate_up_AF: Float[Array, "A F"], dy_MH: Float[Array, "M H"], block: Block,
    weights: Weights, activation: Activation, total: Weights | None = None,
    weights_dtype: Any = None,
) -> tuple[Float[Array, "M H"], Float[Array, "M K"], Weights]:  # fmt: skip
    """(d rows, d combine weights, d weights) of `experts_output`, float32: what is added up is rounded once, at the end.

    total: what d weights are added to. weights_dtype: of d weights without a total; None is float32.

    The down product is not repeated: a weight's gradient is <dy W_down^T, hidden>, of which the first factor is needed anyway.
    """
    dy_AH = spread_rows(dy_MH, block.source_A, block.slots_MK)
    d_hidden_AI = input_gradient(dy_AH, weights.down_EIH, block.group_sizes_E)
    d_gate_up_AF, scaled_AI, d_weight_A = gated_gradient(gate_up_AF, d_hidden_AI, block.weights_A, activation)
    rows_AH = spread_rows(rows_MH, block.source_A, block.slots_MK)
    totals = (total.down_EIH, total.gate_up_EHF) if total else (None, None)
    out_dtype = None if total else weights_dtype
    d_down = weight_gradient(scaled_AI, dy_AH, block.group_sizes_E, totals[0], out_dtype)
    d_gate_up = weight_gradient(rows_AH, d_gate_up_AF, block.group_sizes_E, totals[1], out_dtype)
    d_rows_AH = input_gradient(d_gate_up_AF, weights.gate_up_EHF, block.group_sizes_E)
    d_weights = Weights(d_gate_up.reshape(weights.gate_up_EHGI.shape), d_down)
    return sum_slots(d_rows_AH, block.slots_MK), take_or_zero(d_weight_A, block.slots_MK), d_weights
