"""The router: hidden states -> logits -> `Routing`, which experts a token goes to and with which weights.

T tokens, H hidden size, E experts, K experts per token. Everything here is float32, whatever the compute dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe_jax.collectives import vary_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    expert_ids_TK: int32, distinct within a row; E for a padding token, which goes nowhere.
    weights_TK: float32 combine weights by the family's rule; 0 for a padding token.
    """

    expert_ids_TK: jax.Array
    weights_TK: jax.Array


def router_logits(x_TH: Float[Array, "T H"], w_HE: Float[Array, "H E"], dtype: Any = None) -> Float[Array, "T E"]:
    """Router logits, float32: the product is taken in float32 so that bf16 rounding cannot flip a near-tie.

    dtype: take the product in this dtype and round the logits to it instead, as transformers does in its compute dtype.
    """
    if dtype is not None:
        product_TE = jnp.einsum("th,he->te", x_TH.astype(dtype), w_HE.astype(dtype), precision=lax.Precision.HIGHEST)
        return product_TE.astype(jnp.float32)
    if x_TH.dtype == jnp.bfloat16 and w_HE.dtype == jnp.float32:
        return _product_in_parts(x_TH, vary_like(w_HE, x_TH))
    return jnp.einsum("th,he->te", x_TH.astype(jnp.float32), w_HE, preferred_element_type=jnp.float32,
                      precision=lax.Precision.HIGHEST)  # fmt: skip


def _bf16_parts(a: jax.Array, number: int) -> list[jax.Array]:
    """bfloat16 arrays whose sum is the float32 `a`: to 16 bits with two, to all 24 with three."""
    parts = []
    for _ in range(number):
        # Not a cast there and back, which XLA may leave out.
        part = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        a = a - part
    return parts


@jax.custom_vjp
def _product_in_parts(x_TH: jax.Array, w_HE: jax.Array) -> jax.Array:
    """x w as a float32 product, but for the order of its sums, in bfloat16 products, which GPUs are far faster at.

    x is bfloat16 and so exact; w is the sum of three parts, side by side in one product. An infinite weight gives NaN.
    """
    parts_HP = jnp.concatenate(_bf16_parts(w_HE, 3), axis=1)
    product_TP = jnp.einsum("th,hp->tp", x_TH, parts_HP, preferred_element_type=jnp.float32)
    return product_TP.reshape(product_TP.shape[0], 3, -1).sum(axis=1)


def _product_forward(x_TH, w_HE):
    return _product_in_parts(x_TH, w_HE), (x_TH, w_HE)


def _product_backward(residuals, d_TE):
    x_TH, w_HE = residuals
    d_parts_TP = jnp.concatenate(_bf16_parts(d_TE, 3), axis=1)
    dw_HP = jnp.einsum("th,tp->hp", x_TH, d_parts_TP, preferred_element_type=jnp.float32)
    # dx is rounded to bfloat16: 16 bits of the factors are enough.
    d_high, d_low = _bf16_parts(d_TE, 2)
    w_high, w_low = _bf16_parts(w_HE, 2)
    left_TP, right_HP = (jnp.concatenate(a, axis=1) for a in ((d_high, d_high, d_low), (w_high, w_low, w_high)))
    dx_TH = jnp.einsum("tp,hp->th", left_TP, right_HP, preferred_element_type=jnp.float32)
    return dx_TH.astype(x_TH.dtype), dw_HP.reshape(dw_HP.shape[0], 3, -1).sum(axis=1)


_product_in_parts.defvjp(_product_forward, _product_backward)


def jitter(
    x_TH: Float[Array, "T H"], place_T2: Int[Array, "T 2"], key: jax.Array, eps: float
) -> Float[Array, "T H"]:  # fmt: skip
    """x times uniform noise from [1 - eps, 1 + eps], float32; a token's noise depends on `key` and its place alone.

    place_T2: the token's row in the global batch and its position in the row.
    """

    def noise_of(place_2: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(jax.random.fold_in(key, place_2[0]), place_2[1])
        return jax.random.uniform(token_key, x_TH.shape[1:], minval=1 - eps, maxval=1 + eps)

    return x_TH.astype(jnp.float32) * jax.vmap(noise_of)(place_T2)


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


@jax.custom_vjp
def softmax(logits: Float[Array, "T N"]) -> Float[Array, "T N"]:
    """Softmax over the last axis, with a gradient that keeps its digits when one probability is near 1.

    p_i (g_i - sum_j p_j g_j) is computed with g shifted by its value at the largest probability. Unshifted, the entry there is
    the difference of two nearly equal numbers: with p = 1 - 1e-5 it had a relative error of 2e-5 in float32.
    """
    return jax.nn.softmax(logits, axis=-1)


def _softmax_forward(logits):
    probs = jax.nn.softmax(logits, axis=-1)
    return probs, probs


def _softmax_backward(probs, g):
    largest = jnp.arange(probs.shape[-1])[None, :] == jnp.argmax(probs, axis=-1)[:, None]
    shifted = g - jnp.sum(jnp.where(largest, g, 0.0), axis=-1, keepdims=True)
    return (probs * (shifted - jnp.sum(probs * shifted, axis=-1, keepdims=True)),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def softmax_routing(
    logits_TE: Float[Array, "T E"], expert_ids_TK: Int[Array, "T K"], mask_T: Array, *, norm_topk_prob: bool
) -> Routing:
    """The softmax families' combine weights (Mixtral, Qwen-MoE, OLMoE) for the given experts.

    The softmax probabilities of the chosen experts, divided by their sum if `norm_topk_prob`: then computed as the softmax of
    the chosen logits, so that no probability that underflowed to 0 is divided by another.
    """
    if norm_topk_prob:
        weights_TK = softmax(take_experts(logits_TE, expert_ids_TK))
    else:
        weights_TK = take_experts(softmax(logits_TE), expert_ids_TK)
    return Routing(
        jnp.where(mask_T[:, None], expert_ids_TK, logits_TE.shape[1]), jnp.where(mask_T[:, None], weights_TK, 0.0)
    )


def drop(routing: Routing, fits_TK: Bool[Array, "T K"], num_experts: int) -> Routing:
    """The routing without the pairs that do not fit; the weights of the others stay as they are."""
    return Routing(jnp.where(fits_TK, routing.expert_ids_TK, num_experts), jnp.where(fits_TK, routing.weights_TK, 0.0))
