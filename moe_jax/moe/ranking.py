"""Selecting a quota of tokens for every expert, over all devices, by counting.

T tokens of this device, E experts. Nothing is sorted and no token leaves its device: a threshold is found digit by digit, each
digit with one comparison of [T, E] and one sum of a few integers per expert over `axes`. Integers only, so the outcome is the same
bit for bit however the tokens are spread.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped, UInt32

from moe_jax.collectives import vary, varying_axes

KEY_BITS = 32
# Bits that one step settles. Two cost three comparisons in place of two, and half of the sums over devices.
DIGIT_BITS = 2
LARGEST = 0xFFFFFFFF


def ordered_key(x: Shaped[Array, "*S"]) -> UInt32[Array, "*S"]:
    """uint32 in the order of `x` (uint32, int32 or float32), ascending; -0.0 equals 0.0, and NaN comes after everything."""
    if x.dtype == jnp.uint32:
        return x
    if x.dtype == jnp.int32:
        return lax.bitcast_convert_type(x, jnp.uint32) ^ jnp.uint32(1 << 31)
    if x.dtype != jnp.float32:
        raise ValueError(f"keys must be uint32, int32 or float32, but are {x.dtype}")
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(jnp.isnan(x), jnp.uint32(LARGEST), ordered)


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` summed over the devices of `axes`; `x` itself without axes."""
    return lax.psum(x, axes) if axes else x


def smallest_key(
    key_TE: UInt32[Array, "T E"],
    rank_E: Int[Array, " E"],
    axes: tuple[str, ...],
    *,
    num_bits: int = KEY_BITS,
    num_steps: jax.Array | None = None,
) -> UInt32[Array, " E"]:
    """The `rank`-th smallest key (from 1) of every column over the devices of `axes`, in its leading `num_bits`, the rest 0.

    Rank 0 gives 0; a rank beyond the number of keys gives ones. `num_steps`, a traced number of digits equal on all devices of
    `axes`, replaces num_bits / DIGIT_BITS.
    """
    others = (varying_axes(key_TE) | varying_axes(rank_E)) - frozenset(axes)
    digit = jnp.arange(1, 1 << DIGIT_BITS, dtype=jnp.uint32)

    def settle(step: jax.Array, prefix_E: jax.Array) -> jax.Array:
        shift = (KEY_BITS - DIGIT_BITS * (step + 1)).astype(jnp.uint32)
        candidates_DE = prefix_E[None, :] + (digit << shift)[:, None]
        below_DE = jnp.sum(key_TE[:, None, :] < candidates_DE[None, :, :], axis=0, dtype=jnp.int32)
        below_DE = sum_over(below_DE, axes)
        return prefix_E + (jnp.sum(below_DE < rank_E[None, :], axis=0, dtype=jnp.uint32) << shift)

    start = vary(jnp.zeros(key_TE.shape[1], jnp.uint32), others)
    return lax.fori_loop(0, num_bits // DIGIT_BITS if num_steps is None else num_steps, settle, start)


def keep_best(
    key_TE: Shaped[Array, "T E"],
    eligible_TE: Bool[Array, "T E"],
    token_T: Int[Array, " T"],
    quota_E: Int[Array, " E"],
    axes: tuple[str, ...],
) -> Bool[Array, "T E"]:
    """Which entries are kept: in every column the min(quota, eligible) eligible ones with the LOWEST key over `axes`.

    Equal keys go to the lowest `token`, the token's global index: int32, not negative, no two alike over the devices of `axes`.
    key_TE: uint32, int32 or float32; a NaN is the last to be kept. quota_E: int32, equal on all devices of `axes`.

    Costs 16 sums of 3 E integers over `axes` and one more, and twice that where a column has more equal keys at its threshold
    than it has room for. No gradient flows.
    """
    key_TE = jnp.where(eligible_TE, ordered_key(lax.stop_gradient(key_TE)), jnp.uint32(LARGEST))
    threshold_E = smallest_key(key_TE, quota_E, axes)
    below_TE = eligible_TE & (key_TE < threshold_E[None, :])
    equal_TE = eligible_TE & (key_TE == threshold_E[None, :])
    counts_2E = jnp.stack([jnp.sum(a, axis=0, dtype=jnp.int32) for a in (below_TE, equal_TE)])
    num_below_E, num_equal_E = sum_over(counts_2E, axes)
    room_E = jnp.maximum(quota_E - num_below_E, 0)
    # Keys of equal entries; the sum of counts is equal on all devices, and so is the number of steps.
    crowded = jnp.any((num_equal_E > room_E) & (room_E > 0))
    num_steps = jnp.where(crowded, KEY_BITS // DIGIT_BITS, 0)
    token_TE = jnp.where(equal_TE, token_T.astype(jnp.uint32)[:, None], jnp.uint32(LARGEST))
    last_E = smallest_key(token_TE, room_E, axes, num_steps=num_steps)
    fits_TE = (token_TE <= last_E[None, :]) | (num_equal_E <= room_E)[None, :]
    return below_TE | (equal_TE & fits_TE & (room_E > 0)[None, :])
