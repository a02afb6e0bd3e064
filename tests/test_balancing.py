"""Every way to route and balance: the same on every mesh, and hand-worked cases of each part."""

import dataclasses
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import model_of, put_batch, start, values_of
from reference import relative_norm, top_k_ids
from small_model import CONFIG, LENGTH, MODEL, ROWS, assert_same, batches, initial_values, one_device, two_steps
from test_moe_layer import HIDDEN, make_layer

import moe_jax
from moe_jax.config import MoEConfig
from moe_jax.expert_bias import bias_range
from moe_jax.moe.capacity import within_capacity
from moe_jax.moe.shuffle import make_shuffle, shuffle, unshuffle
from moe_jax.moe.statistics import combine_statistics, pooled_aux_loss, router_statistics
from moe_jax.sharding import BATCH, P

GRADIENT = 5e-6  # float32 sums over 104 tokens, of which parts are added in another order
EXACT = 1e-6

# Every feature once, several in one model where they do not touch: compiling is what a test costs.
SETTINGS = {
    "balanced, jitter": ("balanced", {"moe_input_jitter_eps": 0.1}),
    "expert_bias, sequence loss": (
        "expert_bias",
        {"moe_aux_loss_form": "sequence", "expert_bias_update_rate": 0.3, "expert_bias_update": "proportional"},
    ),
    "hf loss, capacity": ("aux_loss", {"moe_aux_loss_form": "hf", "moe_expert_capacity_factor": 1.0}),
    "shuffle, capacity by position": (
        "none",
        {"global_token_shuffle": True, "moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    ),
}


def settings_of(name: str):
    mode, settings = SETTINGS[name]
    return mode, tuple(settings.items())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mesh", ["EP2", "EP2xFSDP2", "EP4xFSDP2"])
def test_two_sgd_steps_are_the_same_on_every_mesh(mesh: str, name: str) -> None:
    mode, settings = settings_of(name)
    assert_same(two_steps(mesh, mode, **dict(settings)), one_device(mode, settings))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_does_something(name: str) -> None:
    """Against the plain mode: a setting that is ignored would give the same parameters."""
    plain = one_device("none")[0]
    parameters, _, routers = one_device(*settings_of(name))
    assert any(relative_norm(parameters[n], value) > 1e-3 for n, value in plain.items())
    if "capacity" in name:
        assert np.all(routers[0]["dropped"] > 0)
        limit = math.ceil(np.sum(batches()[0]["segment_ids"] != 0) * 2 / 8)
        assert np.all(np.sum(np.maximum(routers[0]["counts"] - limit, 0), axis=1) == routers[0]["dropped"])
    if "balanced" in name:
        for router, batch in zip(routers, batches(), strict=True):
            pairs = 2 * np.sum(batch["segment_ids"] != 0)
            assert np.all((router["counts"] == pairs // 8) | (router["counts"] == -(-pairs // 8)))


@pytest.mark.parametrize("remat", ["none", "dispatched"])
@pytest.mark.parametrize("name", ["balanced, jitter", "shuffle, capacity by position"])
def test_rematerialisation_changes_neither_routing_nor_gradients(name: str, remat: str) -> None:
    """C61: a recomputed layer draws the same noise, takes the same plan, and is counted once."""
    mode, settings = settings_of(name)
    assert_same(two_steps("EP2", mode, remat=remat, **dict(settings)), one_device(mode, settings))


def test_the_shuffle_alone_changes_nothing() -> None:
    assert_same(two_steps("EP4xFSDP2", "none", global_token_shuffle=True), one_device("none"))


# ---- gradient accumulation ----


def accumulated(micro_batches: int, mode: str, **settings):
    start("EP2xFSDP2")
    values = initial_values()
    moe = MoEConfig(moe_load_balancing=mode, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, **settings)
    if mode == "expert_bias":
        values = values | {
            f"runs.{run}.0.mlp.expert_bias": np.linspace(-1, 1, 8)[None].astype(np.float32) for run in (0, 2)
        }
    model = model_of(values, MODEL, moe)
    from moe_jax.train_step import accumulated_gradients, put_batch

    rng = np.random.default_rng(2)
    batch = {
        "tokens": rng.integers(0, 61, (16, LENGTH)).astype(np.int32),
        "segment_ids": np.ones((16, LENGTH), np.int32),
    }
    batch["segment_ids"][:, 9:] = 0
    batch["segment_ids"][5, 2:] = 0  # micro-batches of unequal numbers of tokens
    key = jax.random.key(3) if moe.draws_random_numbers else None
    loss, parts, grads = jax.jit(accumulated_gradients)(model, put_batch(batch, micro_batches), key)
    return float(loss), parts, values_of(grads)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("none", {"moe_input_jitter_eps": 0.1}), ("expert_bias", {"moe_aux_loss_form": "sequence"})],
    ids=["none, jitter", "expert_bias, sequence loss"],
)
def test_accumulation_equals_one_large_batch_where_tokens_are_routed_one_by_one(mode: str, settings: dict) -> None:
    loss, parts, grads = accumulated(1, mode, **settings)
    for micro_batches in (2, 4):
        other_loss, other, other_grads = accumulated(micro_batches, mode, **settings)
        assert other_loss == pytest.approx(loss, rel=EXACT)
        np.testing.assert_array_equal(other.router.counts, parts.router.counts)
        names = ["z_loss", "entropy", "mean_logit", "max_logit", "mean_probs"]
        names += ["aux_loss"] if mode == "expert_bias" else []  # the "megatron" loss is each micro-batch's own
        for name in names:
            np.testing.assert_allclose(
                getattr(other.router, name), getattr(parts.router, name), rtol=GRADIENT, err_msg=name
            )
        for name, value in grads.items():
            assert relative_norm(other_grads[name], value) < GRADIENT, name


def test_an_empty_micro_batch_leaves_the_statistics() -> None:
    logits = jnp.full((4, 4), -6.0)
    ids, mask = jnp.zeros((4, 2), jnp.int32).at[:, 1].set(1), jnp.ones(4, bool)
    full = router_statistics(logits, ids, mask, ())
    empty = router_statistics(logits, jnp.full((4, 2), 4), ~mask, ())
    micro = jax.tree.map(lambda a, b: jnp.stack([a, b])[:, None], full, empty)
    combined = combine_statistics(micro, jnp.array([1.0, 0.0]))
    for name, value in vars(full).items():
        np.testing.assert_allclose(getattr(combined, name)[0], value, rtol=EXACT, err_msg=name)


# ---- the scope ----


@pytest.mark.parametrize("mode", ["sinkhorn", "balanced"])
def test_local_scope_balances_every_device_by_itself(mode: str) -> None:
    """The choice of a device's tokens is the one that they get alone."""
    rng = np.random.default_rng(0)
    x = np.zeros((8, 12, HIDDEN), np.float32)
    x[:, :, :8] = rng.normal(size=(8, 12, 8)) + np.linspace(2, -2, 8)
    moe = MoEConfig(moe_load_balancing=mode, balance_scope="local")

    def ids_of(mesh: str, x: np.ndarray, moe: MoEConfig) -> np.ndarray:
        start(mesh)
        layer, mask = make_layer(8, 2, True, moe), put_batch(np.ones(x.shape[:2], bool))
        return np.asarray(
            jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=True)[2])(layer, put_batch(x), mask)
        )

    together = ids_of("EP2xFSDP2", x, moe)
    alone = [ids_of("1 device", part, moe) for part in np.split(x, 4)]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert np.any(together != ids_of("EP2xFSDP2", x, dataclasses.replace(moe, balance_scope="global")))


def test_a_shuffle_mixes_what_a_local_plan_sees() -> None:
    """The same load limits, other tokens together: a shuffle that did nothing would choose alike."""
    x = np.zeros((8, 12, HIDDEN), np.float32)
    x[:, :, :8] = np.random.default_rng(0).normal(size=(8, 12, 8)) + 3 * np.eye(8)[:, None, :]
    start("EP4xFSDP2")
    mask, key, ids = put_batch(np.ones((8, 12), bool)), jax.random.key(0), {}
    for shuffled in (False, True):
        moe = MoEConfig(moe_load_balancing="balanced", balance_scope="local", global_token_shuffle=shuffled)
        layer = make_layer(8, 2, True, moe)
        run = jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=True, key=key)[1:])
        statistics, chosen = run(layer, put_batch(x), mask)
        np.testing.assert_array_equal(statistics.counts, [24] * 8)
        ids[shuffled] = np.sort(np.asarray(chosen))
    assert np.mean(ids[False] != ids[True]) > 0.1


def test_local_scope_takes_loss_and_capacity_of_each_device() -> None:
    """Rows that are balanced together, not alone: two devices with 4 tokens each, all to one expert."""
    x = np.zeros((2, 4, HIDDEN), np.float32)
    x[0, :, 0] = x[1, :, 1] = 2.0
    start("EP2")
    mask, results = put_batch(np.ones((2, 4), bool)), {}
    for scope in ("global", "local"):
        moe = MoEConfig(moe_load_balancing="aux_loss", balance_scope=scope, moe_expert_capacity_factor=1.0)
        layer = make_layer(2, 1, False, moe)
        results[scope] = jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=True)[1])(layer, put_batch(x), mask)
    probability = math.exp(2) / (math.exp(2) + 1)
    assert float(results["global"].aux_loss) == pytest.approx(1, rel=EXACT)
    assert float(results["local"].aux_loss) == pytest.approx(2 * probability, rel=EXACT)
    assert int(results["global"].dropped) == 0
    assert int(results["local"].dropped) == 4


def test_local_balancing_loss_is_the_mean_of_each_devices_own() -> None:
    logits = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
    mask = np.random.default_rng(1).random((8, 6)) < 0.7
    start("EP4xFSDP2")

    def local(logits, mask):
        logits, mask = logits[0], mask[0]
        ids = jnp.where(mask[:, None], jax.lax.top_k(logits, 2)[1], 4)
        return router_statistics(logits, ids, mask, BATCH, num_groups=1).aux_loss

    loss = jax.jit(jax.shard_map(local, in_specs=P(BATCH), out_specs=P()))(put_batch(logits), put_batch(mask))
    own = [float(loss_of(part, keep)) for part, keep in zip(logits, mask, strict=True)]
    assert float(loss) == pytest.approx(np.average(own, weights=mask.sum(axis=1)), rel=EXACT)


def loss_of(logits: np.ndarray, mask: np.ndarray, top_k: int = 2) -> float:
    """E sum f p of the masked tokens, in NumPy."""
    logits = logits[mask].astype(np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    counts = np.bincount(top_k_ids(logits, top_k).ravel(), minlength=logits.shape[1])
    return logits.shape[1] * float(np.sum(counts / counts.sum() * probs.mean(axis=0)))


# ---- forms of the balancing loss ----


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_values_at_perfect_balance(top_k: int) -> None:
    """C48: 1 in the forms "megatron" and "sequence", k in "hf", for zero logits over balanced choices."""
    ids = jnp.asarray((np.arange(16)[:, None] * top_k + np.arange(top_k)[None]) % 8, jnp.int32)
    mask = jnp.ones(16, bool)
    whole = router_statistics(jnp.zeros((16, 8)), ids, mask, ())
    rows = router_statistics(jnp.zeros((16, 8)), ids, mask, (), num_groups=2)
    assert float(whole.aux_loss) == pytest.approx(1, abs=EXACT)
    assert float(rows.aux_loss) == pytest.approx(1, abs=EXACT)
    layers = jax.tree.map(lambda a: jnp.stack([a, a, a]), whole)
    assert float(pooled_aux_loss(layers, top_k)) == pytest.approx(top_k, abs=EXACT)


def test_sequence_loss_is_the_mean_over_rows_by_their_tokens() -> None:
    """DeepSeek-V3, eq. 17 to 20, row by row: balanced rows of one expert each are not balanced inside."""
    logits = np.random.default_rng(0).normal(size=(3, 10, 4)).astype(np.float32)
    mask = np.ones((3, 10), bool)
    mask[1, 4:] = False
    mask[2, :3] = False
    flat, keep = logits.reshape(30, 4), mask.reshape(30)
    ids = jnp.where(keep[:, None], jnp.asarray(top_k_ids(flat, 2), jnp.int32), 4)
    ours = router_statistics(jnp.asarray(flat), ids, jnp.asarray(keep), (), num_groups=3).aux_loss
    expected = np.average([loss_of(row, m) for row, m in zip(logits, mask, strict=True)], weights=mask.sum(axis=1))
    assert float(ours) == pytest.approx(expected, rel=EXACT)


# ---- capacity ----


def fits(logits, mask, *, factor: float, policy: str = "probs", top_k: int = 1):
    logits = np.asarray(logits, np.float32)
    ids = np.where(np.asarray(mask)[:, None], top_k_ids(logits, top_k), logits.shape[1]).astype(np.int32)
    token = jnp.arange(len(logits), dtype=jnp.int32)
    kept = within_capacity(
        jnp.asarray(logits), jnp.asarray(ids), jnp.asarray(mask), token, (), factor=factor, policy=policy
    )
    return np.asarray(kept)


def test_padding_uses_no_capacity() -> None:
    """C59: 8 left pads, then 8 real tokens, even over two experts, factor 1."""
    logits = [[5.0, 0.0]] * 8 + [[5.0, 0.0], [0.0, 5.0]] * 4
    kept = fits(logits, [False] * 8 + [True] * 8, factor=1.0)
    np.testing.assert_array_equal(kept[:, 0], [False] * 8 + [True] * 8)


@pytest.mark.parametrize("offset", [0.0, -100.0], ids=["positive", "all negative"])
def test_the_least_probable_tokens_of_an_overfull_expert_are_dropped(offset: float) -> None:
    """C59: six tokens want expert 0, which has room for four."""
    margins = [3.0, 1.0, 2.0, 6.0, 5.0, 4.0, -1.0, -2.0]
    logits = [[margin + offset, offset] for margin in margins]
    everyone = [True] * 8
    kept = fits(logits, everyone, factor=1.0)[:, 0]
    np.testing.assert_array_equal(kept, [True, False, False, True, True, True, True, True])
    by_position = fits(logits, everyone, factor=1.0, policy="position")[:, 0]
    np.testing.assert_array_equal(by_position, [True, True, True, True, False, False, True, True])
    assert np.all(fits(logits, everyone, factor=2.0))
    assert np.sum(fits(logits, everyone, factor=0.25)) == 2  # one each


def test_equal_probabilities_are_kept_by_position() -> None:
    np.testing.assert_array_equal(fits(np.zeros((4, 2)), [True] * 4, factor=1.0)[:, 0], [True, True, False, False])


def test_a_dropped_token_passes_through_and_a_large_capacity_drops_nothing() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 5, HIDDEN)).astype(np.float32)
    x[:, :, 3] += 4  # expert 3 overflows

    def run(**settings):
        start("EP4xFSDP2")
        layer = make_layer(8, 2, True, MoEConfig(moe_load_balancing="none", **settings))
        run = jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=True))
        y, statistics, ids = run(layer, put_batch(x), put_batch(np.ones((8, 5), bool)))
        return np.asarray(y), statistics, np.asarray(ids)

    plain, _, _ = run()
    large, statistics, _ = run(moe_expert_capacity_factor=8.0)
    np.testing.assert_array_equal(large, plain)
    assert int(statistics.dropped) == 0
    small, statistics, ids = run(moe_expert_capacity_factor=0.5)
    assert (
        int(statistics.dropped)
        == np.sum(ids == 8)
        == 80 - 8 * 5 + np.sum(np.maximum(5 - np.asarray(statistics.counts), 0))
    )
    nowhere = np.all(ids == 8, axis=-1)
    assert np.any(nowhere)
    assert not np.any(small[nowhere])


# ---- noise ----


def test_noise_is_a_tokens_own_and_only_in_training() -> None:
    """C62: another one per token, step and layer; the same for any cut of the batch; none in evaluation."""
    start("EP2")
    moe = MoEConfig(moe_load_balancing="none", moe_input_jitter_eps=0.1)
    model = model_of(initial_values(), MODEL, moe)
    clean = model_of(initial_values(), MODEL, MoEConfig(moe_load_balancing="none"))
    tokens = put_batch(np.full((ROWS, LENGTH), 7, np.int32))  # one token everywhere: only noise tells them apart

    @partial(jax.jit, static_argnames="train")
    def run(model, key, first, train, tokens=tokens, segments=None):
        positions = jnp.zeros_like(tokens)
        return model(tokens, segments, positions, train=train, key=key, first_row=first)

    evaluated = [run(m, jax.random.key(0), 0, train=False).logits for m in (model, clean)]
    np.testing.assert_array_equal(*evaluated)
    figures = [
        np.asarray(run(model, jax.random.key(step), first, train=True).router.mean_logit).tolist()
        for step, first in ((0, 0), (0, 0), (1, 0), (0, 8))
    ]
    assert figures[0] == figures[1]  # drawn from the key, not from a state
    assert len({tuple(each) for each in figures}) == 3
    # The batch of the rows 8 to 15 is the second half of one of 16 rows, and padding behind moves nothing.
    both = run(model, jax.random.key(0), 0, train=True, tokens=put_batch(np.full((2 * ROWS, LENGTH + 3), 7, np.int32)),
               segments=put_batch(np.pad(np.ones((2 * ROWS, LENGTH), np.int32), ((0, 0), (0, 3)))))  # fmt: skip
    np.testing.assert_allclose(both.router.mean_logit, (np.array(figures[0]) + figures[3]) / 2, rtol=1e-5)
    with pytest.raises(moe_jax.ConfigError, match="key is None, but training with moe_input_jitter_eps"):
        model(tokens, train=True)


def test_noise_has_the_stated_range() -> None:
    from moe_jax.moe.router import jitter

    place = jnp.stack([jnp.arange(64) // 8, jnp.arange(64) % 8], axis=1)
    noise = np.asarray(jitter(jnp.ones((64, 32)), place, jax.random.key(0), 0.25))
    assert 0.75 <= noise.min() < 0.76
    assert 1.24 < noise.max() <= 1.25
    assert abs(noise.mean() - 1) < 0.02
    assert len(np.unique(noise)) > 0.99 * noise.size


# ---- the shuffle ----


@pytest.mark.parametrize("num_tokens", [8, 7, 1])
def test_shuffle_is_a_permutation_within_an_expert_group_and_is_undone(num_tokens: int) -> None:
    start("EP4xFSDP2")
    number = np.arange(8 * num_tokens, dtype=np.float32).reshape(8 * num_tokens, 1) + 1

    def there_and_back(x):
        order = make_shuffle(jax.random.key(1), num_tokens, x)
        moved = shuffle(order, x)
        return moved, unshuffle(order, moved), unshuffle(order, shuffle(order, x.astype(jnp.int32)))

    spec = P(BATCH)
    moved, back, integers = jax.jit(jax.shard_map(there_and_back, in_specs=spec, out_specs=spec))(put_batch(number))
    np.testing.assert_array_equal(back, number)
    np.testing.assert_array_equal(integers, number)
    groups = np.asarray(moved).reshape(2, -1)  # fsdp ranks are groups of four expert ranks
    for group, wanted in zip(groups, number.reshape(2, -1), strict=True):
        np.testing.assert_array_equal(np.sort(group[group > 0]), wanted)
    if num_tokens == 8:
        own = np.arange(4).repeat(8)
        assert np.any((groups[0].astype(int) - 1) // 8 != own)  # tokens left their ranks


# ---- the expert bias ----


@pytest.mark.parametrize(("update", "expected"), [("sign", [-1, 1, 0, 0]), ("proportional", [-0.75, 0.75, 0, 0])])
def test_bias_moves_against_the_load_error(update: str, expected: list[float]) -> None:
    """Counts 7, 1, 4, 4: the mean is 4. A layer without tokens keeps its bias."""
    start("1 device")
    config = dataclasses.replace(MODEL, num_experts=4)
    moe = MoEConfig(moe_load_balancing="expert_bias", expert_bias_update=update, expert_bias_update_rate=0.01)
    model = jax.jit(lambda: moe_jax.CausalLM(config, moe, dtype=jnp.float32))()
    moved = jax.jit(moe_jax.update_expert_bias)(model, jnp.asarray([[7, 1, 4, 4], [0, 0, 0, 0]]))
    values = values_of(moved)
    np.testing.assert_allclose(values["runs.0.0.mlp.expert_bias"], [0.01 * np.array(expected)], atol=1e-8)
    assert not np.any(values["runs.2.0.mlp.expert_bias"])
    for bound, wanted in zip(bias_range(moved), (min(expected), max(expected)), strict=True):
        np.testing.assert_allclose(bound, [0.01 * wanted, 0], atol=1e-8)
    for name, value in values_of(model).items():
        if not name.endswith("expert_bias"):
            np.testing.assert_array_equal(values[name], value)


def test_bias_chooses_by_probability_plus_bias_and_weighs_by_the_familys_rule() -> None:
    logits = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    bias = np.linspace(0.3, -0.3, 8).astype(np.float32)
    start("EP2")
    layer = make_layer(8, 2, True, MoEConfig(moe_load_balancing="expert_bias"))
    layer.expert_bias[...] = jnp.asarray(bias)
    x = np.zeros((8, 5, HIDDEN), np.float32)
    x[:, :, :8] = logits.reshape(8, 5, 8)

    mask = put_batch(np.ones((8, 5), bool))

    def loss(layer, x, train):
        y, _, ids = layer(x, mask, jnp.float32, train=train)
        return jnp.sum(y**2), ids

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    (_, ids), d_layer = grad(layer, put_batch(x), True)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(ids).reshape(40, 2), top_k_ids(probs + bias, 2))
    assert not np.any(d_layer.expert_bias[...])
    (_, evaluated), _ = grad(layer, put_batch(x), False)
    np.testing.assert_array_equal(np.asarray(evaluated).reshape(40, 2), top_k_ids(logits, 2))


def test_updating_a_bias_that_is_not_there_is_refused() -> None:
    start("1 device")
    model = model_of(initial_values(), MODEL, MoEConfig(moe_load_balancing="none"))
    with pytest.raises(moe_jax.ConfigError, match="must be 'expert_bias'"):
        moe_jax.update_expert_bias(model, jnp.zeros((2, 8), jnp.int32))


# ---- what does not depend on the mode ----


def test_forced_routing_is_uniform_whatever_the_router_says() -> None:
    start("EP4xFSDP2")
    layer = make_layer(8, 3, True, MoEConfig(moe_load_balancing="none", benchmark_only_uniform_routing=True))
    x = np.random.default_rng(0).normal(size=(8, 5, HIDDEN)).astype(np.float32)
    mask = put_batch(np.ones((8, 5), bool))
    _, statistics, ids = jax.jit(lambda layer, x, m: layer(x, m, jnp.float32, train=True))(layer, put_batch(x), mask)
    np.testing.assert_array_equal(statistics.counts, [15] * 8)
    expected = (np.arange(40)[:, None] * 3 + np.arange(3)[None]) % 8
    np.testing.assert_array_equal(np.asarray(ids).reshape(40, 3), expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_evaluation_is_the_models_own_routing(name: str) -> None:
    """Bit for bit that of the mode "none", whatever training does, and it changes nothing in the model."""
    mode, settings = settings_of(name)
    start("EP2")
    tokens = put_batch(batches()[0]["tokens"])
    values = initial_values()
    biased = {f"runs.{run}.0.mlp.expert_bias": np.ones((1, 8), np.float32) * np.arange(8) for run in (0, 2)}
    model = model_of(values | biased, MODEL, MoEConfig(moe_load_balancing=mode, **dict(settings)))
    plain = model_of(values, MODEL, MoEConfig(moe_load_balancing="none"))
    run = jax.jit(lambda m, t: m(t))
    output, expected = run(model, tokens), run(plain, tokens)
    np.testing.assert_array_equal(output.logits, expected.logits)
    np.testing.assert_array_equal(output.router.counts, expected.router.counts)
    assert not np.any(output.router.dropped)


@pytest.mark.parametrize("mode", ["sinkhorn", "balanced", "none"])
def test_permuted_tokens_are_routed_alike(mode: str) -> None:
    rng = np.random.default_rng(0)
    x = np.zeros((8, 5, HIDDEN), np.float32)
    x[:, :, :8] = rng.normal(size=(8, 5, 8)) + np.linspace(1, -1, 8)
    order = rng.permutation(40)
    start("EP2xFSDP2")
    layer, mask = make_layer(8, 2, True, MoEConfig(moe_load_balancing=mode)), put_batch(np.ones((8, 5), bool))
    run = jax.jit(lambda layer, x: layer(x, mask, jnp.float32, train=True)[2])
    ids = np.asarray(run(layer, put_batch(x))).reshape(40, 2)
    permuted = x.reshape(40, -1)[order].reshape(x.shape)
    np.testing.assert_array_equal(np.asarray(run(layer, put_batch(permuted))).reshape(40, 2), ids[order])


def test_router_product_in_the_compute_dtype_rounds_as_transformers_does() -> None:
    from moe_jax.moe.router import router_logits

    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(16, 32)), jnp.bfloat16), jnp.asarray(rng.normal(size=(32, 8)), jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    narrow = np.asarray(router_logits(x, w, jnp.bfloat16))
    assert np.array_equal(narrow, np.asarray(jnp.asarray(narrow, jnp.bfloat16), np.float32))
    assert relative_norm(router_logits(x, w), exact) < EXACT
    assert 1e-4 < relative_norm(narrow, exact) < 1e-2
    start("EP2")
    outputs = []
    for dtype in ("float32", "compute"):
        model = model_of(initial_values(), MODEL, MoEConfig(moe_load_balancing="none", moe_router_dtype=dtype))
        model.dtype = jnp.dtype(jnp.bfloat16)
        tokens = put_batch(batches()[0]["tokens"])
        outputs.append(np.asarray(jax.jit(lambda m, t: m(t).router.mean_logit)(model, tokens)))
    assert np.any(outputs[0] != outputs[1])


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([1, 6, 24]),
    experts=st.sampled_from([1, 5, 8]),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
    factor=st.sampled_from([0.1, 1.0, 1.2, 3.0]),
    policy=st.sampled_from(["probs", "position"]),
    data=st.data(),
)
def test_any_routing_has_finite_statistics_and_a_kept_capacity(tokens, experts, scale, factor, policy, data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    top_k = data.draw(st.integers(1, experts))
    logits = (scale * rng.normal(size=(tokens, experts))).astype(np.float32)
    mask = rng.random(tokens) < data.draw(st.sampled_from([0.0, 0.6, 1.0]))
    kept = fits(logits, mask, factor=factor, policy=policy, top_k=top_k)
    ids = np.where(mask[:, None], top_k_ids(logits, top_k), experts)
    quota = math.ceil(Fraction(str(factor)) * int(np.sum(mask)) * top_k / experts)
    wanted = np.bincount(ids.ravel(), minlength=experts + 1)[:experts]
    used = np.bincount(ids[kept], minlength=experts + 1)[:experts]
    np.testing.assert_array_equal(used, np.minimum(wanted, quota))
    statistics = router_statistics(jnp.asarray(logits), jnp.asarray(ids, jnp.int32), jnp.asarray(mask), ())
    np.testing.assert_array_equal(statistics.counts, wanted)
    assert all(np.all(np.isfinite(value)) for value in vars(statistics).values())


def test_scanned_layers_route_as_layers_run_one_by_one() -> None:
    """Two equal layers, stacked and scanned, against their blocks called in turn: ids, statistics, noise."""
    start("EP2xFSDP2")
    moe = MoEConfig(moe_load_balancing="balanced", moe_input_jitter_eps=0.1)
    model = moe_jax.transform(CONFIG | {"num_hidden_layers": 2, "mlp_only_layers": []}, moe)
    tokens, key = put_batch(batches()[0]["tokens"]), jax.random.key(0)

    def one_by_one(model, tokens):
        tokens, inputs = model._prepare(tokens, None, None)
        x, outputs = model.embed(tokens, model.dtype), []
        for layer in range(2):
            block = jax.tree.map(lambda a, layer=layer: a[layer], model.runs[0][0])
            layer_key = jax.random.fold_in(key, layer)
            x, output = block(x, inputs, model.dtype, train=True, key=layer_key)
            outputs.append(output)
        return jax.tree.map(lambda *a: jnp.stack(a), *outputs)

    statistics, ids = jax.jit(one_by_one)(model, tokens)
    scanned = jax.jit(lambda m, t: m(t, train=True, key=key, return_routing=True))(model, tokens)
    np.testing.assert_array_equal(scanned.routing_ids, ids)
    for name, value in vars(statistics).items():
        np.testing.assert_allclose(getattr(scanned.router, name), value, rtol=EXACT, err_msg=name)
