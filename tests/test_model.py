"""The transformer's own parts: runs of layers, positions, packing, rotary tables, odd batches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshes import model_of, start, values_of
from reference import relative_norm

import converters
import moe_jax
from moe_jax.config import LayerConfig, RopeConfig
from moe_jax.layers.attention import attention_mask
from moe_jax.layers.rope import apply_rope, rope_tables, segment_positions
from moe_jax.model import layer_runs, layer_slots

ISOLATED = 1e-6  # the same numbers in another place of the batch
CONFIG = {
    "model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "initializer_range": 0.3, "dtype": "float32",
}  # fmt: skip
MODEL = converters.new_source(CONFIG, {}, "float32")[0]

dense, moe, window = LayerConfig(is_moe=False), LayerConfig(), LayerConfig(sliding_window=4)


@pytest.fixture(scope="module")
def values():
    start("1 device")
    return values_of(moe_jax.transform(CONFIG))


@jax.jit
def logits(model, tokens, segment_ids=None, positions=None):
    return model(tokens, segment_ids, positions).logits


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, (rows, length)).astype(np.int32)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((moe,) * 5, [(0, (moe,), 5)]),
        ((dense, moe, moe, moe), [(0, (dense,), 1), (1, (moe,), 3)]),
        ((dense, moe) * 3, [(0, (dense, moe), 3)]),
        ((moe, dense, moe), [(0, (moe,), 1), (1, (dense,), 1), (2, (moe,), 1)]),
        ((moe, window) * 2 + (moe,), [(0, (moe, window), 2), (4, (moe,), 1)]),
    ],
    ids=["equal", "dense first", "alternating", "one dense", "odd end"],
)
def test_layers_are_cut_into_the_longest_runs_of_short_patterns(layers, expected) -> None:
    assert list(layer_runs(layers)) == expected


@given(st.lists(st.sampled_from([dense, moe, window]), min_size=1, max_size=12))
def test_every_layer_has_one_slot_of_its_own_kind(layers) -> None:
    config = converters.new_source(CONFIG, {}, "float32")[0]
    config = type(config)(**{**vars(config), "layers": tuple(layers)})
    slots, runs = layer_slots(config), layer_runs(config.layers)
    assert len(set(slots)) == len(layers)
    assert [runs[slot.run].pattern[slot.position] for slot in slots] == layers


def test_positions_restart_in_every_segment() -> None:
    segments = jnp.array([[0, 0, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(segment_positions(segments), [[0, 1, 0, 1, 2, 0, 1, 0], np.arange(8)])


def test_a_window_of_w_sees_the_token_and_the_w_minus_1_before_it() -> None:
    mask = np.asarray(attention_mask(jnp.ones((1, 6), jnp.int32), 3))[0, 0]
    np.testing.assert_array_equal(mask[4], [False, False, True, True, True, False])
    packed = np.asarray(attention_mask(jnp.array([[1, 1, 2, 2, 0, 0]]), 0))[0, 0]
    np.testing.assert_array_equal(packed[3], [False, False, True, True, False, False])


@pytest.mark.parametrize("position", [255, 1023, 4095])
def test_rotary_phase_is_float32_in_a_bf16_model(position: int) -> None:
    """C39: bf16 frequencies would be off by 0.27 to 1.26."""
    cos, sin = rope_tables(RopeConfig(theta=1e6), 128, jnp.array([[position]], jnp.int32))
    exact = position * 1e6 ** (-np.arange(0, 128, 2) / 128)
    assert np.max(np.abs(np.asarray(cos)[0, 0] - np.cos(exact))) < 0.004
    assert np.max(np.abs(np.asarray(sin)[0, 0] - np.sin(exact))) < 0.004
    rotated = apply_rope(jnp.ones((1, 1, 1, 128), jnp.bfloat16), cos, sin)
    assert rotated.dtype == jnp.bfloat16


def test_yarn_scales_cos_and_sin_by_its_attention_factor() -> None:
    config = RopeConfig(rope_type="yarn", theta=100.0, factor=4.0, original_max_positions=64)
    cos, _ = rope_tables(config, 12, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, 0.1 * math.log(4) + 1, rtol=1e-6)


def test_packed_documents_do_not_see_each_other(values) -> None:
    """C88: change document A, and compare B with B alone."""
    start("EP4xFSDP2")
    model = model_of(values, MODEL, moe_jax.MoEConfig())
    a, other, b = tokens(8, 9, 1), tokens(8, 9, 2), tokens(8, 7, 3)
    segments = np.concatenate([np.ones_like(a), np.full_like(b, 2)], axis=1)
    packed = logits(model, np.concatenate([a, b], axis=1), segments)[:, 9:]
    changed = logits(model, np.concatenate([other, b], axis=1), segments)[:, 9:]
    np.testing.assert_array_equal(packed, changed)
    assert relative_norm(packed, logits(model, b)) < ISOLATED


def test_positions_can_be_given(values) -> None:
    start("1 device")
    model, ids = model_of(values, MODEL, moe_jax.MoEConfig()), tokens(2, 6)
    shifted = np.broadcast_to(np.arange(6) + 11, (2, 6)).astype(np.int32)
    reversed_order = np.broadcast_to(np.arange(6)[::-1], (2, 6)).astype(np.int32)
    assert relative_norm(logits(model, ids, None, shifted), logits(model, ids)) < 1e-5  # only distances matter
    assert relative_norm(logits(model, ids, None, reversed_order), logits(model, ids)) > 1e-2


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_any_number_of_rows_on_eight_devices(rows: int, values) -> None:
    ids = tokens(rows, 5)
    start("1 device")
    expected = np.asarray(logits(model_of(values, MODEL, moe_jax.MoEConfig()), ids))
    start("EP4xFSDP2")
    model = model_of(values, MODEL, moe_jax.MoEConfig())
    output = jax.jit(lambda m, t: m(t, return_routing=True))(model, ids)
    assert output.logits.shape == (rows, 5, 61)
    assert output.logits.dtype == jnp.float32
    assert relative_norm(output.logits, expected) < ISOLATED
    assert output.routing_ids.shape == (2, rows, 5, 2)
    np.testing.assert_array_equal(output.router.counts.sum(axis=1), [rows * 5 * 2] * 2)


def test_evaluation_does_not_depend_on_the_balancing_mode(values) -> None:
    start("EP2xFSDP2")
    ids = tokens(4, 9)
    outputs = [
        np.asarray(logits(model_of(values, MODEL, moe_jax.MoEConfig(moe_load_balancing=mode)), ids))
        for mode in ("none", "aux_loss", "sinkhorn")
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_bf16_differs_from_float32_by_rounding_only_and_returns_float32_logits(values) -> None:
    start("EP4xFSDP2")
    ids = tokens(8, 9)
    model = model_of(values, MODEL, moe_jax.MoEConfig())
    model16 = jax.tree.map(lambda a: a, model)
    model16.dtype = jnp.dtype(jnp.bfloat16)
    low = logits(model16, ids)
    assert low.dtype == jnp.float32
    assert relative_norm(low, logits(model, ids)) < 0.05


def test_offloading_keeps_the_gradients_and_puts_layer_inputs_on_the_host(values) -> None:
    def gradients(**settings):
        start("EP4xFSDP2", **settings)
        model = model_of(values, MODEL, moe_jax.MoEConfig())
        f = lambda m: jnp.sum(m(tokens(8, 9), train=True).logits ** 2)  # noqa: E731
        return values_of(jax.jit(jax.grad(f))(model)), str(jax.make_jaxpr(jax.grad(f))(model))

    (kept, kept_jaxpr), (offloaded, jaxpr) = gradients(), gradients(sm_activation_offloading=True)
    assert "pinned_host" not in kept_jaxpr
    assert "pinned_host" in jaxpr or "<host>" in jaxpr
    for name, value in kept.items():
        assert relative_norm(offloaded[name], value) < ISOLATED, name


def test_wrong_shapes_are_named(values) -> None:
    start("1 device")
    model = model_of(values, MODEL, moe_jax.MoEConfig())
    with pytest.raises(
        moe_jax.ConfigError, match=r"segment_ids has shape \(2, 3\), but must have the tokens' \(2, 4\)"
    ):
        model(jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(moe_jax.ConfigError, match=r"tokens have shape \(4,\), but must be \[batch, sequence\]"):
        model(jnp.zeros(4, jnp.int32), key=jax.random.key(0))
