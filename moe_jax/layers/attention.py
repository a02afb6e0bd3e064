"""Grouped-query attention. B rows, S positions, H hidden size, N query heads, K key-value heads, D head dim."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.layers.init import normal
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.rope import apply_rope
from moe_jax.sharding import gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What every layer's attention shares: rotary tables float32 [B, S, D/2] and segment ids int32 [B, S] (0: padding)."""

    cos_BSF: jax.Array
    sin_BSF: jax.Array
    segment_ids_BS: jax.Array


def attention_mask(segment_ids_BS: jax.Array, sliding_window: int) -> jax.Array:
    """bool [B, 1, S, S]: query i sees key j of its own segment with i - sliding_window < j <= i (no window: j <= i)."""
    index_S = jnp.arange(segment_ids_BS.shape[1])
    distance_SS = index_S[:, None] - index_S[None, :]
    allowed_SS = distance_SS >= 0
    if sliding_window:
        allowed_SS &= distance_SS < sliding_window
    same_BSS = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    return (same_BSS & allowed_SS[None, :, :])[:, None, :, :]


class Attention(nnx.Module):
    """Causal self-attention with optional biases, query/key norm and clamping; softmax in float32."""

    def __init__(self, config: ModelConfig, sliding_window: int, *, key: jax.Array) -> None:
        hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        stddev = config.initializer_range
        keys = jax.random.split(key, 4)
        self.q = nnx.Param(normal(keys[0], (hidden, heads, dim), stddev), dims=("hidden", "heads", "head_dim"))
        self.k = nnx.Param(normal(keys[1], (hidden, kv_heads, dim), stddev), dims=("hidden", "heads", "head_dim"))
        self.v = nnx.Param(normal(keys[2], (hidden, kv_heads, dim), stddev), dims=("hidden", "heads", "head_dim"))
        self.o = nnx.Param(normal(keys[3], (heads, dim, hidden), stddev), dims=("heads", "head_dim", "hidden"))
        if config.attention_bias:
            self.q_bias = nnx.Param(jnp.zeros((heads, dim)), dims=("heads", "head_dim"))
            self.k_bias = nnx.Param(jnp.zeros((kv_heads, dim)), dims=("heads", "head_dim"))
            self.v_bias = nnx.Param(jnp.zeros((kv_heads, dim)), dims=("heads", "head_dim"))
            self.o_bias = nnx.Param(jnp.zeros(hidden), dims=("norm",))
        if config.qk_norm != "none":
            per_head = config.qk_norm == "per_head"
            self.q_norm = RMSNorm(dim if per_head else heads * dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(dim if per_head else kv_heads * dim, config.rms_norm_eps)
        self.qk_norm, self.clip_qkv = config.qk_norm, config.clip_qkv
        self.has_bias, self.sliding_window = config.attention_bias, sliding_window

    def __call__(self, x_BSH: jax.Array, inputs: AttentionInputs, dtype: Any) -> jax.Array:
        """[B, S, H] -> [B, S, H] in `dtype`."""
        q = self._norm(self._project(x_BSH, "q", dtype), "q")
        k = self._norm(self._project(x_BSH, "k", dtype), "k")
        v = self._project(x_BSH, "v", dtype)
        if self.clip_qkv:
            q, k, v = (jnp.clip(t, -self.clip_qkv, self.clip_qkv) for t in (q, k, v))
        q, k = (apply_rope(t, inputs.cos_BSF, inputs.sin_BSF) for t in (q, k))
        mask = attention_mask(inputs.segment_ids_BS, self.sliding_window)
        out_BSND = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")
        out_BSH = jnp.einsum("bsnd,ndh->bsh", out_BSND, gather(self.o[...], dtype))
        return out_BSH + self.o_bias[...].astype(dtype)[None, None, :] if self.has_bias else out_BSH

    def _project(self, x_BSH: jax.Array, name: str, dtype: Any) -> jax.Array:
        out = jnp.einsum("bsh,hnd->bsnd", x_BSH, gather(getattr(self, name)[...], dtype))
        return out + getattr(self, f"{name}_bias")[...].astype(dtype)[None, None] if self.has_bias else out

    def _norm(self, x_BSND: jax.Array, name: str) -> jax.Array:
        if self.qk_norm == "none":
            return x_BSND
        norm = getattr(self, f"{name}_norm")
        if self.qk_norm == "per_head":
            return norm(x_BSND)
        flat = x_BSND.reshape(*x_BSND.shape[:2], -1)
        return norm(flat).reshape(x_BSND.shape)
