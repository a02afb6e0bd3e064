"""What a layer's router did: its losses and the figures that are logged.

T tokens of this device, E experts, K experts per token, G groups of consecutive tokens. Every sum is taken over the real tokens
of all devices (`axes`), a few numbers per expert at a time, so that no value depends on how a batch is spread over a mesh.
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

    counts: int32 [E], tokens that chose each expert; they sum to N * K for N real tokens.
    dropped: int32, (token, expert) pairs that a capacity left out; part of `counts`.
    mean_probs: float32 [E], mean probability of the router's softmax.
    entropy: float32, mean over tokens of the entropy of that softmax, in nats.
    aux_loss: float32, the load-balancing loss of `router_statistics`.
    z_loss: float32, mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5).
    mean_logit, max_logit: float32, over tokens and experts; 0 without a real token.
    plan_iterations: int32, iterations of the sinkhorn or balanced plan; 0 where the mode has none.
    further_rounds: int32, rounds of the exchange beyond the first of each chunk; 0 where its buffers held everything.
    further_blocks: int32, blocks of pairs beyond the first of each chunk that the fullest device computed.
    """

    counts: jax.Array
    dropped: jax.Array
    mean_probs: jax.Array
    entropy: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    mean_logit: jax.Array
    max_logit: jax.Array
    plan_iterations: jax.Array
    further_rounds: jax.Array
    further_blocks: jax.Array


def router_statistics(
    logits_TE: Float[Array, "T E"],
    expert_ids_TK: Int[Array, "T K"],
    mask_T: Bool[Array, " T"],
    axes: tuple[str, ...],
    *,
    loss_ids_TK: Int[Array, "T K"] | None = None,
    num_groups: int | None = None,
    dropped: jax.Array | int = 0,
    plan_iterations: jax.Array | int = 0,
    further_rounds: jax.Array | int = 0,
    further_blocks: jax.Array | int = 0,
) -> RouterStatistics:
    """The layer's statistics and losses; gradients flow through the probabilities and the logits, not through the counts.

    The loss is E * sum_e f_e p_e with f_e = counts_e / (N K) and p_e the mean probability (Switch Transformer, arXiv:2101.03961,
    eq. 4, divided by K: 1 at perfect balance for any K). It is taken over the global batch, or with `num_groups` over each of
    so many groups of T / G consecutive tokens on every device, and averaged over them by their real tokens.

    expert_ids_TK: E for padding. loss_ids_TK: the choice that the loss counts, where that is another one.
    dropped: this device's share of the dropped pairs. further_rounds: equal on all devices.
    """
    num_experts, top_k = logits_TE.shape[1], expert_ids_TK.shape[1]
    real_T = mask_T.astype(jnp.float32)
    log_z_T = jax.nn.logsumexp(logits_TE, axis=1)
    log_probs_TE = logits_TE - log_z_T[:, None]
    probs_TE = jnp.exp(log_probs_TE)
    entropy_T = -jnp.sum(probs_TE * log_probs_TE, axis=1)
    fixed_TE = lax.stop_gradient(logits_TE)
    groups = 1 if num_groups is None else num_groups
    counts_GE, probs_GE = _group_sums(probs_TE, expert_ids_TK, mask_T, groups)
    loss_counts_GE = counts_GE if loss_ids_TK is None else _group_sums(probs_TE, loss_ids_TK, mask_T, groups)[0]
    sums = {
        "tokens": jnp.sum(real_T),
        "probs": jnp.sum(probs_GE, axis=0),
        "entropy": jnp.sum(jnp.where(mask_T, lax.stop_gradient(entropy_T), 0.0)),
        "z": jnp.sum(jnp.where(mask_T, log_z_T**2, 0.0)),
        "counts": jnp.sum(counts_GE, axis=0),
        "dropped": jnp.asarray(dropped, jnp.int32),
        "logits": jnp.sum(jnp.where(mask_T, jnp.mean(fixed_TE, axis=1), 0.0)),
        "group_losses": _group_losses(loss_counts_GE, probs_GE, top_k),
        "loss_counts": jnp.sum(loss_counts_GE, axis=0),
    }
    max_logit = jnp.max(jnp.where(mask_T[:, None], fixed_TE, -jnp.inf))
    # As floats: a maximum over devices has no derivative, and an integer that comes out of a gradient rule has a tangent.
    most = {"iterations": jnp.asarray(plan_iterations, jnp.float32), "blocks": jnp.asarray(further_blocks, jnp.float32)}
    if axes:
        sums, max_logit, most = lax.psum(sums, axes), lax.pmax(max_logit, axes), lax.pmax(most, axes)
    num_tokens = jnp.maximum(sums["tokens"], 1.0)
    mean_probs_E = sums["probs"] / num_tokens
    fraction_E = sums["loss_counts"].astype(jnp.float32) / (num_tokens * top_k)
    whole = num_experts * jnp.sum(fraction_E * mean_probs_E)
    return RouterStatistics(
        counts=sums["counts"],
        dropped=sums["dropped"],
        mean_probs=mean_probs_E,
        entropy=sums["entropy"] / num_tokens,
        aux_loss=whole if num_groups is None else sums["group_losses"] / num_tokens,
        z_loss=sums["z"] / num_tokens,
        mean_logit=sums["logits"] / num_tokens,
        max_logit=jnp.where(sums["tokens"] > 0, max_logit, 0.0),
        plan_iterations=most["iterations"].astype(jnp.int32),
        further_rounds=jnp.asarray(further_rounds, jnp.int32),
        further_blocks=most["blocks"].astype(jnp.int32),
    )


def _group_sums(probs_TE, expert_ids_TK, mask_T, groups: int) -> tuple[jax.Array, jax.Array]:
    """(counts int32 [G, E], sums of probabilities float32 [G, E]) of the real tokens of each group."""
    num_experts = probs_TE.shape[1]
    expert_E = jnp.arange(num_experts, dtype=expert_ids_TK.dtype)
    ids_GNK = expert_ids_TK.reshape(groups, -1, expert_ids_TK.shape[1])
    counts_GE = jnp.sum(ids_GNK[:, :, :, None] == expert_E[None, None, None, :], axis=(1, 2), dtype=jnp.int32)
    probs_TE = jnp.where(mask_T[:, None], probs_TE, 0.0)
    return counts_GE, jnp.sum(probs_TE.reshape(groups, -1, num_experts), axis=1)


def _group_losses(counts_GE: jax.Array, probs_GE: jax.Array, top_k: int) -> jax.Array:
    """Sum over groups of n_g * E * sum_e f_ge p_ge, where n_g is a group's number of real tokens."""
    counts_GE = counts_GE.astype(jnp.float32)
    num_G = jnp.sum(counts_GE, axis=1) / top_k
    return counts_GE.shape[1] * jnp.sum(jnp.sum(counts_GE * probs_GE, axis=1) / (jnp.maximum(num_G, 1.0) * top_k))


def pooled_aux_loss(statistics: RouterStatistics, num_experts_per_tok: int) -> jax.Array:
    """Transformers' `load_balancing_loss_func` from statistics stacked over the layers: K at balance, 0 without MoE layers.

    E * sum_e F_e P_e, with F_e the number of pairs of expert e per token and P_e its probability, both averaged over the real
    tokens of all layers.
    """
    num_layers, num_experts = statistics.counts.shape
    if not num_layers:
        return jnp.zeros((), jnp.float32)
    counts_LE = statistics.counts.astype(jnp.float32)
    share_LE = counts_LE / jnp.maximum(jnp.sum(counts_LE, axis=1, keepdims=True), 1.0)
    pairs_E = num_experts_per_tok * jnp.mean(share_LE, axis=0)
    return num_experts * jnp.sum(pairs_E * jnp.mean(statistics.mean_probs, axis=0))


def combine_statistics(micro: RouterStatistics, weights_A: jax.Array) -> RouterStatistics:
    """The statistics of a whole step from those of its A micro-batches, stacked on the first axis.

    weights_A: each one's share of the real tokens. Counts are added, means averaged, maxima taken.
    """

    has_tokens = jnp.sum(micro.counts, axis=2) > 0

    def mean(values: jax.Array) -> jax.Array:
        return jnp.tensordot(weights_A, values, axes=1)

    return RouterStatistics(
        counts=jnp.sum(micro.counts, axis=0),
        dropped=jnp.sum(micro.dropped, axis=0),
        mean_probs=mean(micro.mean_probs),
        entropy=mean(micro.entropy),
        aux_loss=mean(micro.aux_loss),
        z_loss=mean(micro.z_loss),
        mean_logit=mean(micro.mean_logit),
        max_logit=jnp.where(
            jnp.any(has_tokens), jnp.max(jnp.where(has_tokens, micro.max_logit, -jnp.inf), axis=0), 0.0
        ),
        plan_iterations=jnp.max(micro.plan_iterations, axis=0),
        further_rounds=jnp.sum(micro.further_rounds, axis=0),
        further_blocks=jnp.sum(micro.further_blocks, axis=0),
    )
