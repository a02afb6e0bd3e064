"""Sinkhorn and the losses, against hand-worked values and a float64 computation."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import sinkhorn_float64

from moe_jax.moe.router import select_experts
from moe_jax.moe.sinkhorn import sinkhorn_log_scale
from moe_jax.moe.statistics import router_statistics

EXACT = 1e-6  # float32 means of O(1) values
MARGINAL = 1e-3  # the default sinkhorn tolerance, relative


def statistics(logits, top_k=2, mask=None):
    logits = jnp.asarray(logits, jnp.float32)
    mask = jnp.ones(logits.shape[0], bool) if mask is None else jnp.asarray(mask)
    ids = jnp.where(mask[:, None], select_experts(logits, top_k), logits.shape[1])
    return router_statistics(logits, ids, mask, ())


@partial(jax.jit, static_argnames=("max_iterations", "tolerance"))
def _log_scale(logits, mask, *, max_iterations, tolerance):
    return sinkhorn_log_scale(logits, mask, (), max_iterations=max_iterations, tolerance=tolerance)[0]


def plan(logits, mask=None, cap=500, tolerance=MARGINAL):
    logits = jnp.asarray(logits, jnp.float32)
    mask = jnp.ones(logits.shape[0], bool) if mask is None else jnp.asarray(mask)
    log_v = _log_scale(logits, mask, max_iterations=cap, tolerance=tolerance)
    real = np.asarray(mask)
    scores = np.asarray(logits, np.float64)[real] + np.asarray(log_v, np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    rows = np.exp(scores)
    return rows / rows.sum(axis=1, keepdims=True) / max(real.sum(), 1), log_v


def test_zero_logits_have_the_hand_worked_losses():
    """C46, C48: aux is 1 at balance for any k (every expert has p = 1/8); z is (ln 8)^2, 0.00432408 at 1e-3."""
    result = statistics(np.zeros((16, 8)), top_k=2)
    assert float(result.aux_loss) == pytest.approx(1.0, abs=EXACT)
    assert float(result.z_loss) * 1e-3 == pytest.approx(0.00432408, abs=1e-8)
    assert float(result.entropy) == pytest.approx(math.log(8), abs=EXACT)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_aux_is_one_at_perfect_balance_for_any_k(top_k):
    logits = np.stack([np.roll(np.arange(8.0), i) for i in range(8)])
    result = statistics(logits, top_k)
    np.testing.assert_array_equal(result.counts, [top_k] * 8)
    assert float(result.aux_loss) == pytest.approx(1.0, abs=EXACT)


@pytest.mark.parametrize("layout", ["front", "middle", "behind"])
def test_padding_leaves_the_losses(layout):
    """C49: 4 real tokens split 2/2 and 12 pads that would give 1.555."""
    real, pad = [[5.0, 0.0], [5.0, 0.0], [0.0, 5.0], [0.0, 5.0]], [[5.0, 0.0]] * 12
    rows = {"front": pad + real, "middle": real[:2] + pad + real[2:], "behind": real + pad}[layout]
    order = {"front": [False] * 12 + [True] * 4, "middle": [True] * 2 + [False] * 12 + [True] * 2,
             "behind": [True] * 4 + [False] * 12}  # fmt: skip
    result = statistics(rows, 1, order[layout])
    assert float(result.aux_loss) == pytest.approx(1.0, abs=EXACT)
    assert float(statistics(rows, 1).aux_loss) == pytest.approx(1.555, abs=1e-3)
    np.testing.assert_array_equal(result.counts, [2, 2])


def test_z_loss_of_large_bf16_logits_is_finite():
    """C46: 300^2 overflows float16."""
    assert float(statistics(jnp.full((4, 8), 300.0, jnp.bfloat16)).z_loss) == pytest.approx(
        (300 + math.log(8)) ** 2, rel=1e-5
    )


def test_all_padding_gives_finite_zeros():
    result = statistics(np.ones((4, 8)), mask=np.zeros(4, bool))
    assert not np.any(result.counts)
    assert float(result.aux_loss) == float(result.z_loss) == float(result.entropy) == 0.0


def test_perfect_balance_has_a_finite_gradient():
    """C57."""
    gradient = jax.grad(lambda logits: statistics(logits).aux_loss + statistics(logits).z_loss)(jnp.zeros((16, 8)))
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_sinkhorn_plan_equals_the_float64_plan(scale):
    """C53: T = 64, E = 8; rows and columns within 1e-3 of 1/64 and 1/8."""
    logits = scale * np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    ours, _ = plan(logits)
    np.testing.assert_allclose(ours.sum(axis=0), 1 / 8, rtol=MARGINAL)
    np.testing.assert_allclose(ours.sum(axis=1), 1 / 64, rtol=MARGINAL)
    np.testing.assert_allclose(ours, sinkhorn_float64(logits), rtol=0, atol=MARGINAL / 64)


@pytest.mark.parametrize(
    "logits",
    [
        np.full((32, 8), 1e4),
        np.full((32, 8), -1e4),
        np.where(np.arange(8) == 3, 1e4, -1e4) * np.ones((32, 1)),
        1e4 * np.random.default_rng(0).normal(size=(32, 8)),
        np.zeros((32, 8)),
    ],
    ids=["all 1e4", "all -1e4", "one dominates", "wild", "equal"],
)
def test_sinkhorn_is_finite_and_bounded_on_adversarial_logits(logits):
    _, log_v = plan(logits, cap=64)
    assert np.all(np.isfinite(log_v))


def test_sinkhorn_of_nothing_but_padding_is_zero():
    _, log_v = plan(np.ones((8, 4)), mask=np.zeros(8, bool))
    np.testing.assert_array_equal(log_v, 0)


def test_sinkhorn_ignores_padding():
    logits = np.random.default_rng(1).normal(size=(24, 4))
    mask = np.arange(24) % 3 != 1
    _, with_padding = plan(logits, mask)
    _, without = plan(logits[mask])
    np.testing.assert_allclose(with_padding, without, atol=1e-5)


def test_no_gradient_flows_through_the_iteration():
    gradient = jax.grad(
        lambda logits: jnp.sum(
            sinkhorn_log_scale(logits, jnp.ones(8, bool), (), max_iterations=9, tolerance=1e-3)[0] ** 2
        )
    )(jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32))
    assert not np.any(gradient)


def test_sinkhorn_balances_a_skewed_router():
    logits = np.random.default_rng(2).normal(size=(512, 8)) + 2 * np.linspace(1, -1, 8)
    _, log_v = plan(logits)
    count = lambda scores: np.bincount(np.asarray(select_experts(jnp.asarray(scores), 2)).ravel(), minlength=8)  # noqa: E731
    before, after = count(logits), count(logits + np.asarray(log_v))
    assert before.max() / before.mean() > 1.8
    assert after.max() / after.mean() < 1.2


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from([1, 7, 40]),
    experts=st.sampled_from([1, 5, 8]),
    scale=st.floats(0, 1e4),
    seed=st.integers(0, 50),
)
def test_sinkhorn_never_gives_nan(tokens, experts, scale, seed):
    rng = np.random.default_rng(seed)
    _, log_v = plan(scale * rng.normal(size=(tokens, experts)), mask=rng.random(tokens) < 0.7, cap=20)
    assert np.all(np.isfinite(log_v))
