"""The routed block, on every mesh and under adversarial routing, against the dense computation: values and all gradients.

x carries the router's logits in its first E channels and the router is the identity on them, so a test says who goes where.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import dense_moe_float64, relative_norm, top_k_ids

import moe_jax
from moe_jax.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.moe.layer import MoE
from moe_jax.sharding import batch_spec, parameter_shardings

F32_RELATIVE = 2e-6  # sums of at most 8 experts' contributions in another order
HIDDEN, WIDTH = 24, 16
ROWS, LENGTH = 16, 7  # 14 tokens a device on 8 devices: no multiple of the ranks

MESHES = {
    "EP1": (1, 1), "EP2": (2, 1), "EP4": (4, 1), "EP8": (8, 1), "EP1xFSDP2": (1, 2), "EP2xFSDP2": (2, 2), "EP4xFSDP2": (4, 2),
}  # fmt: skip


def model_config(num_experts: int, top_k: int, norm_topk_prob: bool = True) -> ModelConfig:
    return ModelConfig(
        family="mixtral", vocab_size=8, hidden_size=HIDDEN, intermediate_size=WIDTH, moe_intermediate_size=WIDTH,
        num_experts=num_experts, num_experts_per_tok=top_k, num_heads=2, num_kv_heads=2, head_dim=4,
        layers=(LayerConfig(),), rope=RopeConfig(), norm_topk_prob=norm_topk_prob, initializer_range=0.3,
    )  # fmt: skip


def start(mesh: str, replicas: int = 1) -> None:
    ep, fsdp = MESHES[mesh]
    count = ep * fsdp * replicas
    moe_jax.init({"expert_parallel_degree": ep, "hybrid_shard_degree": fsdp}, devices=jax.devices()[:count])


def routing_logits(pattern: str, num_experts: int, seed: int = 0) -> np.ndarray:
    """[ROWS * LENGTH, E] logits that produce the named load."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS * LENGTH, num_experts)).astype(np.float32)
    if pattern == "zipf":
        logits += 3 * np.log(1 / np.arange(1, num_experts + 1)).astype(np.float32)
    elif pattern == "one expert":
        logits[:, num_experts // 2] += 9
    elif pattern == "one rank's tokens to one expert":
        logits[: 2 * LENGTH, 0] += 9
    elif pattern == "half of the experts empty":
        logits[:, ::2] -= 30
    return logits


def run(
    mesh: str,
    pattern: str,
    num_experts: int,
    top_k: int,
    *,
    dispatcher: bool,
    mask=None,
    norm_topk_prob=True,
    replicas=1,
):
    """(outputs and gradients of the layer, those of the dense reference, counts)."""
    start(mesh, replicas)
    config, moe = model_config(num_experts, top_k, norm_topk_prob), MoEConfig(
        moe_load_balancing="none", moe_all_to_all_dispatcher=dispatcher
    )  # fmt: skip
    create = lambda: MoE(config, moe, key=jax.random.key(3))  # noqa: E731
    layer = jax.jit(create)()
    layer.router[...] = jnp.eye(HIDDEN, num_experts)
    layer = jax.device_put(layer, parameter_shardings(layer))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS * LENGTH, HIDDEN)).astype(np.float32)
    x[:, :num_experts] = routing_logits(pattern, num_experts)
    mask = np.ones((ROWS, LENGTH), bool) if mask is None else mask
    dy = rng.normal(size=x.shape).astype(np.float32)
    put = lambda a: jax.device_put(a, jax.NamedSharding(moe_jax.state.mesh, batch_spec(a.ndim)))  # noqa: E731

    def objective(layer, x, mask, dy):
        y, statistics, ids = layer(x, mask, jnp.float32, train=False)
        return jnp.sum(y * dy), (y, statistics, ids)

    shaped = lambda a: put(a.reshape(ROWS, LENGTH, -1))  # noqa: E731
    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    (_, (y, statistics, _)), (d_layer, dx) = step(layer, shaped(x), put(mask), shaped(dy))
    ours = {"y": y, "x": dx, "router": d_layer.router[...], "gate_up": d_layer.gate_up[...], "down": d_layer.down[...]}
    ids = np.where(mask.reshape(-1, 1), top_k_ids(x[:, :num_experts], top_k), num_experts)
    weights = {"router": layer.router[...], "gate_up": layer.gate_up[...], "down": layer.down[...]}
    out, dx_ref, d_weights = dense_moe_float64(x, weights, ids, dy, norm_topk_prob=norm_topk_prob)
    reference = {"y": out.reshape(y.shape), "x": dx_ref.reshape(dx.shape), **d_weights}
    return ours, reference, np.bincount(ids.reshape(-1), minlength=num_experts + 1)[:num_experts], statistics


def check(ours, reference, counts, statistics):
    for name in reference:
        assert relative_norm(ours[name], reference[name]) < F32_RELATIVE, name
    np.testing.assert_array_equal(statistics.counts, counts)
    assert int(statistics.dropped) == 0


@pytest.mark.parametrize("dispatcher", [True, False], ids=["all_to_all", "all_gather"])
@pytest.mark.parametrize("mesh", MESHES)
def test_random_routing_equals_the_dense_layer_on_every_mesh(mesh, dispatcher):
    check(*run(mesh, "random", 8, 2, dispatcher=dispatcher))


@pytest.mark.parametrize("dispatcher", [True, False], ids=["all_to_all", "all_gather"])
@pytest.mark.parametrize(
    "pattern", ["zipf", "one expert", "one rank's tokens to one expert", "half of the experts empty"]
)
def test_adversarial_routing_is_exact(pattern, dispatcher):
    check(*run("EP4xFSDP2", pattern, 8, 2, dispatcher=dispatcher))


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 8), (16, 8), (4, 3)])
def test_any_number_of_experts_per_token(num_experts, top_k):
    """k = 1, k = E, more than a rank's experts per token, E = EP."""
    check(*run("EP4xFSDP2", "random", num_experts, top_k, dispatcher=True, norm_topk_prob=False))


@pytest.mark.parametrize("dispatcher", [True, False], ids=["all_to_all", "all_gather"])
def test_padding_goes_nowhere_even_when_a_rank_has_nothing_else(dispatcher):
    mask = np.ones((ROWS, LENGTH), bool)
    mask[:4] = False  # the first ranks have no token at all
    mask[7, 2:5], mask[9, :3], mask[11, 4:] = False, False, False
    ours, reference, counts, statistics = run("EP4xFSDP2", "random", 8, 2, dispatcher=dispatcher, mask=mask)
    check(ours, reference, counts, statistics)
    assert not np.any(np.asarray(ours["y"])[:4])


def test_two_replicas_sum_their_gradients():
    check(*run("EP2xFSDP2", "zipf", 8, 2, dispatcher=True, replicas=2))


def test_exact_ties_go_to_the_lowest_ids():
    """C41: all logits equal."""
    start("EP4xFSDP2")
    layer = jax.jit(lambda: MoE(model_config(8, 2), MoEConfig(moe_load_balancing="none"), key=jax.random.key(0)))()
    layer.router[...] = jnp.zeros((HIDDEN, 8))
    layer = jax.device_put(layer, parameter_shardings(layer))
    x = jax.device_put(np.ones((8, 3, HIDDEN), np.float32), jax.NamedSharding(moe_jax.state.mesh, batch_spec(3)))
    mask = jnp.ones((8, 3), bool, out_sharding=batch_spec(2))
    _, statistics, ids = jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=False))(layer, x, mask)
    np.testing.assert_array_equal(np.asarray(ids), np.broadcast_to([0, 1], ids.shape))
    np.testing.assert_array_equal(statistics.counts, [24, 24, 0, 0, 0, 0, 0, 0])


def test_eight_experts_in_bf16_differ_by_at_most_one_step_between_one_rank_and_four():
    """C45: contributions are added in float32 and rounded once."""
    outputs = []
    for mesh in ("EP1", "EP4"):
        start(mesh)
        layer = jax.jit(lambda: MoE(model_config(16, 8), MoEConfig(moe_load_balancing="none"), key=jax.random.key(0)))()
        layer = jax.device_put(layer, parameter_shardings(layer))
        x = np.random.default_rng(0).normal(size=(8, 5, HIDDEN)).astype(jnp.bfloat16)
        x = jax.device_put(x, jax.NamedSharding(moe_jax.state.mesh, batch_spec(3)))
        mask = jnp.ones((8, 5), bool, out_sharding=batch_spec(2))
        y = jax.jit(lambda layer, x, m: layer(x, m, jnp.bfloat16, train=False)[0])(layer, x, mask)
        outputs.append(np.asarray(y.astype(jnp.float32)))
    one, four = outputs
    step = 2.0**-7 * np.abs(one)  # the distance between bf16 neighbours is at most 2^-7 of the value
    assert np.all(np.abs(one - four) <= step)
