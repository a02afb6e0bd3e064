"""Token embedding and output head. V vocabulary, H hidden size, B rows, S positions.

Both are manual regions: the weight is gathered whole there, and its gradient, summed on each device in float32, leaves in the
compute dtype and reduce-scattered. (Left to the partitioner, XLA on GPU all-reduced the head's gradient in float32.)
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.collectives import gather_whole, vary_like
from moe_jax.layers.init import normal
from moe_jax.sharding import BATCH, P, param_spec


@jax.custom_vjp
def look_up(table_VH: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """table[tokens]; the gradient of a row is summed in float32, since a frequent token adds thousands of terms."""
    return table_VH[tokens_BS]


def _look_up_forward(table_VH, tokens_BS):
    return look_up(table_VH, tokens_BS), (tokens_BS, table_VH[:0], table_VH.shape)


def _look_up_backward(residuals, d_BSH):
    tokens_BS, like, shape = residuals
    zeros = vary_like(jnp.zeros(shape, jnp.float32), d_BSH)
    return zeros.at[tokens_BS].add(d_BSH.astype(jnp.float32)).astype(like.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def _with_whole(function, weight: nnx.Param, batch: jax.Array, dtype: Any) -> jax.Array:
    """function(whole weight in `dtype`, this device's part of the batch), the result laid out like the batch."""
    spec = param_spec(weight, jax.sharding.get_abstract_mesh())

    def local(weight, batch):
        return function(gather_whole(vary_like(weight, batch), spec), batch)

    return jax.shard_map(local, in_specs=(spec, P(BATCH)), out_specs=P(BATCH))(weight[...].astype(dtype), batch)


class Embedding(nnx.Module):
    """The table [V, H]; with tied embeddings it is the output head too."""

    def __init__(self, vocab: int, hidden: int, *, key: jax.Array, stddev: float) -> None:
        self.weight = nnx.Param(normal(key, (vocab, hidden), stddev), dims=("vocab", "hidden"))

    def __call__(self, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
        """Rows of the table, [B, S, H] in `dtype`."""
        return _with_whole(look_up, self.weight, tokens_BS, dtype)

    def head(self, x_BSH: jax.Array, dtype: Any) -> jax.Array:
        """Logits of the tied head, float32 [B, S, V]."""

        def product(weight_VH, x_BSH):
            return jnp.einsum("bsh,vh->bsv", x_BSH, weight_VH, preferred_element_type=jnp.float32)

        return _with_whole(product, self.weight, x_BSH, dtype)


class LMHead(nnx.Module):
    """An output head [H, V] of its own."""

    def __init__(self, hidden: int, vocab: int, *, key: jax.Array, stddev: float) -> None:
        self.weight = nnx.Param(normal(key, (hidden, vocab), stddev), dims=("hidden", "vocab"))

    def __call__(self, x_BSH: jax.Array, dtype: Any) -> jax.Array:
        """Logits, float32 [B, S, V]."""

        def product(weight_HV, x_BSH):
            return jnp.einsum("bsh,hv->bsv", x_BSH, weight_HV, preferred_element_type=jnp.float32)

        return _with_whole(product, self.weight, x_BSH, dtype)
