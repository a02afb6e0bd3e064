"""Inside `shard_map`: which axes a value varies over (the one file that reads JAX's manual-axis types), and gathering weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


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


def shape_like(shape: tuple[int, ...], dtype: Any, *others: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a result that varies like `others`."""
    kind = jax.typeof(vary_like(jnp.zeros((), dtype), *others)).mat
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def gather_whole(weight: jax.Array, spec: PartitionSpec, axes: tuple[str, ...] = ("fsdp", "expert")) -> jax.Array:
    """This device's part of a weight laid out by `spec`, gathered over those of its mesh axes that are in `axes`.

    The gradient is reduce-scattered over them. Axes of size 1 send nothing.
    """
    for dim, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        gathered = tuple(name for name in names if name in axes and lax.axis_size(name) > 1)
        if gathered:
            weight = lax.all_gather(weight, gathered, axis=dim, tiled=True)
    return weight
