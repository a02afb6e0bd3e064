"""Expert capacity: at most so many tokens an expert, the rest counted and left to the residual connection.

T tokens of this device, E experts, K experts per token.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.ranking import keep_best
from moe_jax.moe.router import take_experts


def within_capacity(
    logits_TE: jax.Array,
    expert_ids_TK: jax.Array,
    mask_T: jax.Array,
    token_T: jax.Array,
    axes: tuple[str, ...],
    *,
    factor: float,
    policy: str,
) -> jax.Array:
    """bool [T, K]: which chosen pairs fit, ceil(factor N K / E) of an expert for the N real tokens of the devices of `axes`.

    policy: "probs" keeps the most probable tokens of an expert, equal ones by position; "position" the first ones.
    Padding uses no capacity and never fits. token_T: int32, each token's index in the global batch.
    """
    num_experts, top_k = logits_TE.shape[1], expert_ids_TK.shape[1]
    num_tokens = jnp.sum(mask_T, dtype=jnp.int32)
    num_tokens = lax.psum(num_tokens, axes) if axes else num_tokens
    quota_E = jnp.broadcast_to(_capacity(num_tokens * top_k, factor, num_experts), (num_experts,))
    expert_E = jnp.arange(num_experts, dtype=expert_ids_TK.dtype)
    chosen_TE = jnp.any(expert_ids_TK[:, :, None] == expert_E[None, None, :], axis=1) & mask_T[:, None]
    # Equal keys go by position, so nothing but ties keeps the first tokens.
    by_probs = policy == "probs"
    key_TE = -jax.nn.log_softmax(lax.stop_gradient(logits_TE), axis=-1) if by_probs else jnp.zeros_like(logits_TE)
    kept_TE = keep_best(key_TE, chosen_TE, token_T, quota_E, axes)
    return take_experts(kept_TE.astype(jnp.float32), expert_ids_TK) > 0


def _capacity(num_pairs: jax.Array, factor: float, num_experts: int) -> jax.Array:
    """ceil(factor * pairs / E), exactly, for a factor of at most three decimals (others are rounded to a fraction)."""
    exact = Fraction(str(factor)).limit_denominator(1000)
    whole, rest = jnp.divmod(num_pairs, exact.denominator * num_experts)
    return whole * exact.numerator - (-rest * exact.numerator // (exact.denominator * num_experts))
