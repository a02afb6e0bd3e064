"""The routed experts: exchange there, compute, exchange back, in as many passes as the routing needs, under one `custom_vjp`.

The tokens of a device are cut into `num_chunks` chunks. Every chunk's first pass is straight code, so that the exchange of one
chunk can run beside the experts of another. A routing that overflows the buffers runs further passes of the same code in a loop,
which is not entered otherwise: exact under any routing, in bounded memory, with nothing dropped and nothing compiled anew.

T tokens of this device, N chunks of T / N tokens (the last one padded), K experts per token, E experts, H hidden size, M received
rows of a pass, F = 2 I expert width.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moe_jax.collectives import vary_like
from moe_jax.layers.mlp import ACTIVATION_FUNCTIONS
from moe_jax.moe.exchange import ExchangeShape, Plan, give_back, local_expert_ids, make_plan, send
from moe_jax.moe.experts import Block, Weights, experts_gradient, experts_output, make_block, pre_activations

# The received rows of the first passes: what rematerialisation may keep, so that the exchange is not repeated.
DISPATCHED_NAME = "moe_dispatched"


@dataclasses.dataclass(frozen=True)
class RoutedSettings:
    """shape: the exchange of one chunk. combine_dtype: what results travel back in; None is float32."""

    shape: ExchangeShape
    num_chunks: int
    activation: str
    combine_dtype: Any = None


class Received(NamedTuple):
    """A pass's rows in the compute dtype [M, H], their local expert ids int32 [M, K] and combine weights float32 [M, K]."""

    rows_MH: jax.Array
    expert_ids_MK: jax.Array
    weights_MK: jax.Array


class Pass(NamedTuple):
    """Which chunk, which round of its exchange, and which block of the pairs received in that round."""

    chunk: jax.Array | int
    round: jax.Array | int
    block: jax.Array | int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_experts(
    settings: RoutedSettings, x_TH: jax.Array, weights_TK: jax.Array, expert_ids_TK: jax.Array, weights: Weights
) -> tuple[jax.Array, jax.Array]:
    """([T, H] in the dtype of x, number of passes beyond the first ones, int32): sum_k weights[t, k] expert[ids[t, k]](x[t]).

    x_TH: in the compute dtype. weights_TK: float32. expert_ids_TK: int32, E for nowhere. The weights are this rank's experts.
    """
    return _forward(settings, x_TH, weights_TK, expert_ids_TK, weights)[0]


def _forward(settings: RoutedSettings, x_TH, weights_TK, expert_ids_TK, weights: Weights):
    shape, activation = settings.shape, ACTIVATION_FUNCTIONS[settings.activation]
    chunks = _Chunks(settings, x_TH, weights_TK, expert_ids_TK)
    firsts = [Pass(chunk, 0, 0) for chunk in range(settings.num_chunks)]
    received = [Received(*(checkpoint_name(a, DISPATCHED_NAME) for a in chunks.receive(at))) for at in firsts]
    blocks = [_block(shape, got, 0) for got in received]
    gate_ups = [pre_activations(got.rows_MH, block, weights) for got, block in zip(received, blocks, strict=True)]

    def output(at: Pass, got: Received, block: Block, gate_up_AF: jax.Array) -> jax.Array:
        y_MH = experts_output(gate_up_AF, got.weights_MK, block, weights, activation)
        return give_back(shape, chunks.plan(at.chunk), at.round, y_MH, settings.combine_dtype)

    parts = [output(*each) for each in zip(firsts, received, blocks, gate_ups, strict=True)]

    def more(at: Pass, y_NTH: jax.Array) -> jax.Array:
        got = received[0] if chunks.has_one_round else chunks.receive(at)
        block = _block(shape, got, at.block)
        return _add_at(y_NTH, at.chunk, output(at, got, block, pre_activations(got.rows_MH, block, weights)))

    y_NTH, extra = chunks.run_overflow(more, jnp.stack(parts))
    y_TH = chunks.join(y_NTH).astype(x_TH.dtype)
    return (y_TH, extra), (x_TH, weights_TK, expert_ids_TK, weights, received, gate_ups)


def _backward(settings: RoutedSettings, residuals, cotangents):
    x_TH, weights_TK, expert_ids_TK, weights, received, gate_ups = residuals
    shape, activation = settings.shape, ACTIVATION_FUNCTIONS[settings.activation]
    chunks = _Chunks(settings, x_TH, weights_TK, expert_ids_TK)
    dy_NTH = chunks.cut(cotangents[0])

    def send_dy(at: Pass) -> jax.Array:
        return send(shape, chunks.plan(at.chunk), at.round, _at(dy_NTH, at.chunk))

    def gradient(at: Pass, got: Received, dy_MH: jax.Array, gate_up_AF: jax.Array,
                 block: Block) -> tuple[jax.Array, jax.Array, Weights]:  # fmt: skip
        """(d x float32, d combine weights float32) of the chunk's tokens, d weights."""
        plan = chunks.plan(at.chunk)
        d_rows_MH, d_weights_MK, d_weights = experts_gradient(
            got.rows_MH, gate_up_AF, dy_MH, block, weights, activation
        )
        dx_TH = give_back(shape, plan, at.round, d_rows_MH, x_TH.dtype)
        return dx_TH, give_back(shape, plan, at.round, d_weights_MK), d_weights

    firsts = [Pass(chunk, 0, 0) for chunk in range(settings.num_chunks)]
    dys = [send_dy(at) for at in firsts]
    blocks = [_block(shape, got, 0) for got in received]
    parts = [gradient(*each) for each in zip(firsts, received, dys, gate_ups, blocks, strict=True)]
    dx, d_combine, d_weights = zip(*parts, strict=True)

    def more(at: Pass, carry):
        dx_NTH, d_combine_NTK, total = carry
        got, dy_MH = (received[0], dys[0]) if chunks.has_one_round else (chunks.receive(at), send_dy(at))
        block = _block(shape, got, at.block)
        gate_up_AF = pre_activations(got.rows_MH, block, weights)
        dx_TH, d_combine_TK, d_weights = gradient(at, got, dy_MH, gate_up_AF, block)
        return (
            _add_at(dx_NTH, at.chunk, dx_TH),
            _add_at(d_combine_NTK, at.chunk, d_combine_TK),
            _sum([total, d_weights]),
        )

    carry, _ = chunks.run_overflow(more, (jnp.stack(dx), jnp.stack(d_combine), _sum(d_weights)))
    dx_NTH, d_combine_NTK, d_weights = carry
    return chunks.join(dx_NTH).astype(x_TH.dtype), chunks.join(d_combine_NTK), None, d_weights


routed_experts.defvjp(_forward, _backward)


class _Chunks:
    """The tokens of a device cut into chunks, their plans, and the passes that they need."""

    def __init__(
        self, settings: RoutedSettings, x_TH: jax.Array, weights_TK: jax.Array, expert_ids_TK: jax.Array
    ) -> None:
        self.shape, self.num_chunks, self.num_tokens = settings.shape, settings.num_chunks, x_TH.shape[0]
        ids_NTK = self.cut(expert_ids_TK, fill=self.shape.num_experts)
        bits_NTK = lax.bitcast_convert_type(self.cut(weights_TK), jnp.int32)
        self.x_NTH, self.routing_NTR = self.cut(x_TH), jnp.concatenate([ids_NTK, bits_NTK], axis=2)
        plans = [make_plan(self.shape, ids_NTK[chunk]) for chunk in range(self.num_chunks)]
        self.plans: Plan = jax.tree.map(lambda *arrays: jnp.stack(arrays), *plans)

    @property
    def has_one_round(self) -> bool:
        """Whether all passes work on what the first one received."""
        return self.num_chunks == self.shape.num_rounds == 1

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

    def receive(self, at: Pass) -> Received:
        """What this rank gets in that round of the chunk's exchange."""
        shape, plan = self.shape, self.plan(at.chunk)
        rows_MH = send(shape, plan, at.round, _at(self.x_NTH, at.chunk))
        routing_MR = send(shape, plan, at.round, _at(self.routing_NTR, at.chunk), fill=shape.num_experts)
        ids_MK, bits_MK = jnp.split(routing_MR, 2, axis=1)
        weights_MK = lax.bitcast_convert_type(bits_MK, jnp.float32)
        return Received(rows_MH, local_expert_ids(shape, ids_MK), weights_MK)

    def run_overflow(self, step, carry):
        """(`step(pass, carry)` for every pass but the first of each chunk, their number); nothing where none can be needed."""
        if not self.shape.may_overflow:
            return carry, jnp.zeros((), jnp.int32)
        rounds = self.shape.num_rounds
        is_first_R = jnp.arange(rounds) == 0
        passes_X = (self.plans.blocks_R - is_first_R[None, :].astype(jnp.int32)).reshape(-1)
        ends_X = jnp.cumsum(passes_X)

        def body(state):
            number, carry = state
            index = jnp.searchsorted(ends_X, number, side="right").astype(jnp.int32)
            chunk, round_index = jnp.divmod(index, rounds)
            block = number - (ends_X - passes_X)[index] + (round_index == 0)
            return number + 1, step(Pass(chunk, round_index, block), carry)

        carry = jax.tree.map(lambda a: vary_like(a, self.x_NTH), carry)
        _, carry = lax.while_loop(lambda state: state[0] < ends_X[-1], body, (jnp.zeros((), jnp.int32), carry))
        return carry, ends_X[-1]


def _block(shape: ExchangeShape, got: Received, index: jax.Array | int) -> Block:
    return make_block(got.expert_ids_MK, got.weights_MK, shape.num_local_experts, shape.pairs_per_block, index)


def _at(stacked: jax.Array, index: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False) if isinstance(index, jax.Array) else stacked[index]


def _add_at(stacked: jax.Array, index: jax.Array | int, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stacked, _at(stacked, index) + value, index, 0)


def _sum(weights: Any) -> Weights:
    """The sum of weights' gradients, added in float32, in their dtype."""
    first, *rest = weights
    if not rest:
        return first
    total = jax.tree.map(lambda *arrays: sum(a.astype(jnp.float32) for a in arrays), first, *rest)
    return jax.tree.map(lambda a, like: a.astype(like.dtype), total, first)
