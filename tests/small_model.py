"""One small model, two batches, two SGD steps: what tests compare between meshes and settings."""

import functools
from typing import Any

import jax
import numpy as np
from meshes import model_of, put_batch, start, values_of
from reference import relative_norm

import converters
import moe_jax

PARAMETERS = 1e-6  # float32 after two steps; measured about 3e-8
LOSS = 1e-6
STATISTICS = 2e-6  # float32 means of at most 104 values, after a step of the above accuracy

# A dense layer between two kinds of run, GQA, q/k norm; 8 experts, so that every mesh divides them.
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "mlp_only_layers": [1], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.3, "dtype": "float32",
}  # fmt: skip
MODEL = converters.new_source(CONFIG, {}, "float32")[0]
ROWS, LENGTH = 8, 13


@functools.cache
def initial_values() -> dict[str, np.ndarray]:
    start("1 device")
    return values_of(moe_jax.transform(CONFIG))


def batches() -> list[dict[str, np.ndarray]]:
    """A batch with padding at all places and packed documents, then one whose few tokens leave experts empty."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (2, ROWS, LENGTH)).astype(np.int32)
    segments = np.ones((2, ROWS, LENGTH), np.int32)
    segments[0, :, 11:] = 0
    segments[0, 1, :3] = 0
    segments[0, 2, 4:6] = 0
    segments[0, 3, 6:11] = 2
    segments[1] = 0
    segments[1, 5, :4] = 1
    return [{"tokens": t, "segment_ids": s} for t, s in zip(tokens, segments, strict=True)]


def two_steps(mesh: str, mode: str, *, remat: str = "full", **settings: Any):
    """(parameters after two steps, losses, routers' statistics of each step); settings: of `MoEConfig`."""
    values = initial_values()
    start(mesh)
    moe = moe_jax.MoEConfig(**{
        "moe_load_balancing": mode, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, **settings
    })  # fmt: skip
    if mode == "expert_bias":  # large enough to change who is chosen
        rng = np.random.default_rng(1)
        values = values | {
            f"runs.{run}.0.mlp.expert_bias": rng.normal(size=(1, 8)).astype(np.float32) for run in (0, 2)
        }
    model = model_of(values, MODEL, moe, remat=remat)
    key = jax.random.key(5) if moe.draws_random_numbers else None

    @functools.partial(jax.jit, donate_argnums=0)
    def step(model, batch):
        (loss, parts), grads = jax.value_and_grad(moe_jax.training_loss, has_aux=True)(model, batch, key)
        model = jax.tree.map(lambda p, g: p - 0.2 * g, model, grads)
        if mode == "expert_bias":
            model = moe_jax.update_expert_bias(model, parts.router.counts)
        return model, loss, parts.router

    losses, routers = [], []
    for batch in batches():
        model, loss, router = step(model, {name: put_batch(array) for name, array in batch.items()})
        losses.append(float(loss))
        routers.append({name: np.asarray(value) for name, value in vars(router).items()})
    assert step._cache_size() == 1
    return values_of(model), losses, routers


@functools.cache
def one_device(mode: str, settings: tuple[tuple[str, Any], ...] = ()):
    return two_steps("1 device", mode, **dict(settings))


def assert_same(result, expected) -> None:
    parameters, losses, routers = result
    for name, value in expected[0].items():
        assert relative_norm(parameters[name], value) < PARAMETERS, name
    np.testing.assert_allclose(losses, expected[1], rtol=LOSS)
    for router, wanted in zip(routers, expected[2], strict=True):
        for name in ("counts", "dropped", "plan_iterations"):
            np.testing.assert_array_equal(router[name], wanted[name], err_msg=name)
        for name in ("mean_probs", "entropy", "aux_loss", "z_loss", "mean_logit", "max_logit"):
            np.testing.assert_allclose(router[name], wanted[name], rtol=STATISTICS, atol=STATISTICS,
                                       err_msg=name)  # fmt: skip
