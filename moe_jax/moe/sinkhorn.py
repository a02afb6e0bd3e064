"""The sinkhorn plan: per-expert scales of the router's logits that even out how much of the tokens' mass each expert gets.

T tokens of this device, E experts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moe_jax.collectives import vary, varying_axes


def sinkhorn_log_scale(
    logits_TE: Float[Array, "T E"],
    mask_T: Bool[Array, " T"],
    axes: tuple[str, ...],
    *,
    max_iterations: int,
    tolerance: float,
) -> tuple[Float[Array, " E"], jax.Array]:
    """(log v [E], number of iterations): v is the column scaling of the balanced plan u_t exp(logits_te) v_e.

    The plan is that of all real tokens of the devices of `axes`; without axes, of this device's own.

    The plan has row sums 1 / N and column sums 1 / E (Sinkhorn 1967; Cuturi 2013, arXiv:1306.0895). In the log domain, with the
    rows scaled exactly in every iteration and the columns within `tolerance` (relative) at the end, or after
    `max_iterations`. No gradient flows through it. All padding gives zeros.
    """
    num_experts = logits_TE.shape[1]
    masked_TE = jnp.where(mask_T[:, None], lax.stop_gradient(logits_TE), -jnp.inf)
    num_tokens = jnp.sum(mask_T.astype(jnp.float32))
    num_tokens = lax.psum(num_tokens, axes) if axes else num_tokens
    log_target = jnp.log(jnp.maximum(num_tokens, 1.0) / num_experts)

    def column_log_sums(log_v_E: jax.Array) -> jax.Array:
        """log of the columns' sums, each row scaled to sum 1, without leaving the log domain."""
        scores_TE = masked_TE + log_v_E[None, :]
        row_max_T = jnp.where(mask_T, jnp.max(scores_TE, axis=1), 0.0)
        row_log_sum_T = row_max_T + jnp.log(jnp.sum(jnp.exp(scores_TE - row_max_T[:, None]), axis=1))
        log_plan_TE = jnp.where(mask_T[:, None], scores_TE - jnp.where(mask_T, row_log_sum_T, 0.0)[:, None], -jnp.inf)
        max_E = jnp.max(log_plan_TE, axis=0)
        max_E = lax.pmax(max_E, axes) if axes else max_E
        max_E = jnp.where(jnp.isfinite(max_E), max_E, 0.0)
        sum_E = jnp.sum(jnp.exp(log_plan_TE - max_E[None, :]), axis=0)
        return max_E + jnp.log(lax.psum(sum_E, axes) if axes else sum_E)

    def unfinished(carry) -> jax.Array:
        _, error, iteration = carry
        return (error > tolerance) & (iteration < max_iterations)

    def iterate(carry):
        log_v_E, _, iteration = carry
        gap_E = log_target - column_log_sums(log_v_E)
        error = jnp.max(jnp.abs(jnp.expm1(-gap_E)))
        # Only differences of log v matter; centring keeps it small, where float32 is finest.
        new_E = log_v_E + gap_E
        return jnp.where(error > tolerance, new_E - jnp.mean(new_E), log_v_E), error, iteration + 1

    varying = varying_axes(logits_TE) - set(axes)
    start = (jnp.zeros(num_experts, jnp.float32), jnp.where(num_tokens > 0, jnp.inf, 0.0), jnp.zeros((), jnp.int32))
    start = jax.tree.map(lambda x: vary(x, varying), start)
    log_v_E, _, iterations = lax.while_loop(unfinished, iterate, start)
    return log_v_E, iterations
