"""Slow and obvious computations that the library is held against. They share no code with it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def dense_moe(x_TH, weights, chosen_TE, *, norm_topk_prob):
    """The MoE layer with every expert computed for every token, weighted by 0 where `chosen_TE` is 0."""
    probs_TE = jax.nn.softmax(x_TH @ weights["router"], axis=-1)
    weights_TE = probs_TE * chosen_TE
    if norm_topk_prob:
        total = jnp.sum(weights_TE, axis=-1, keepdims=True)
        weights_TE = weights_TE / jnp.where(total == 0, 1.0, total)
    gate_up = jnp.einsum("th,ehgi->tegi", x_TH, weights["gate_up"])
    hidden = gate_up[:, :, 0] * jax.nn.sigmoid(gate_up[:, :, 0]) * gate_up[:, :, 1]
    return jnp.einsum("te,tei,eih->th", weights_TE, hidden, weights["down"])


def router_losses(x_TH, weights, chosen_TE):
    """(E sum_e f_e p_e, mean logsumexp^2) over the tokens that have chosen an expert."""
    logits_TE = x_TH @ weights["router"]
    real_T = jnp.max(chosen_TE, axis=-1)
    fraction_E = jnp.sum(chosen_TE, axis=0) / jnp.sum(chosen_TE)
    mean_E = jnp.sum(jax.nn.softmax(logits_TE, axis=-1) * real_T[:, None], axis=0) / jnp.sum(real_T)
    z = jnp.sum(jax.nn.logsumexp(logits_TE, axis=-1) ** 2 * real_T) / jnp.sum(real_T)
    return logits_TE.shape[1] * jnp.sum(fraction_E * mean_E), z


@partial(jax.jit, static_argnames="norm_topk_prob")
def _dense_moe_vjp(x_TH, weights, chosen_TE, cotangents, norm_topk_prob):
    def forward(x, w):
        return dense_moe(x, w, chosen_TE, norm_topk_prob=norm_topk_prob), *router_losses(x, w, chosen_TE)

    out, pull = jax.vjp(forward, x_TH, weights)
    return out, *pull(cotangents)


def dense_moe_float64(x_TH, weights, ids_TK, cotangents, *, norm_topk_prob):
    """((output, aux loss, z loss), d x, d weights) of the layer in float64, on one device; ids >= E choose nothing.

    cotangents: those of the three outputs.
    """
    num_experts = weights["router"].shape[1]
    chosen_TE = (np.asarray(ids_TK)[:, :, None] == np.arange(num_experts)).any(axis=1).astype(np.float64)
    double = lambda a: np.asarray(a, np.float64)  # noqa: E731
    one_device = jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])
    with jax.enable_x64(True), jax.set_mesh(one_device):
        args = jax.tree.map(double, (x_TH, weights, chosen_TE, cotangents))
        result = _dense_moe_vjp(*args, norm_topk_prob)
        return jax.tree.map(np.asarray, result)


def top_k_ids(logits_TE: np.ndarray, top_k: int) -> np.ndarray:
    """Ids of the largest logits; ties go to the lowest id (a stable sort of the negated values)."""
    return np.argsort(-logits_TE, axis=1, kind="stable")[:, :top_k]


def sinkhorn_float64(logits_TE: np.ndarray, iterations: int = 2000) -> np.ndarray:
    """The plan with row sums 1/T and column sums 1/E, by plain alternating scaling in float64."""
    logits = logits_TE.astype(np.float64)
    plan = np.exp(logits - logits.max())
    num_tokens, num_experts = plan.shape
    for _ in range(iterations):
        plan *= (1 / num_experts) / plan.sum(axis=0, keepdims=True)
        plan *= (1 / num_tokens) / plan.sum(axis=1, keepdims=True)
    return plan


def relative_norm(actual, expected) -> float:
    """||actual - expected|| / ||expected|| in float64; the plain norm where the expected value is zero."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (scale if scale else 1.0))
