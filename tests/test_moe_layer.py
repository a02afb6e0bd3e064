"""The routed block, on every mesh and under adversarial routing, against the dense computation: values and all gradients.

x carries the router's logits in its first E channels and the router is the identity on them, so a test says who goes where.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import put_batch, start
from reference import dense_moe_float64, relative_norm, top_k_ids

from moe_jax.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.moe import exchange
from moe_jax.moe.layer import MoE
from moe_jax.sharding import parameter_shardings

F32_RELATIVE = 1e-6  # sums of at most 8 experts' contributions in another order
HIDDEN, WIDTH = 24, 16
ROWS, LENGTH = 16, 7  # 14 tokens a device on 8 devices: no multiple of the ranks

MESHES = ["1 device", "EP2", "EP4", "EP8", "FSDP2", "EP2xFSDP2", "EP4xFSDP2"]
AUX, Z = 0.7, 0.3  # weights of the losses in what is differentiated


@pytest.fixture(autouse=True)
def _no_room_for_fluctuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the few tokens of a test overflow the buffers."""
    monkeypatch.setattr(exchange, "FLUCTUATION", 0.0)


def model_config(num_experts: int, top_k: int, norm_topk_prob: bool = True) -> ModelConfig:
    return ModelConfig(
        family="mixtral", vocab_size=8, hidden_size=HIDDEN, intermediate_size=WIDTH, moe_intermediate_size=WIDTH,
        num_experts=num_experts, num_experts_per_tok=top_k, num_heads=2, num_kv_heads=2, head_dim=4,
        layers=(LayerConfig(),), rope=RopeConfig(), norm_topk_prob=norm_topk_prob, initializer_range=0.3,
    )  # fmt: skip


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
    elif pattern == "balanced":
        chosen = (np.arange(len(logits))[:, None] * 2 + np.arange(2)[None]) % num_experts
        np.put_along_axis(logits, chosen, 9 + np.arange(2)[None].astype(np.float32), axis=1)
    elif pattern == "half of the experts empty":
        logits[:, ::2] -= 30
    return logits


def make_layer(num_experts: int, top_k: int, norm_topk_prob: bool, moe: MoEConfig) -> MoE:
    """A layer on the current mesh whose router reads the logits off x."""
    create = lambda: MoE(model_config(num_experts, top_k, norm_topk_prob), moe, key=jax.random.key(3))  # noqa: E731
    layer = jax.jit(create)()
    layer.router[...] = jnp.eye(HIDDEN, num_experts)
    return jax.device_put(layer, parameter_shardings(layer))


def check(
    mesh: str,
    pattern: str,
    num_experts: int = 8,
    top_k: int = 2,
    *,
    dispatcher: bool = True,
    mask: np.ndarray | None = None,
    norm_topk_prob: bool = True,
    mode: str = "none",
    patterns: tuple[str, ...] = (),
    **settings: Any,
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Compares output, losses, counts and all gradients with the dense layer in float64, for one routing after the other.

    Returns the last output and each routing's numbers of further rounds and blocks.
    """
    start(mesh)
    moe = MoEConfig(moe_load_balancing=mode, moe_all_to_all_dispatcher=dispatcher, **settings)
    layer = make_layer(num_experts, top_k, norm_topk_prob, moe)
    mask = np.ones((ROWS, LENGTH), bool) if mask is None else mask

    def objective(layer, x, mask, dy):
        y, statistics, ids = layer(x, mask, jnp.float32, train=True)
        return jnp.sum(y * dy) + AUX * statistics.aux_loss + Z * statistics.z_loss, (y, statistics, ids)

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    extra = []
    for each in (pattern, *patterns):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(ROWS * LENGTH, HIDDEN)).astype(np.float32)
        x[:, :num_experts] = routing_logits(each, num_experts)
        dy = rng.normal(size=x.shape).astype(np.float32)
        shaped = lambda a: put_batch(a.reshape(ROWS, LENGTH, -1))  # noqa: E731
        (_, (y, statistics, ids)), (d_layer, dx) = step(layer, shaped(x), put_batch(mask), shaped(dy))
        ids = np.asarray(ids).reshape(-1, top_k)
        np.testing.assert_array_equal(np.all(ids == num_experts, axis=1), ~mask.reshape(-1))
        if mode != "sinkhorn":
            np.testing.assert_array_equal(ids[mask.reshape(-1)], top_k_ids(x[mask.reshape(-1), :num_experts], top_k))
        names = ("router", "gate_up", "down")
        (out, aux, z), dx_expected, d_weights = dense_moe_float64(
            x, {n: getattr(layer, n)[...] for n in names}, ids, (dy, AUX, Z), norm_topk_prob=norm_topk_prob
        )
        expected = {"y": out, "aux": aux, "z": z, "x": dx_expected, **d_weights}
        ours = {"y": y, "aux": statistics.aux_loss, "z": statistics.z_loss, "x": dx}
        ours |= {n: getattr(d_layer, n)[...] for n in names}
        for name, value in expected.items():
            assert relative_norm(np.reshape(ours[name], value.shape), value) < F32_RELATIVE, (each, name)
        counts = np.bincount(ids.reshape(-1), minlength=num_experts)[:num_experts]
        np.testing.assert_array_equal(statistics.counts, counts)
        assert int(statistics.dropped) == 0
        extra.append((int(statistics.further_rounds), int(statistics.further_blocks)))
    assert step._cache_size() == 1
    return np.asarray(y), extra


@pytest.mark.parametrize("dispatcher", [True, False], ids=["all_to_all", "all_gather"])
@pytest.mark.parametrize("mesh", MESHES)
def test_random_routing_equals_the_dense_layer_on_every_mesh(mesh, dispatcher):
    check(mesh, "random", dispatcher=dispatcher)


ADVERSARIAL = (
    "one expert",
    "random",
    "zipf",
    "one rank's tokens to one expert",
    "half of the experts empty",
    "balanced",
)


@pytest.mark.parametrize(
    ("mesh", "settings", "has_rounds"),
    [
        ("EP4xFSDP2", {"moe_buffer_factor": 1.25}, True),
        ("EP4xFSDP2", {"dispatcher": False}, False),
        ("EP4xFSDP2", {"moe_exchange": "ragged", "moe_buffer_factor": 1.0}, True),
        ("EP8", {"moe_num_chunks": 2, "moe_buffer_factor": 1.0}, True),
        ("EP2", {"moe_num_chunks": 4}, True),
    ],
    ids=["all_to_all", "all_gather", "ragged", "two chunks", "four chunks"],
)
def test_any_routing_is_exact_one_after_the_other(mesh, settings, has_rounds):
    """The heavy one first: what it left in a buffer must not matter to the next, and nothing is compiled anew."""
    first, *others = ADVERSARIAL
    _, further = check(mesh, first, patterns=tuple(others), **settings)
    assert (further[0][0] > 0) == has_rounds
    assert further[0][1] > 0
    if settings.get("moe_buffer_factor") == 1.25:
        assert further[-1] == (0, 0)  # the first round holds a balanced routing


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 8), (16, 8), (4, 3)])
def test_any_number_of_experts_per_token(num_experts, top_k):
    """k = 1, k = E, more than a rank's experts per token, E = EP; all tokens to one rank's experts."""
    check("EP4xFSDP2", "random", num_experts, top_k, norm_topk_prob=False, patterns=("zipf",), moe_buffer_factor=1.0)


@pytest.mark.parametrize("dispatcher", [True, False], ids=["all_to_all", "all_gather"])
def test_padding_goes_nowhere_even_when_a_rank_has_nothing_else(dispatcher):
    mask = np.ones((ROWS, LENGTH), bool)
    mask[:4] = False  # the first ranks have no token at all
    mask[7, 2:5], mask[9, :3], mask[11, 4:] = False, False, False
    y, _ = check("EP4xFSDP2", "random", dispatcher=dispatcher, mask=mask)
    assert not np.any(y[:4])


def test_two_replicas_sum_their_gradients():
    check("replica2xEP2xFSDP2", "zipf")


@pytest.mark.parametrize("mode", ["sinkhorn", "aux_loss"])
def test_balanced_choices_use_the_familys_weights_and_no_other_gradient(mode):
    """Whatever experts sinkhorn chooses, output and gradients are those of the dense layer with just these experts."""
    check("EP4xFSDP2", "zipf", mode=mode)


def test_exact_ties_go_to_the_lowest_ids():
    """C41: all logits equal."""
    start("EP4xFSDP2")
    layer = make_layer(8, 2, True, MoEConfig(moe_load_balancing="none"))
    x, mask = put_batch(np.zeros((8, 3, HIDDEN), np.float32)), put_batch(np.ones((8, 3), bool))
    _, statistics, ids = jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=False))(layer, x, mask)
    np.testing.assert_array_equal(np.asarray(ids), np.broadcast_to([0, 1], ids.shape))
    np.testing.assert_array_equal(statistics.counts, [24, 24, 0, 0, 0, 0, 0, 0])


def test_eight_experts_in_bf16_differ_by_at_most_one_step_between_one_rank_and_four():
    """C45: contributions are added in float32 and rounded once."""
    outputs = []
    for mesh in ("1 device", "EP4"):
        start(mesh)
        layer = make_layer(16, 8, True, MoEConfig(moe_load_balancing="none"))
        x = put_batch(np.random.default_rng(0).normal(size=(8, 5, HIDDEN)).astype(jnp.bfloat16))
        mask = put_batch(np.ones((8, 5), bool))
        y = jax.jit(lambda layer, x, m: layer(x, m, jnp.bfloat16, train=False)[0])(layer, x, mask)
        outputs.append(np.asarray(y.astype(jnp.float32)))
    one, four = outputs
    step = 2.0**-7 * np.abs(one)  # the distance between bf16 neighbours is at most 2^-7 of the value
    assert np.all(np.abs(one - four) <= step)
