"""RMS normalization."""

import jax
import jax.numpy as jnp
from flax import nnx


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last dimension, times weight; the mean square is float32, the product in the dtype of x."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.expand_dims(weight.astype(x.dtype), tuple(range(x.ndim - 1)))


class RMSNorm(nnx.Module):
    """RMS norm with one weight per channel, starting at one."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(size), dims=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)
