"""Rotary position embedding with the scalings of transformers' `modeling_rope_utils`.

D head dim, B rows, S positions, N heads. Frequencies and phases are float32: rounded to bf16, a frequency of 1 puts
position 1023 off by 0.8 rad.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import RopeConfig


def rope_tables(config: RopeConfig, head_dim: int, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [B, S, D / 2], already times the attention factor."""
    inv_freq = _inverse_frequencies(config, head_dim)
    if config.rope_type == "dynamic":
        inv_freq = _dynamic_frequencies(config, head_dim, positions_BS)
    phase_BSF = positions_BS.astype(jnp.float32)[:, :, None] * jnp.asarray(inv_freq, jnp.float32)[None, None, :]
    factor = attention_factor(config)
    return jnp.cos(phase_BSF) * factor, jnp.sin(phase_BSF) * factor


def apply_rope(x_BSND: jax.Array, cos_BSF: jax.Array, sin_BSF: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + D/2), in float32, and returns the dtype of x."""
    first, second = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BSF[:, :, None, :], sin_BSF[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSND.dtype)


def segment_positions(segment_ids_BS: jax.Array) -> jax.Array:
    """Positions that restart at 0 wherever the segment id changes, int32 [B, S]."""
    index_S = jnp.arange(segment_ids_BS.shape[1], dtype=jnp.int32)
    before_BS = jnp.pad(segment_ids_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BS = jnp.where(segment_ids_BS != before_BS, index_S[None, :], 0)
    return index_S[None, :] - jax.lax.cummax(start_BS, axis=1)


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1, except for yarn (arXiv:2309.00071, eq. 22)."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor:
        return config.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _inverse_frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """theta^(-2t/D), scaled by the type's rule; float64 [D / 2]."""
    inv_freq = config.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.rope_type == "linear":
        return inv_freq / config.factor
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, dim, inv_freq)
    if config.rope_type == "llama3":
        return _llama3_frequencies(config, inv_freq)
    return inv_freq


def _yarn_frequencies(config: RopeConfig, dim: int, inv_freq: np.ndarray) -> np.ndarray:
    """Interpolates the slow frequencies and keeps the fast ones, with a ramp between (arXiv:2309.00071, section 3.2)."""

    def correction_dim(rotations: float) -> float:
        wavelengths = config.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high  # a ramp of width 0 has no slope
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / config.factor * ramp


def _llama3_frequencies(config: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths divided by the factor, short ones kept, a blend between."""
    turns = config.original_max_positions * inv_freq / (2 * math.pi)  # over the original length
    blend = np.clip((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor), 0, 1)
    return (1 - blend) * inv_freq / config.factor + blend * inv_freq


def _dynamic_frequencies(config: RopeConfig, dim: int, positions_BS: jax.Array) -> jax.Array:
    """NTK-aware base for the longest position of the batch: the default base up to the original length."""
    length = jnp.maximum(jnp.max(positions_BS) + 1, config.original_max_positions).astype(jnp.float32)
    growth = config.factor * length / config.original_max_positions - (config.factor - 1)
    base = config.theta * growth ** (dim / (dim - 2))
    return base ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
