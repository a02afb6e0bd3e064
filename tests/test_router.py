"""Selection and combine weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import relative_norm, top_k_ids

from moe_jax.moe.router import router_logits, select_experts, softmax_routing, take_experts

WEIGHT_SUM = 1e-6  # float32 softmax of at most 8 values


@pytest.mark.parametrize(
    "logits",
    [
        -10000.0 + np.arange(8)[None, :] * np.ones((3, 1)),
        np.full((3, 8), -100.0),
        np.eye(8)[None, 2] * 10000.0 * np.ones((3, 1)),
    ],
    ids=["around -1e4", "all equal", "one at 1e4"],
)
def test_extreme_logits_keep_their_order_and_give_finite_weights(logits):
    """C42."""
    logits = jnp.asarray(logits, jnp.float32)
    ids = select_experts(logits, 2)
    np.testing.assert_array_equal(ids, top_k_ids(np.asarray(logits), 2))
    for norm in (True, False):
        weights = softmax_routing(logits, ids, jnp.ones(3, bool), norm_topk_prob=norm).weights_TK
        assert np.all(np.isfinite(weights))
    assert np.allclose(jnp.sum(softmax_routing(logits, ids, jnp.ones(3, bool), norm_topk_prob=True).weights_TK, 1), 1,
                       atol=WEIGHT_SUM)  # fmt: skip


PARTS = 1e-6  # float32 sums of 192 products
BF16 = 3e-3  # one rounding to bfloat16


def test_equal_logits_choose_the_lowest_ids_with_the_familys_weights():
    """C41: 1/k renormalised, 1/E not."""
    logits = jnp.zeros((5, 8))
    ids = select_experts(logits, 2)
    np.testing.assert_array_equal(ids, np.tile([0, 1], (5, 1)))
    mask = jnp.ones(5, bool)
    np.testing.assert_allclose(softmax_routing(logits, ids, mask, norm_topk_prob=True).weights_TK, 1 / 2)
    np.testing.assert_allclose(softmax_routing(logits, ids, mask, norm_topk_prob=False).weights_TK, 1 / 8)


def test_one_expert_per_token_renormalised_gives_the_router_no_gradient():
    """C06: the weight is the constant 1."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)

    def total(logits, norm):
        ids = select_experts(logits, 1)
        weights = softmax_routing(logits, ids, jnp.ones(6, bool), norm_topk_prob=norm).weights_TK
        return jnp.sum(weights * jnp.arange(6.0)[:, None])

    assert not np.any(jax.grad(total)(logits, True))
    assert np.any(jax.grad(total)(logits, False))


def test_padding_has_no_expert_and_no_weight():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    mask = jnp.array([True, False, True, False])
    routing = softmax_routing(logits, select_experts(logits, 3), mask, norm_topk_prob=True)
    np.testing.assert_array_equal(np.asarray(routing.expert_ids_TK)[1::2], 6)
    assert not np.any(np.asarray(routing.weights_TK)[1::2])


@settings(max_examples=25, deadline=None)
@given(tokens=st.sampled_from([1, 9]), experts=st.sampled_from([1, 8, 11]), data=st.data())
def test_taking_by_comparison_is_indexing(tokens, experts, data):
    top_k = data.draw(st.sampled_from([1, experts]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.normal(size=(tokens, experts)).astype(np.float32)
    ids = np.argsort(rng.normal(size=(tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    np.testing.assert_array_equal(
        take_experts(jnp.asarray(values), jnp.asarray(ids)), np.take_along_axis(values, ids, 1)
    )


def test_router_product_is_float32_for_bf16_tokens():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)
    logits = router_logits(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)


def test_product_with_bf16_hidden_states_is_a_float32_product():
    """By way of bfloat16 parts; against float64, and its gradients. Weights of very different sizes."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(257, 192)), jnp.bfloat16)
    w = (rng.normal(size=(192, 6)) * 10.0 ** rng.integers(-4, 3, (192, 1))).astype(np.float32)
    d = rng.normal(size=(257, 6)).astype(np.float32)
    logits, pull = jax.vjp(router_logits, x, jnp.asarray(w))
    dx, dw = pull(jnp.asarray(d))
    exact = np.asarray(x, np.float64) @ w.astype(np.float64)
    assert relative_norm(logits, exact) < PARTS
    assert relative_norm(dw, np.asarray(x, np.float64).T @ d) < PARTS
    assert dx.dtype == jnp.bfloat16
    assert relative_norm(dx.astype(jnp.float32), d.astype(np.float64) @ w.T.astype(np.float64)) < BF16
