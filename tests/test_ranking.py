"""`keep_best` against a NumPy sort, and on meshes of one to eight devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import put_batch, start

from moe_jax.mesh import state
from moe_jax.moe.ranking import keep_best, ordered_key, smallest_key
from moe_jax.sharding import BATCH, P

TOKENS, EXPERTS = 48, 5


@jax.jit
def keep_here(key, eligible, token, quota):
    return keep_best(key, eligible, token, quota, ())


@jax.jit
def keep_on_mesh(key, eligible, token, quota):
    region = partial(jax.shard_map, in_specs=(P(BATCH), P(BATCH), P(BATCH), P()), out_specs=P(BATCH))
    return region(lambda *args: keep_best(*args, BATCH))(key, eligible, token, quota)


def sorted_keep(key, eligible, token, quota) -> np.ndarray:
    """What is kept by sorting each column: eligible first, then by key, then by token."""
    kept = np.zeros(key.shape, bool)
    for e in range(key.shape[1]):
        column = np.where(key[:, e] == 0, 0, key[:, e])
        order = np.lexsort((token, column, ~eligible[:, e]))[: quota[e]]
        kept[order, e] = eligible[order, e]
    return kept


def make_case(seed: int, dtype: str = "float32", levels: int = 4, eligible: float = 0.8):
    rng = np.random.default_rng(seed)
    key = rng.integers(-levels, levels + 1, (TOKENS, EXPERTS))
    if dtype == "float32":
        key = (key * rng.choice([1.0, 1e-3, 1e30])).astype(np.float32)
    else:
        key = (key + (levels if dtype == "uint32" else 0)).astype(dtype)
    token = rng.permutation(10 * TOKENS)[:TOKENS].astype(np.int32)
    return key, rng.random(key.shape) < eligible, token, rng.integers(0, TOKENS + 2, EXPERTS).astype(np.int32)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(["float32", "int32", "uint32"]),
    levels=st.sampled_from([0, 1, 4, 1000]),
    eligible=st.sampled_from([0.0, 0.1, 0.8, 1.0]),
)
def test_keeps_what_a_sort_keeps(seed, dtype, levels, eligible):
    case = make_case(seed, dtype, levels, eligible)
    np.testing.assert_array_equal(keep_here(*case), sorted_keep(*case))


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 3), (300, 2)])
def test_keeps_what_a_sort_keeps_at_other_shapes(shape):
    rng = np.random.default_rng(0)
    key = rng.normal(size=shape).astype(np.float32).round(1)
    quota = rng.integers(0, shape[0] + 1, shape[1]).astype(np.int32)
    case = (key, rng.random(shape) < 0.7, np.arange(shape[0], dtype=np.int32), quota)
    np.testing.assert_array_equal(keep_here(*case), sorted_keep(*case))


def test_hand_worked_column():
    """Keys 2 1 1 3 1, the second not eligible: of the two 1s left, and then the 2, quota 1 takes the one with token 3."""
    key = jnp.array([[2], [1], [1], [3], [1]], jnp.int32)
    eligible = jnp.array([[True], [False], [True], [True], [True]])
    token = jnp.array([0, 1, 9, 4, 3], jnp.int32)
    for quota, rows in {0: [], 1: [4], 2: [2, 4], 3: [0, 2, 4], 9: [0, 2, 3, 4]}.items():
        kept = keep_best(key, eligible, token, jnp.array([quota], jnp.int32), ())
        assert np.flatnonzero(kept).tolist() == rows


@pytest.mark.parametrize("mesh", ["1 device", "EP2", "FSDP4", "EP2xFSDP2", "EP8", "replica2xEP2xFSDP2"])
@pytest.mark.parametrize("levels", [0, 3, 10**6])
def test_meshes_keep_alike(mesh, levels):
    """With many equal keys (a second search) and without."""
    start(mesh)
    case = make_case(1, "float32", levels)
    *spread, quota = case
    kept = keep_on_mesh(*(put_batch(a) for a in spread), jax.device_put(quota, jax.NamedSharding(state.mesh, P())))
    np.testing.assert_array_equal(kept, sorted_keep(*case))


def test_without_axes_every_device_keeps_its_own():
    start("EP4")
    key, eligible, token, _ = make_case(2)
    quota = np.full(EXPERTS, 3, np.int32)
    region = partial(jax.shard_map, in_specs=(P(BATCH), P(BATCH), P(BATCH), P()), out_specs=P(BATCH))
    kept = jax.jit(region(lambda *args: keep_best(*args, ())))(
        put_batch(key), put_batch(eligible), put_batch(token), jax.device_put(quota, jax.NamedSharding(state.mesh, P()))
    )
    parts = [sorted_keep(*(np.split(a, 4)[i] for a in (key, eligible, token)), quota) for i in range(4)]
    np.testing.assert_array_equal(kept, np.concatenate(parts))


def test_keys_are_ordered_like_their_floats():
    tiny = np.finfo(np.float32).tiny
    values = np.array([-np.inf, -3e38, -2.5, -tiny, 0.0, tiny, 1.0, np.nextafter(np.float32(1), 2), np.inf, np.nan],
                      np.float32)  # fmt: skip
    keys = np.asarray(ordered_key(jnp.asarray(values)), np.int64)
    assert np.all(np.diff(keys) > 0)
    assert ordered_key(jnp.array([-0.0]))[0] == ordered_key(jnp.array([0.0]))[0]


def test_nan_is_kept_last():
    key = jnp.array([[np.nan], [np.inf], [5.0]], jnp.float32)
    for quota, rows in {1: [2], 2: [1, 2], 3: [0, 1, 2]}.items():
        kept = keep_best(key, jnp.ones((3, 1), bool), jnp.arange(3), jnp.array([quota]), ())
        assert np.flatnonzero(kept).tolist() == rows


def test_smallest_key_of_leading_bits_is_the_rank_rounded_down():
    keys = np.random.default_rng(0).integers(0, 2**32, (50, 3), dtype=np.uint32)
    rank = jnp.array([1, 20, 50], jnp.int32)
    exact = np.sort(keys, axis=0)[[0, 19, 49], np.arange(3)]
    np.testing.assert_array_equal(smallest_key(jnp.asarray(keys), rank, ()), exact)
    np.testing.assert_array_equal(smallest_key(jnp.asarray(keys), rank, (), num_bits=16), exact >> 16 << 16)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float16"):
        ordered_key(jnp.zeros((2, 2), jnp.float16))
