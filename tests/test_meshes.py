"""One model, one batch, plain SGD: the same parameters on every mesh, in every balancing mode."""

import jax
import numpy as np
import pytest
from meshes import MESHES, model_of, put_batch, start
from reference import relative_norm
from small_model import (
    CONFIG,
    LENGTH,
    LOSS,
    MODEL,
    PARAMETERS,
    ROWS,
    assert_same,
    batches,
    initial_values,
    one_device,
    two_steps,
)

import converters
import moe_jax
from moe_jax.model import named_parameters


@pytest.mark.parametrize("mode", ["sinkhorn", "aux_loss", "none"])
def test_the_second_batch_leaves_experts_without_tokens(mode: str) -> None:
    _, losses, routers = one_device(mode)
    counts = [router["counts"] for router in routers]
    assert np.all(np.isfinite(losses))
    np.testing.assert_array_equal(counts[0].sum(axis=1), [2 * np.sum(batches()[0]["segment_ids"] != 0)] * 2)
    np.testing.assert_array_equal(counts[1].sum(axis=1), [8, 8])
    assert np.any(counts[1] == 0)


@pytest.mark.parametrize("mode", ["sinkhorn", "aux_loss", "none"])
@pytest.mark.parametrize("mesh", [name for name in MESHES if name not in ("1 device", "FSDP2")])
def test_two_sgd_steps_are_the_same_on_every_mesh(mesh: str, mode: str) -> None:
    assert_same(two_steps(mesh, mode), one_device(mode))


@pytest.mark.parametrize("mesh", ["EP8", "EP4xFSDP2"])
def test_the_all_gather_dispatcher_gives_the_same(mesh: str) -> None:
    assert_same(two_steps(mesh, "sinkhorn", moe_all_to_all_dispatcher=False), one_device("sinkhorn"))


@pytest.mark.parametrize("remat", ["none", "dispatched"])
def test_rematerialisation_changes_neither_routing_nor_gradients(remat: str) -> None:
    """C61: and the counts are those of one pass."""
    assert_same(two_steps("EP4xFSDP2", "sinkhorn", remat=remat), one_device("sinkhorn"))


def test_balancing_loss_reaches_the_gate_once_with_its_coefficient() -> None:
    """C56: all labels masked; the gradient is 0, g, 2 g."""
    values = initial_values()
    start("EP2xFSDP2")
    batch = {name: put_batch(array) for name, array in batches()[0].items()}
    labels = put_batch(np.full((ROWS, LENGTH), -100, np.int32))

    def gate_gradient(coefficient: float) -> np.ndarray:
        moe = moe_jax.MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=coefficient, moe_z_loss_coeff=0.0)
        config = CONFIG | {"router_aux_loss_coef": 0.02, "output_router_logits": True}
        assert converters.new_source(config, {}, "float32")[0] == MODEL  # the checkpoint's coefficient is not read
        model = model_of(values, MODEL, moe)
        grads = jax.jit(jax.grad(lambda m: moe_jax.training_loss(m, batch | {"labels": labels}, None)[0]))(model)
        return np.asarray(named_parameters(grads)["runs.0.0.mlp.router"][...])

    zero, one, two = (gate_gradient(c) for c in (0.0, 0.02, 0.04))
    assert not np.any(zero)
    assert np.any(one)
    assert relative_norm(two, 2 * one) < 1e-5


def test_padding_a_batch_further_changes_nothing() -> None:
    """C50: the same tokens padded to 13 and to 29, behind."""
    values = initial_values()
    start("EP4xFSDP2")
    model = model_of(values, MODEL, moe_jax.MoEConfig(moe_load_balancing="sinkhorn"))
    grad = jax.jit(jax.value_and_grad(moe_jax.training_loss, has_aux=True))
    results = []
    for extra in (0, 16):
        batch = {n: put_batch(np.pad(a, ((0, 0), (0, extra)))) for n, a in batches()[0].items()}
        (loss, parts), grads = grad(model, batch, None)
        results.append(
            (float(loss), np.asarray(parts.router.counts), {n: p[...] for n, p in named_parameters(grads).items()})
        )
    (loss, counts, grads), (padded_loss, padded_counts, padded_grads) = results
    assert padded_loss == pytest.approx(loss, rel=LOSS)
    np.testing.assert_array_equal(counts, padded_counts)
    for name, value in grads.items():
        assert relative_norm(padded_grads[name], value) < 5 * PARAMETERS, name


def test_optimizer_state_is_sharded_like_the_parameters() -> None:
    import optax

    values = initial_values()
    start("EP4xFSDP2")
    model = model_of(values, MODEL, moe_jax.MoEConfig())
    state = jax.jit(optax.adamw(1e-3).init)(model)
    for leaf, moment in zip(jax.tree.leaves(model), jax.tree.leaves(state[0].mu), strict=True):
        assert moment.sharding.spec == leaf.sharding.spec
