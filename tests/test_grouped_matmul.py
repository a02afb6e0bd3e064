"""`grouped_matmul` against one plain product per group, values and both gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import relative_norm

from moe_jax.kernels.grouped_matmul import grouped_matmul

pytestmark = pytest.mark.usefixtures("one_device")

F32_RELATIVE = 1e-6  # float32 products of at most a few hundred terms
BF16_RELATIVE = 4e-3  # half a bf16 step (2^-8) of the output

GROUPS = {
    "odd": [1, 7, 9, 255, 257, 0, 64, 3],  # C68
    "one holds all": [0, 0, 596, 0],
    "all empty": [0, 0, 0],
    "square": [8] * 8,
    "single": [37],
    "rows left over": [5, 0, 11],
}


def by_loop(x, w, sizes):
    out, start = np.zeros((x.shape[0], w.shape[2])), 0
    for e, size in enumerate(sizes):
        out[start : start + size] = x[start : start + size].astype(np.float64) @ w[e].astype(np.float64)
        start += size
    return out


def gradients_by_loop(x, w, dy, sizes):
    dx, dw, start = np.zeros(x.shape), np.zeros(w.shape), 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        dx[rows] = dy[rows].astype(np.float64) @ w[e].T
        dw[e] = x[rows].astype(np.float64).T @ dy[rows]
        start += size
    return dx, dw


def arrays(num_rows, inner, outer, num_groups, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return draw(num_rows, inner), draw(num_groups, inner, outer), draw(num_rows, outer)


def gradients(x, w, dy, sizes):
    return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)[1](dy)


@jax.jit
def compiled(x, w, dy, sizes):
    return grouped_matmul(x, w, sizes), *gradients(x, w, dy, sizes)


def values_and_gradients(x, w, dy, sizes):
    return compiled(x, w, dy, jnp.array(sizes, jnp.int32))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("inner", "outer"), [(16, 16), (13, 29)])
def test_every_group_is_its_own_product_forward_and_backward(name, inner, outer):
    sizes = GROUPS[name]
    num_rows = max(sum(sizes), 1) + (23 if name == "rows left over" else 0)
    x, w, dy = arrays(num_rows, inner, outer, len(sizes))
    out, dx, dw = values_and_gradients(x, w, dy, sizes)
    expected_dx, expected_dw = gradients_by_loop(x, w, dy, sizes)
    assert relative_norm(out, by_loop(x, w, sizes)) < F32_RELATIVE
    assert relative_norm(dx, expected_dx) < F32_RELATIVE
    assert relative_norm(dw, expected_dw) < F32_RELATIVE
    assert not np.any(np.asarray(out)[sum(sizes) :])


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=7, max_size=7), seed=st.integers(0, 9))
def test_any_group_sizes(sizes, seed):
    x, w, dy = arrays(283, 5, 3, 7, seed)
    expected = (by_loop(x, w, sizes), *gradients_by_loop(x, w, dy, sizes))
    for actual, wanted in zip(values_and_gradients(x, w, dy, sizes), expected, strict=True):
        assert relative_norm(actual, wanted) < F32_RELATIVE


def test_nan_in_rows_of_no_group_reaches_nothing():
    sizes = [5, 0, 11]
    x, w, dy = arrays(40, 8, 8, 3)
    x[16:], dy[16:] = np.nan, np.nan
    assert all(np.all(np.isfinite(a)) for a in values_and_gradients(x, w, dy, sizes))


def test_bf16_accumulates_in_float32():
    x, w, _ = arrays(64, 512, 32, 4)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    out = grouped_matmul(jnp.asarray(x), jnp.asarray(w), jnp.array([16, 16, 30, 2], jnp.int32))
    assert out.dtype == jnp.bfloat16
    assert relative_norm(out.astype(jnp.float32), by_loop(x, w, [16, 16, 30, 2])) < BF16_RELATIVE


def test_other_group_sizes_compile_nothing_new():
    f = jax.jit(grouped_matmul)
    x, w, _ = arrays(32, 8, 8, 4)
    for sizes in ([8, 8, 8, 8], [32, 0, 0, 0], [0, 1, 2, 3]):
        f(x, w, jnp.array(sizes, jnp.int32))
    assert f._cache_size() == 1
