"""Token embedding and output head. V vocabulary, H hidden size, B rows, S positions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.layers.init import normal
from moe_jax.sharding import batch_spec, gather


class Embedding(nnx.Module):
    """The table [V, H]; with tied embeddings it is the output head too."""

    def __init__(self, vocab: int, hidden: int, *, key: jax.Array, stddev: float) -> None:
        self.weight = nnx.Param(normal(key, (vocab, hidden), stddev), dims=("vocab", "hidden"))

    def __call__(self, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
        """Rows of the table, [B, S, H] in `dtype`."""
        return gather(self.weight[...], dtype).at[tokens_BS].get(out_sharding=batch_spec(3))

    def head(self, x_BSH: jax.Array, dtype: Any) -> jax.Array:
        """Logits of the tied head, float32 [B, S, V]."""
        return jnp.einsum("bsh,vh->bsv", x_BSH, gather(self.weight[...], dtype), preferred_element_type=jnp.float32)


class LMHead(nnx.Module):
    """An output head [H, V] of its own."""

    def __init__(self, hidden: int, vocab: int, *, key: jax.Array, stddev: float) -> None:
        self.weight = nnx.Param(normal(key, (hidden, vocab), stddev), dims=("hidden", "vocab"))

    def __call__(self, x_BSH: jax.Array, dtype: Any) -> jax.Array:
        """Logits, float32 [B, S, V]."""
        return jnp.einsum("bsh,hv->bsv", x_BSH, gather(self.weight[...], dtype), preferred_element_type=jnp.float32)
