"""Initial values. A value depends on its key and its place only, never on the mesh."""

import jax
import jax.numpy as jnp


def normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> jax.Array:
    """Normal float32 values with mean 0."""
    return stddev * jax.random.normal(key, shape, jnp.float32)


def fold_keys(key: jax.Array, indices: jax.Array) -> jax.Array:
    """One key for each global index (of a layer, of an expert), the same whatever else exists."""
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
