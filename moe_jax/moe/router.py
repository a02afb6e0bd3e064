"""The router: hidden states -> logits -> `Routing`, which experts a token goes to and with which weights.

T tokens, H hidden size, E experts, K experts per token. Everything here is float32, whatever the compute dtype.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    expert_ids_TK: int32, distinct within a row; E for a padding token, which goes nowhere.
    weights_TK: float32 combine weights by the family's rule; 0 for a padding token.
    """

    expert_ids_TK: jax.Array
    weights_TK: jax.Array


def router_logits(x_TH: Float[Array, "T H"], w_HE: Float[Array, "H E"]) -> Float[Array, "T E"]:
    """Router logits, float32: the product is taken in float32 so that bf16 rounding cannot flip a near-tie."""
    return jnp.einsum("th,he->te", x_TH.astype(jnp.float32), w_HE, preferred_element_type=jnp.float32,
                      precision=lax.Precision.HIGHEST)  # fmt: skip


def select_experts(scores_TE: Float[Array, "T E"], num_experts_per_tok: int) -> Int[Array, "T K"]:
    """The ids of the K highest scores of each token, highest first; equal scores go to the lowest id."""
    return lax.top_k(lax.stop_gradient(scores_TE), num_experts_per_tok)[1].astype(jnp.int32)


def take_experts(values_TE: Float[Array, "T E"], expert_ids_TK: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """values[t, expert_ids[t, k]], by comparison instead of indexing: no scatter in the backward pass."""
    expert_E = jnp.arange(values_TE.shape[1], dtype=expert_ids_TK.dtype)
    columns = [
        jnp.sum(jnp.where(ids_T[:, None] == expert_E[None, :], values_TE, 0.0), axis=1)
        for ids_T in jnp.unstack(expert_ids_TK, axis=1)
    ]
    return jnp.stack(columns, axis=1)


def softmax_routing(
    logits_TE: Float[Array, "T E"], expert_ids_TK: Int[Array, "T K"], mask_T: Array, *, norm_topk_prob: bool
) -> Routing:
    """The softmax families' combine weights (Mixtral, Qwen-MoE, OLMoE) for the given experts.

    The softmax probabilities of the chosen experts, divided by their sum if `norm_topk_prob`. Both are computed from logits, so
    that logits of +-1e4 neither overflow nor give 0 / 0.
    """
    chosen_TK = take_experts(logits_TE, expert_ids_TK)
    if norm_topk_prob:
        weights_TK = jax.nn.softmax(chosen_TK, axis=1)
    else:
        weights_TK = jnp.exp(chosen_TK - jax.nn.logsumexp(logits_TE, axis=1, keepdims=True))
    return Routing(
        jnp.where(mask_T[:, None], expert_ids_TK, logits_TE.shape[1]), jnp.where(mask_T[:, None], weights_TK, 0.0)
    )
