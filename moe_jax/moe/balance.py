"""Load balancing: the sinkhorn plan, the auxiliary losses, and the statistics of a routing.

T tokens of this device, E experts, K experts per token. Every sum is taken over the real tokens of all devices (`axes`), a few
numbers per expert at a time, so that no value depends on how a batch is spread over a mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStatistics:
    """What one MoE layer's router did, over the real tokens of the global batch; stacked over the layers in the model's output.

    counts: int32 [E], tokens sent to each expert; they sum to N * K for N real tokens.
    dropped: int32, (token, expert) pairs that were not computed; 0, since no mode drops.
    entropy: float32, mean over tokens of the entropy of the router's softmax, in nats.
    aux_loss: float32, E * sum_e f_e p_e with f_e = counts_e / (N K) and p_e the mean probability (Switch Transformer,
        arXiv:2101.03961, eq. 4, divided by K: 1 at perfect balance for any K).
    z_loss: float32, mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5).
    """

    counts: jax.Array
    dropped: jax.Array
    entropy: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array


def router_statistics(
    logits_TE: Float[Array, "T E"], expert_ids_TK: Int[Array, "T K"], mask_T: Bool[Array, " T"], axes: tuple[str, ...]
) -> RouterStatistics:
    """The layer's statistics and losses; gradients flow through the probabilities and the logits, not through the counts."""
    num_experts, top_k = logits_TE.shape[1], expert_ids_TK.shape[1]
    real_T = mask_T.astype(jnp.float32)
    log_z_T = jax.nn.logsumexp(logits_TE, axis=1)
    log_probs_TE = logits_TE - log_z_T[:, None]
    probs_TE = jnp.exp(log_probs_TE)
    expert_E = jnp.arange(num_experts, dtype=expert_ids_TK.dtype)
    local_counts_E = jnp.sum(expert_ids_TK[:, :, None] == expert_E[None, None, :], axis=(0, 1), dtype=jnp.int32)
    entropy_T = -jnp.sum(probs_TE * log_probs_TE, axis=1)
    sums = {
        "tokens": jnp.sum(real_T),
        "probs": jnp.sum(jnp.where(mask_T[:, None], probs_TE, 0.0), axis=0),
        "entropy": jnp.sum(jnp.where(mask_T, lax.stop_gradient(entropy_T), 0.0)),
        "z": jnp.sum(jnp.where(mask_T, log_z_T**2, 0.0)),
        "counts": local_counts_E,
    }
    if axes:
        sums = lax.psum(sums, axes)
    num_tokens = jnp.maximum(sums["tokens"], 1.0)
    fraction_E = sums["counts"].astype(jnp.float32) / (num_tokens * top_k)
    return RouterStatistics(
        counts=sums["counts"],
        dropped=jnp.zeros((), jnp.int32),
        entropy=sums["entropy"] / num_tokens,
        aux_loss=num_experts * jnp.sum(fraction_E * sums["probs"]) / num_tokens,
        z_loss=sums["z"] / num_tokens,
    )


def sinkhorn_log_scale(
    logits_TE: Float[Array, "T E"],
    mask_T: Bool[Array, " T"],
    axes: tuple[str, ...],
    *,
    max_iterations: int,
    tolerance: float,
) -> Float[Array, " E"]:
    """log v [E], the column scaling of the balanced transport plan u_t exp(logits_te) v_e over all real tokens.

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

    start = (jnp.zeros(num_experts, jnp.float32), jnp.where(num_tokens > 0, jnp.inf, 0.0), jnp.zeros((), jnp.int32))
    return lax.while_loop(unfinished, iterate, start)[0]
