"""The gated MLP. H hidden size, I width; gate and up are one matrix [H, 2, I], so that they are one product."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.layers.init import normal
from moe_jax.sharding import gather

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def gated(gate_up_2I: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """activation(gate) * up for gate_up [..., 2, I] -> [..., I]."""
    return activation(gate_up_2I[..., 0, :]) * gate_up_2I[..., 1, :]


class MLP(nnx.Module):
    """A dense layer's gated MLP."""

    def __init__(self, hidden: int, width: int, activation: str, *, key: jax.Array, stddev: float) -> None:
        key_in, key_out = jax.random.split(key)
        self.gate_up = nnx.Param(normal(key_in, (hidden, 2, width), stddev), dims=("hidden", "gate_up", "width"))
        self.down = nnx.Param(normal(key_out, (width, hidden), stddev), dims=("width", "hidden"))
        self.activation = activation

    def __call__(self, x_BSH: jax.Array, dtype: Any) -> jax.Array:
        """[B, S, H] -> [B, S, H] in `dtype`."""
        gate_up_BSGI = jnp.einsum("bsh,hgi->bsgi", x_BSH, gather(self.gate_up[...], dtype))
        hidden_BSI = gated(gate_up_BSGI, ACTIVATION_FUNCTIONS[self.activation])
        return jnp.einsum("bsi,ih->bsh", hidden_BSI, gather(self.down[...], dtype))
