"""The routed experts: exchange there, compute, exchange back, in as many rounds as the routing needs, under one `custom_vjp`.

The tokens of a device are cut into `num_chunks` chunks. Every chunk's first round, and the first block of the pairs in it, is
straight code, so that the exchange of one chunk can run beside the experts of another. What does not fit runs afterwards, in loops
whose length is data, and which are not entered otherwise: the further blocks of ranks that got more pairs in a first round, and
further rounds for what did not fit into the buffers. How often a loop with an exchange runs is the same on all devices; the blocks
inside are each rank's own. Exact under any routing, in bounded memory, with nothing dropped and nothing compiled anew.

T tokens of this device, N chunks of T / N tokens (the last one padded), K experts per token, E experts, H hidden size, M received
rows of a round, F = 2 I expert width.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moe_jax.collectives import vary_like, zeros_like_type
from moe_jax.layers.mlp import ACTIVATION_FUNCTIONS
from moe_jax.moe.exchange import ExchangeShape, Plan, give_back, local_expert_ids, make_plan, send
from moe_jax.moe.experts import (
    Block,
    Pairs,
    Weights,
    cut_block,
    experts_gradient,
    experts_output,
    hidden_activations,
    sort_pairs,
)
from moe_jax.sharding import BATCH

# The received rows of the first rounds: what rematerialisation may keep, so that the exchange is not repeated.
DISPATCHED_NAME = "moe_dispatched"


@dataclasses.dataclass(frozen=True)
class RoutedSettings:
    """shape: the exchange of one chunk. combine_dtype: what results travel back in; None is float32."""

    shape: ExchangeShape
    num_chunks: int
    activation: str
    combine_dtype: Any = None

    @property
    def is_one_block(self) -> bool:
        """Whether all is computed in one block, whatever the routing."""
        shape = self.shape
        return self.num_chunks == 1 and not shape.max_further_rounds and shape.first_pairs >= shape.most_pairs


class Received(NamedTuple):
    """A round's rows in the compute dtype [M, H], their local expert ids int32 [M, K] and combine weights float32 [M, K]."""

    rows_MH: jax.Array
    expert_ids_MK: jax.Array
    weights_MK: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_experts(
    settings: RoutedSettings, x_TH: jax.Array, weights_TK: jax.Array, expert_ids_TK: jax.Array, weights: Weights
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """([T, H] in the dtype of x: sum_k weights[t, k] expert[ids[t, k]](x[t]); numbers of further rounds and further blocks).

    The rounds (int32) are the same on all devices, the blocks this device's own.

    x_TH: in the compute dtype. weights_TK: float32. expert_ids_TK: int32, E for nowhere. The weights are this rank's experts.
    """
    return _forward(settings, x_TH, weights_TK, expert_ids_TK, weights)[0]


def _forward(settings: RoutedSettings, x_TH, weights_TK, expert_ids_TK, weights: Weights):
    shape, numbers = settings.shape, range(settings.num_chunks)
    experts = _Experts(settings, weights)
    chunks = _Chunks(settings, x_TH, weights_TK, expert_ids_TK)
    received = [Received(*(checkpoint_name(a, DISPATCHED_NAME) for a in chunks.receive(n, 0))) for n in numbers]
    sorted_pairs = [experts.sort(got) for got in received]

    def add_back(y_NTH: jax.Array, chunk: jax.Array | int, round_index: jax.Array | int, y_MH: jax.Array) -> jax.Array:
        y_TH = give_back(shape, chunks.plan(chunk), round_index, y_MH, settings.combine_dtype)
        return _add_at(y_NTH, chunk, y_TH)

    computed = [experts.first_output(*each) for each in zip(received, sorted_pairs, strict=True)]
    parts = [
        give_back(shape, chunks.plan(n), 0, y_MH, settings.combine_dtype)
        for n, (y_MH, _) in zip(numbers, computed, strict=True)
    ]

    def blocks(chunk: jax.Array | int, carry):
        y_NTH, num_blocks = carry
        got, pairs = _choose((received, sorted_pairs), chunk)
        y_MH, more = experts.further_output(got, pairs, shape.first_pairs)
        return add_back(y_NTH, chunk, 0, y_MH), num_blocks + more

    def further(chunk: jax.Array, round_index: jax.Array, carry):
        y_NTH, num_blocks = carry
        got = chunks.receive(chunk, round_index)
        y_MH, more = experts.further_output(got, experts.sort(got), 0)
        return add_back(y_NTH, chunk, round_index, y_MH), num_blocks + more

    carry = jnp.stack(parts), vary_like(jnp.zeros((), jnp.int32), x_TH)
    carry = chunks.run_further_blocks(sorted_pairs, blocks, carry)
    (y_NTH, num_blocks), num_rounds = chunks.run_further_rounds(further, carry)
    y_TH = chunks.join(y_NTH).astype(x_TH.dtype)
    # The gradient writes over these: nothing of it may be scheduled while they are still read here, or there would be a copy.
    y_TH, gate_ups = lax.optimization_barrier((y_TH, [gate_up_AF for _, gate_up_AF in computed]))
    residuals = x_TH, weights_TK, expert_ids_TK, weights, received, gate_ups
    return (y_TH, num_rounds, num_blocks), residuals


def _backward(settings: RoutedSettings, residuals, cotangents):
    x_TH, weights_TK, expert_ids_TK, weights, received, gate_ups = residuals
    shape, numbers = settings.shape, range(settings.num_chunks)
    experts = _Experts(settings, weights)
    chunks = _Chunks(settings, x_TH, weights_TK, expert_ids_TK)
    dy_NTH = chunks.cut(cotangents[0])
    sorted_pairs = [experts.sort(got) for got in received]

    def send_dy(chunk: jax.Array | int, round_index: jax.Array | int) -> jax.Array:
        return send(shape, chunks.plan(chunk), round_index, _at(dy_NTH, chunk))

    def back(chunk: jax.Array | int, round_index: jax.Array | int, gradient: RowsGradient) -> RowsGradient:
        """The gradients of the chunk's tokens: d x [T, H] and d combine weights [T, K], float32."""
        plan = chunks.plan(chunk)
        dx_TH = give_back(shape, plan, round_index, gradient.d_rows_MH, x_TH.dtype)
        return RowsGradient(dx_TH, give_back(shape, plan, round_index, gradient.d_weights_MK))

    dys = [send_dy(n, 0) for n in numbers]
    d_weights, parts = None, []
    for n, got, pairs, dy_MH, gate_up_AF in zip(numbers, received, sorted_pairs, dys, gate_ups, strict=True):
        rows, d_weights = experts.first_gradient(got, pairs, dy_MH, gate_up_AF, d_weights)
        parts.append(back(n, 0, rows))

    def add_back(
        carry, chunk: jax.Array | int, round_index: jax.Array | int, got: Received, pairs: Pairs, dy_MH: jax.Array
    ):
        total, d_weights = carry
        start = shape.first_pairs if isinstance(round_index, int) else 0
        rows, d_weights = experts.further_gradient(got, pairs, dy_MH, start, d_weights)
        one = back(chunk, round_index, rows)
        return jax.tree.map(lambda all_N, part: _add_at(all_N, chunk, part), total, one), d_weights

    def blocks(chunk: jax.Array | int, carry):
        return add_back(carry, chunk, 0, *_choose((received, sorted_pairs, dys), chunk))

    def further(chunk: jax.Array, round_index: jax.Array, carry):
        got = chunks.receive(chunk, round_index)
        return add_back(carry, chunk, round_index, got, experts.sort(got), send_dy(chunk, round_index))

    carry = jax.tree.map(lambda *each: jnp.stack(each), *parts), d_weights
    carry = chunks.run_further_blocks(sorted_pairs, blocks, carry)
    ((dx_NTH, d_combine_NTK), d_weights), _ = chunks.run_further_rounds(further, carry)
    d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
    return chunks.join(dx_NTH).astype(x_TH.dtype), chunks.join(d_combine_NTK), None, d_weights


routed_experts.defvjp(_forward, _backward)


class RowsGradient(NamedTuple):
    """d rows [M, H] and d combine weights [M, K] of a round, float32."""

    d_rows_MH: jax.Array
    d_weights_MK: jax.Array


class _Experts:
    """What this rank computes with the rows of one round: a first block of their pairs, and further ones in a loop."""

    def __init__(self, settings: RoutedSettings, weights: Weights) -> None:
        self.shape, self.weights = settings.shape, weights
        # What is not added up is rounded at once.
        self.gradient_dtype = weights.down_EIH.dtype if settings.is_one_block else jnp.float32
        self.activation = ACTIVATION_FUNCTIONS[settings.activation]

    def sort(self, got: Received) -> Pairs:
        return sort_pairs(got.expert_ids_MK, got.weights_MK, self.shape.num_local_experts)

    def first_output(self, got: Received, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
        """(weighted results float32 [M, H], pre-activations [A, F]) of the first block."""
        block = cut_block(pairs, 0, self.shape.first_pairs)
        gate_up_AF, hidden_AI = hidden_activations(got.rows_MH, block, self.weights, self.activation)
        return experts_output(hidden_AI, got.weights_MK, block, self.weights), gate_up_AF

    def further_output(self, got: Received, pairs: Pairs, start: int) -> tuple[jax.Array, jax.Array]:
        """(weighted results float32 [M, H] of the pairs from place `start` on, number of blocks)."""

        def step(block: Block, y_MH: jax.Array) -> jax.Array:
            _, hidden_AI = hidden_activations(got.rows_MH, block, self.weights, self.activation)
            return y_MH + experts_output(hidden_AI, got.weights_MK, block, self.weights)

        return self._run_blocks(pairs, start, step, zeros_like_type(got.rows_MH.shape, jnp.float32, got.rows_MH))

    def first_gradient(
        self, got: Received, pairs: Pairs, dy_MH: jax.Array, gate_up_AF: jax.Array, total: Weights | None
    ) -> tuple[RowsGradient, Weights]:
        """(gradient of the rows, `total` plus that of the weights) of the first block."""
        return self._gradient(got, dy_MH, cut_block(pairs, 0, self.shape.first_pairs), gate_up_AF, total)

    def further_gradient(
        self, got: Received, pairs: Pairs, dy_MH: jax.Array, start: int, total: Weights
    ) -> tuple[RowsGradient, Weights]:
        """The same of the pairs from place `start` on."""

        def step(block: Block, carry: tuple[RowsGradient, Weights]) -> tuple[RowsGradient, Weights]:
            gate_up_AF, _ = hidden_activations(got.rows_MH, block, self.weights, self.activation)
            rows, total = self._gradient(got, dy_MH, block, gate_up_AF, carry[1])
            return jax.tree.map(jnp.add, carry[0], rows), total

        like = got.rows_MH, got.weights_MK
        zeros = RowsGradient(*(zeros_like_type(a.shape, jnp.float32, got.rows_MH) for a in like))
        return self._run_blocks(pairs, start, step, (zeros, total))[0]

    def _gradient(
        self, got: Received, dy_MH: jax.Array, block: Block, gate_up_AF: jax.Array, total: Weights | None
    ) -> tuple[RowsGradient, Weights]:
        d_rows_MH, d_weights_MK, total = experts_gradient(
            got.rows_MH, gate_up_AF, dy_MH, block, self.weights, self.activation, total, self.gradient_dtype
        )
        return RowsGradient(d_rows_MH, d_weights_MK), total

    def _run_blocks(self, pairs: Pairs, start: int, step: Any, carry: Any) -> tuple[Any, jax.Array]:
        """(`step(block, carry)` for the pairs from place `start` on, number of blocks)."""
        size = self.shape.further_pairs

        def body(state: Any) -> Any:
            number, carry = state
            return number + 1, step(cut_block(pairs, start + number * size, size), carry)

        none_yet = vary_like(jnp.zeros((), jnp.int32), pairs.num_pairs)
        number, carry = lax.while_loop(lambda state: start + state[0] * size < pairs.num_pairs, body, (none_yet, carry))
        return carry, number


class _Chunks:
    """The tokens of a device cut into chunks, their plans, and the further rounds that they need."""

    def __init__(
        self, settings: RoutedSettings, x_TH: jax.Array, weights_TK: jax.Array, expert_ids_TK: jax.Array
    ) -> None:
        self.shape, self.num_chunks, self.num_tokens = settings.shape, settings.num_chunks, x_TH.shape[0]
        ids_NTK = self.cut(expert_ids_TK, fill=self.shape.num_experts)
        bits_NTK = lax.bitcast_convert_type(self.cut(weights_TK), jnp.int32)
        self.x_NTH, self.routing_NTR = self.cut(x_TH), jnp.concatenate([ids_NTK, bits_NTK], axis=2)
        plans = [make_plan(self.shape, ids_NTK[chunk]) for chunk in range(self.num_chunks)]
        self.plans: Plan = jax.tree.map(lambda *arrays: jnp.stack(arrays), *plans)

    def cut(self, values_TX: jax.Array, fill: int = 0) -> jax.Array:
        """[T, X] -> [N, T / N, X], filled up where N does not divide T."""
        missing = self.num_chunks * self.shape.num_tokens - self.num_tokens
        if missing:
            values_TX = jnp.pad(values_TX, ((0, missing), (0, 0)), constant_values=fill)
        return values_TX.reshape(self.num_chunks, self.shape.num_tokens, -1)

    def join(self, values_NTX: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        return values_NTX.reshape(-1, values_NTX.shape[-1])[: self.num_tokens]

    def plan(self, chunk: jax.Array | int) -> Plan:
        return jax.tree.map(lambda a: _at(a, chunk), self.plans)

    def receive(self, chunk: jax.Array | int, round_index: jax.Array | int) -> Received:
        """What this rank gets in that round of the chunk's exchange."""
        shape, plan = self.shape, self.plan(chunk)
        rows_MH = send(shape, plan, round_index, _at(self.x_NTH, chunk))
        routing_MR = send(shape, plan, round_index, _at(self.routing_NTR, chunk), fill=shape.num_experts)
        ids_MK, bits_MK = jnp.split(routing_MR, 2, axis=1)
        weights_MK = lax.bitcast_convert_type(bits_MK, jnp.float32)
        return Received(rows_MH, local_expert_ids(shape, ids_MK), weights_MK)

    def run_further_blocks(self, sorted_pairs: list[Pairs], step: Any, carry: Any) -> Any:
        """`step(chunk, carry)` for every chunk of whose first round some device has more pairs than the first block holds."""
        if self.shape.first_pairs >= self.shape.most_pairs:
            return carry
        most_N = lax.pmax(jnp.stack([pairs.num_pairs for pairs in sorted_pairs]), BATCH)
        order_N = jnp.argsort(most_N <= self.shape.first_pairs)  # the chunks that need it lead
        count = jnp.sum(most_N > self.shape.first_pairs, dtype=jnp.int32)

        def body(state: Any) -> Any:
            number, carry = state
            return number + 1, step(order_N[number], carry)

        carry = jax.tree.map(lambda a: vary_like(a, self.x_NTH), carry)
        if self.num_chunks == 1:
            # Not a loop: its body would not depend on it, and XLA would move it in front, exchange and all.
            return lax.cond(count > 0, lambda carry: step(0, carry), lambda carry: carry, carry)
        return lax.while_loop(lambda state: state[0] < count, body, (jnp.zeros((), jnp.int32), carry))[1]

    def run_further_rounds(self, step: Any, carry: Any) -> tuple[Any, jax.Array]:
        """(`step(chunk, round, carry)` for every further round, their number); nothing where none can be needed."""
        if not self.shape.max_further_rounds:
            return carry, jnp.zeros((), jnp.int32)
        ends_N = jnp.cumsum(self.plans.further_rounds)

        def body(state: Any) -> Any:
            number, carry = state
            chunk = jnp.searchsorted(ends_N, number, side="right").astype(jnp.int32)
            round_index = number - (ends_N - self.plans.further_rounds)[chunk] + 1
            return number + 1, step(chunk, round_index, carry)

        carry = jax.tree.map(lambda a: vary_like(a, self.x_NTH), carry)
        _, carry = lax.while_loop(lambda state: state[0] < ends_N[-1], body, (jnp.zeros((), jnp.int32), carry))
        return carry, ends_N[-1]


def _choose(per_chunk: tuple[list[Any], ...], chunk: jax.Array | int) -> tuple[Any, ...]:
    """The entries of one chunk, whose number may be traced, out of lists."""
    each_chunk = list(zip(*per_chunk, strict=True))
    if isinstance(chunk, int):
        return each_chunk[chunk]
    return lax.switch(chunk, [lambda each=each: each for each in each_chunk])


def _at(stacked: jax.Array, index: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False) if isinstance(index, jax.Array) else stacked[index]


def _add_at(stacked: jax.Array, index: jax.Array | int, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stacked, _at(stacked, index) + value, index, 0)
