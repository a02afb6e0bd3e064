"""The schedule at its corners, clipping, the decay mask by name (C99) and float32 masters (C43)."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.errors import ConfigError
from moe_jax.optim import check_masters, decay_mask, is_decayed, leaf_names, make_optimizer, make_schedule
from moe_jax.run_config import OptimizerConfig

DECAYED = ("embed.weight", "lm_head.weight", "attn.q", "attn.o", "mlp.router", "mlp.gate_up", "mlp.down")
KEPT = ("final_norm.weight", "attn_norm.weight", "mlp_norm.weight", "attn.q_norm.weight", "attn.k_norm.weight",
        "attn.q_bias", "attn.k_bias", "attn.v_bias", "attn.o_bias")  # fmt: skip


class Norm(nnx.Module):
    def __init__(self, *shape: int) -> None:
        self.weight = nnx.Param(jnp.ones(shape))


class Attention(nnx.Module):
    def __init__(self, *stack: int) -> None:
        self.q, self.q_bias = nnx.Param(jnp.ones((*stack, 4, 2, 2))), nnx.Param(jnp.ones((*stack, 2, 2)))
        self.q_norm = Norm(*stack, 2)


class Model(nnx.Module):
    """Two stand-in layers, stacked or not."""

    def __init__(self, stacked: bool) -> None:
        self.embed = Norm(5, 4)
        self.runs = nnx.List([nnx.List([Attention(2)])] if stacked else [nnx.List([Attention(), Attention()])])
        self.final_norm = Norm(4)


def one_step(config: OptimizerConfig, params: Any, grads: Any, steps: int = 1) -> Any:
    optimizer = make_optimizer(config, steps)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_mask_follows_the_name() -> None:
    assert all(is_decayed(name) and is_decayed(f"runs.0.1.{name}") for name in DECAYED)
    assert not any(is_decayed(name) or is_decayed(f"runs.0.1.{name}") for name in KEPT)


@pytest.mark.parametrize("stacked", [True, False])
def test_decay_scales_matrices_and_leaves_norms_and_biases_to_the_bit(stacked: bool) -> None:  # C99
    model = Model(stacked)
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.1)
    after = one_step(config, model, jax.tree.map(jnp.zeros_like, model))
    for name, leaf in zip(leaf_names(after), jax.tree.leaves(after), strict=True):
        if name.endswith((".q", "embed.weight")):
            np.testing.assert_allclose(leaf, 0.9, rtol=1e-7)
        else:
            assert (np.asarray(leaf) == 1.0).all(), name


def test_mask_has_the_structure_of_the_model() -> None:
    model = Model(True)
    assert jax.tree.structure(decay_mask(model)) == jax.tree.structure(model)
    assert leaf_names(model)[0] in ("embed.weight", "final_norm.weight")
    assert "runs.0.0.q_norm.weight" in leaf_names(model)


def test_schedule_warms_up_peaks_and_ends_at_the_ratio() -> None:
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4, min_ratio=0.1), steps=21)
    rates = [float(schedule(step)) for step in range(21)]
    np.testing.assert_allclose(rates[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rates[12], (2.0 + 0.2) / 2, rtol=1e-6)
    np.testing.assert_allclose(rates[20], 0.2, rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 5), (0, 2)])
def test_schedule_works_for_the_shortest_runs(warmup: int, steps: int) -> None:
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=warmup), steps)
    rates = [float(schedule(step)) for step in range(steps)]
    assert np.isfinite(rates).all()
    assert all(0 < rate <= 1 for rate in rates)


def test_gradient_is_clipped_to_the_global_norm() -> None:
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([0.0, 4.0])}
    clipped = make_optimizer(OptimizerConfig(clip_norm=1.0), 1)
    _, state = clipped.update(grads, clipped.init(params), params)
    moment = {
        name: leaf for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True) if ".mu." in name
    }
    np.testing.assert_allclose(np.concatenate(list(moment.values())), np.array([0.6, 0, 0, 0.8]) * 0.1, atol=1e-7)
    free = make_optimizer(OptimizerConfig(clip_norm=0.0), 1)
    _, state = free.update(grads, free.init(params), params)
    moment = {
        name: leaf for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True) if ".mu." in name
    }
    np.testing.assert_allclose(np.concatenate(list(moment.values())), np.array([3.0, 0, 0, 4]) * 0.1, atol=1e-6)


def test_small_updates_add_up_in_float32() -> None:  # C43
    config = OptimizerConfig(learning_rate=0.0006, weight_decay=0.0, min_ratio=1.0, clip_norm=0.0, beta1=0.0, beta2=0.0)
    optimizer = make_optimizer(config, 100)
    params = {"w": jnp.ones(1, jnp.float32)}
    state = optimizer.init(params)
    for _ in range(100):
        updates, state = optimizer.update({"w": jnp.ones(1)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], 0.94, atol=1e-5)


def test_parameters_that_are_not_float32_are_named() -> None:
    check_masters(Model(True))
    with pytest.raises(ConfigError, match=r"runs\.w is bfloat16"):
        check_masters({"runs": {"w": jnp.ones(1, jnp.bfloat16)}})


@pytest.mark.parametrize(
    ("field", "value"), [("beta1", 1.0), ("learning_rate", -1.0), ("eps", 0.0), ("clip_norm", -1.0)]
)
def test_impossible_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{field}"):
        OptimizerConfig(**{field: value})  # type: ignore[arg-type]
