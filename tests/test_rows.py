"""Passes over rows: the GPU kernels, interpreted, and the portable ones against plain NumPy; the places of pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import relative_norm

from moe_jax.kernels import rows
from moe_jax.layers.mlp import ACTIVATION_FUNCTIONS
from moe_jax.moe.experts import cut_block, sort_pairs

pytestmark = pytest.mark.usefixtures("one_device")

EXACT = 1e-6  # float32 sums of some hundred products, in another order
ROUNDED = 4e-3  # one rounding to bfloat16


@pytest.mark.parametrize("width", [200, 2048, 4100])
def test_rows_are_spread_to_their_slots(width):
    """10 rows with 3 slots each, in 24 of 27 places; six slots are none."""
    rng = np.random.default_rng(0)
    slots_MK = rng.permutation(30)
    slots_MK = np.where(slots_MK < 24, slots_MK, 27).reshape(10, 3).astype(np.int32)
    values = rng.normal(size=(10, width)).astype(np.float32)
    source_A = np.full(27, 10, np.int32)
    for row, slots in enumerate(slots_MK):
        source_A[slots[slots < 27]] = row
    arguments = jnp.asarray(values), jnp.asarray(source_A), jnp.asarray(slots_MK)
    interpreted = rows._spread_rows(arguments[0], arguments[2], 27, interpret=True)
    for found in (rows.spread_rows(*arguments), interpreted):
        assert found.shape == (27, width)
        np.testing.assert_array_equal(found[:24], values[source_A[:24]])


@pytest.mark.parametrize("activation", sorted(ACTIVATION_FUNCTIONS))
@pytest.mark.parametrize(("width", "dtype", "limit"), [(300, jnp.float32, EXACT), (2304, jnp.bfloat16, ROUNDED)])
def test_gradient_of_the_gated_activation(activation, width, dtype, limit):
    """Against jax.vjp of weight * activation(gate) * up, float32; one row weighs nothing."""
    rng = np.random.default_rng(1)
    gate_up, d_hidden = (jnp.asarray(rng.normal(size=(7, n)), dtype) for n in (2 * width, width))
    weights = jnp.asarray(rng.random(7), jnp.float32).at[3].set(0.0)
    function = ACTIVATION_FUNCTIONS[activation]

    def weighted(gate_up, weights):
        gate, up = jnp.split(gate_up, 2, axis=1)
        return weights[:, None] * function(gate) * up

    scaled, pull = jax.vjp(weighted, gate_up.astype(jnp.float32), weights)
    expected = pull(d_hidden.astype(jnp.float32))
    interpreted = rows._gated_gradient(gate_up, d_hidden, weights, function, interpret=True)
    for found in (rows.gated_gradient(gate_up, d_hidden, weights, function), rows.GatedGradient(*interpreted)):
        assert found.d_gate_up_AF.dtype == found.scaled_AI.dtype == dtype
        assert relative_norm(found.d_gate_up_AF.astype(jnp.float32), expected[0]) < limit
        assert relative_norm(found.scaled_AI.astype(jnp.float32), scaled) < limit
        assert relative_norm(found.d_weights_A, expected[1]) < EXACT


def test_the_exact_gelu_takes_the_plain_path():
    """Triton has no erf."""
    assert [name for name, f in ACTIVATION_FUNCTIONS.items() if not rows._triton_has(f)] == ["gelu"]


@pytest.mark.parametrize("activation", sorted(ACTIVATION_FUNCTIONS.keys() - {"gelu"}))
def test_the_kernels_of_an_activation_lower_for_cuda(activation, monkeypatch):
    """Inside shard_map, as the layer calls them."""
    monkeypatch.setattr(rows, "is_gpu", lambda: True)
    devices = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=devices)
    shapes = [(8, 512), (8, 256), (8,), (4, 128), (8,), (4, 2)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.int32, jnp.int32]

    def block(gate_up, d_hidden, weights, values, source, slots):
        return (*rows.gated_gradient(gate_up, d_hidden, weights, ACTIVATION_FUNCTIONS[activation]),
                rows.spread_rows(values, source, slots))  # fmt: skip

    spec = jax.sharding.PartitionSpec("x")
    function = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    no_mesh = jax.sharding.Mesh(np.empty((), object), ())  # in place of the concrete one
    with jax.set_mesh(no_mesh), jax.sharding.use_abstract_mesh(mesh):
        text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("gpu.triton") == 2


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(1, 8), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_pairs_lie_by_expert_in_the_order_of_the_rows(num_rows, num_slots, num_experts, seed):
    """As a stable sort by expert places them."""
    rng = np.random.default_rng(seed)
    choices = np.argsort(rng.random((num_rows, num_experts + num_slots)), axis=1)[:, :num_slots]
    ids_MK = np.minimum(choices, num_experts).astype(np.int32)
    weights_MK = rng.random(ids_MK.shape).astype(np.float32)
    pairs = sort_pairs(jnp.asarray(ids_MK), jnp.asarray(weights_MK), num_experts)
    ids_N = ids_MK.reshape(-1)
    order_N = np.argsort(ids_N, kind="stable")
    num_used = int((ids_N < num_experts).sum())
    position_N = np.full(ids_N.size, ids_N.size)
    position_N[order_N[:num_used]] = np.arange(num_used)
    assert int(pairs.num_pairs) == num_used
    np.testing.assert_array_equal(pairs.order_N[:num_used], order_N[:num_used])
    np.testing.assert_array_equal(pairs.position_N, position_N)
    np.testing.assert_array_equal(pairs.ends_E, np.cumsum(np.bincount(ids_N, minlength=num_experts + 1)[:-1]))
    block = cut_block(pairs, 0, ids_N.size)
    np.testing.assert_array_equal(block.weights_A[:num_used], weights_MK.reshape(-1)[order_N[:num_used]])
    np.testing.assert_array_equal(block.source_A[num_used:], num_rows)
