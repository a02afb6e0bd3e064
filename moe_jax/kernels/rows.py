"""Passes over rows that are bound by memory, as single kernels on GPUs (Pallas' Triton backend): each reads and writes once.

A pairs, M rows, K slots of a row, H hidden size, I expert width. `spread_rows` copies a row to where its pairs are;
`gated_gradient` is the gradient of a gated activation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe_jax.collectives import shape_like
from moe_jax.kernels.choice import is_gpu

CHUNK = 2048  # numbers of a row that a program holds at a time
WARPS = 4

Activation = Callable[[jax.Array], jax.Array]


def spread_rows(
    rows_MH: Float[Array, "M H"], source_A: Int[Array, " A"], slots_MK: Int[Array, "M K"]
) -> Float[Array, "A H"]:
    """rows[source]: out[slots[m, k]] = rows[m] for every slot in range. What no slot names may hold anything.

    source_A and slots_MK say the same: the row of a pair (M: none), and the pairs of a row (A: none). GPUs go by the slots: a row
    is read once then, and not from memory again for each of its pairs.
    """
    if not is_gpu():
        return rows_MH.at[source_A].get(mode="fill", fill_value=0)
    return _spread_rows(rows_MH, slots_MK, source_A.shape[0])


class GatedGradient(NamedTuple):
    """d gate_up [A, 2 I] and scaled hidden [A, I] in the dtype of the activations; d weights [A], float32."""

    d_gate_up_AF: jax.Array
    scaled_AI: jax.Array
    d_weights_A: jax.Array


def gated_gradient(
    gate_up_AF: Float[Array, "A F"],
    d_hidden_AI: Float[Array, "A I"],
    weights_A: Float[Array, " A"],
    activation: Activation,
) -> GatedGradient:
    """The gradient of weights[a] * hidden[a], hidden = activation(gate) * up. d_hidden: that by weights[a] * hidden[a].

    d weights[a] = <d_hidden[a], hidden[a]>. scaled hidden = weights[a] * hidden[a], an operand of the down product's weight
    gradient. Computed in float32. On GPUs the first two results take the place of the arguments, if nothing else needs those.
    """
    if not is_gpu() or not _triton_has(activation):
        gate_AI, up_AI = jnp.split(gate_up_AF.astype(jnp.float32), 2, axis=1)
        d_hidden = d_hidden_AI.astype(jnp.float32)
        hidden_AI, d_gate_AI, d_up_AI = _gated(gate_AI, up_AI, d_hidden * weights_A[:, None], activation)
        d_weights_A = jnp.sum(d_hidden * hidden_AI, axis=1)
        d_gate_up_AF = jnp.concatenate([d_gate_AI, d_up_AI], axis=1)
        scaled_AI = hidden_AI * weights_A[:, None]
        return GatedGradient(d_gate_up_AF.astype(gate_up_AF.dtype), scaled_AI.astype(gate_up_AF.dtype), d_weights_A)
    return GatedGradient(*_gated_gradient(gate_up_AF, d_hidden_AI, weights_A, activation))


def _triton_has(activation: Activation) -> bool:
    """Whether the kernel can hold the activation: Triton has no erf, which the exact GELU takes."""
    return "erf" not in str(jax.make_jaxpr(activation)(jnp.zeros((), jnp.float32)))


def _gated(gate: jax.Array, up: jax.Array, d_hidden: jax.Array, activation: Activation) -> tuple[jax.Array, ...]:
    """(hidden, d gate, d up), in the dtype of the arguments."""
    activated, pull = jax.vjp(activation, gate)
    (d_gate,) = pull(d_hidden * up)
    return activated * up, d_gate, d_hidden * activated


def _spread_rows(rows_MH: jax.Array, slots_MK: jax.Array, num_pairs: int, interpret: bool = False) -> jax.Array:
    from jax.experimental.pallas import triton as plt  # here: a jaxlib without CUDA need not have it

    (num_rows, width), num_slots = rows_MH.shape, slots_MK.shape[1]
    chunk = min(CHUNK, pl.next_power_of_2(width))

    def kernel(rows, slots, out):
        row = pl.program_id(0)

        @pl.loop(0, pl.cdiv(width, chunk))
        def _chunk(c):
            columns = pl.ds(c * chunk, chunk)
            inside = c * chunk + jnp.arange(chunk) < width
            values = plt.load(rows.at[row, columns], mask=inside, other=0)
            for k in range(num_slots):
                slot = slots[row, k]
                is_used = (slot >= 0) & (slot < num_pairs)
                plt.store(out.at[jnp.where(is_used, slot, 0), columns], values, mask=inside & is_used)

    result = shape_like((num_pairs, width), rows_MH.dtype, rows_MH, slots_MK)
    return _call(kernel, num_rows, [result], interpret, rows_MH, slots_MK)[0]


def _gated_gradient(
    gate_up_AF: jax.Array, d_hidden_AI: jax.Array, weights_A: jax.Array, activation: Activation, interpret: bool = False
) -> tuple[jax.Array, ...]:
    from jax.experimental.pallas import triton as plt

    num_pairs, width = d_hidden_AI.shape
    chunk = min(CHUNK, pl.next_power_of_2(width))
    num_chunks = pl.cdiv(width, chunk)

    def kernel(gate_up, d_hidden, weights, d_gate_up, scaled, d_weights):
        pair = pl.program_id(0)
        weight = weights[pair]

        def one_chunk(c, total):
            start = c * chunk
            inside = start + jnp.arange(chunk) < width
            gates, ups = pl.ds(start, chunk), pl.ds(width + start, chunk)

            def get(ref, columns):
                return plt.load(ref.at[pair, columns], mask=inside, other=0).astype(jnp.float32)

            def put(ref, columns, values):
                plt.store(ref.at[pair, columns], values.astype(ref.dtype), mask=inside)

            d = get(d_hidden, gates)
            hidden, d_gate, d_up = _gated(get(gate_up, gates), get(gate_up, ups), d * weight, activation)
            # The results lie where the arguments do. A thread writes the places that it has read: same types, same layout.
            put(d_gate_up, gates, d_gate)
            put(d_gate_up, ups, d_up)
            put(scaled, gates, hidden * weight)
            return total + d * hidden

        total = jax.lax.fori_loop(0, num_chunks, one_chunk, jnp.zeros((chunk,), jnp.float32))
        d_weights[pair] = jnp.sum(total)

    arguments = gate_up_AF, d_hidden_AI.astype(gate_up_AF.dtype), weights_A
    results = [shape_like(a.shape, a.dtype, *arguments) for a in arguments]
    return _call(kernel, num_pairs, results, interpret, *arguments, aliases={0: 0, 1: 1})


def _call(
    kernel: Any, size: int, results: list[Any], interpret: bool, *arguments: jax.Array, aliases: Any = None
) -> tuple[jax.Array, ...]:
    """One program for each of `size` rows."""
    from jax.experimental.pallas import triton as plt

    call = pl.pallas_call(
        kernel,
        out_shape=results,
        grid=(size,),
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
    )
    return tuple(call(*arguments))
