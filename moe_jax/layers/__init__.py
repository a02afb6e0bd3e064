"""Layers of the transformer: plain functions on arrays, and flax.nnx modules that hold their parameters."""
