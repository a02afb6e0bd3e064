"""Varying-axis bookkeeping of `shard_map`: the one file that reads JAX's manual-axis types."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices; empty outside `shard_map`."""
    return frozenset(jax.typeof(x).mat.varying)


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x`, typed as varying over `axes` too. Its transpose sums the cotangent over the axes that were added."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, typed as varying over every axis that one of `others` varies over."""
    return vary(x, frozenset().union(*map(varying_axes, others)))


def zeros_like_type(shape: tuple[int, ...], dtype: Any, *others: jax.Array) -> jax.Array:
    """Zeros that vary like `others`, to start a loop carry with."""
    return vary_like(jnp.zeros(shape, dtype), *others)
