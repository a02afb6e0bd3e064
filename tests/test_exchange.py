"""One contract for every exchange: who receives what, and that giving back is the transpose of sending."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import MESHES, put_batch, start

from moe_jax.config import MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.moe import exchange, routed
from moe_jax.moe.exchange import (
    choose_exchange,
    exchange_shape,
    give_back,
    local_expert_ids,
    make_plan,
    send,
)
from moe_jax.moe.experts import cut_block, sort_pairs
from moe_jax.sharding import BATCH, P

TRANSPOSE = 1e-5  # float32 inner products of some hundred terms


@pytest.fixture(autouse=True)
def _no_room_for_fluctuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the few tokens of a test overflow the buffers."""
    monkeypatch.setattr(exchange, "FLUCTUATION", 0.0)


def run_exchange(kind: str, mesh: str, ids: np.ndarray, num_experts: int, factor: float):
    """(shape, [token numbers, local ids] of every round [D, M, ...], <send x, y>, <x, back y>, further rounds)."""
    num_ranks, devices = MESHES[mesh][0], math.prod(MESHES[mesh])
    num_tokens, top_k = ids.shape[0] // devices, ids.shape[1]
    start(mesh)
    shape = exchange_shape(
        kind, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks, buffer_factor=factor
    )
    rng = np.random.default_rng(0)
    rounds = range(1 + shape.max_further_rounds)
    x = rng.normal(size=(ids.shape[0], 3)).astype(np.float32)
    ys = [rng.normal(size=(devices * shape.num_rows(r), 3)).astype(np.float32) for r in rounds]
    number = np.arange(ids.shape[0], dtype=np.int32)[:, None]

    def local(ids, x, ys, number):
        plan = make_plan(shape, ids)
        got, back, there = [], 0, 0
        for r in rounds:
            names = send(shape, plan, r, number + 1)[:, 0]
            got.append((names, local_expert_ids(shape, send(shape, plan, r, ids, fill=num_experts))))
            there = there + jnp.sum(send(shape, plan, r, x) * ys[r])
            back = back + give_back(shape, plan, r, ys[r])
        return got, there[None], jnp.sum(back * x)[None], plan.further_rounds

    spec = P(BATCH)
    run = jax.jit(jax.shard_map(local, in_specs=spec, out_specs=(spec, spec, spec, P())))
    got, there, back, further = run(*jax.tree.map(put_batch, (ids, x, ys, number)))
    by_device = [tuple(np.asarray(a).reshape(devices, -1, *a.shape[1:]) for a in pair) for pair in got]
    return shape, by_device, np.asarray(there), np.asarray(back), int(further)


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("local", "FSDP2"),
        ("all_gather", "EP4xFSDP2"),
        ("all_to_all", "EP4xFSDP2"),
        ("all_to_all", "EP8"),
        ("ragged", "EP4xFSDP2"),
    ],
)
@pytest.mark.parametrize("pattern", ["random", "one expert", "padding", "nothing"])
def test_every_pair_arrives_once_and_giving_back_is_the_transpose(kind, mesh, factor, pattern) -> None:
    num_experts, top_k, devices = 8, 3, math.prod(MESHES[mesh])
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(7 * devices)]).astype(np.int32)
    if pattern == "one expert":
        ids[:] = [5, 0, 1]
    if pattern == "padding":
        ids[rng.random(len(ids)) < 0.5] = num_experts
    if pattern == "nothing":
        ids[:] = num_experts
    shape, by_device, there, back, further = run_exchange(kind, mesh, ids, num_experts, factor)
    ranks, num_local = shape.num_ranks, shape.num_local_experts
    assert np.sum(there) == pytest.approx(np.sum(back), rel=TRANSPOSE, abs=TRANSPOSE)
    arrived: list[tuple[int, int]] = []
    for device in range(devices):
        for round_index, (names, local_ids) in enumerate(by_device):
            name, mine = names[device], local_ids[device]
            row, slot = np.nonzero(mine < num_local)
            arrived += zip(
                (name[row] - 1).tolist(), (mine[row, slot] + device % ranks * num_local).tolist(), strict=True
            )
            sent_here = np.unique(name[name > 0])
            assert len(sent_here) == np.count_nonzero(name)  # a token once, however many of its experts live here
            assert not len(sent_here) or round_index <= further
    token, slot = np.nonzero(ids < num_experts)
    assert sorted(arrived) == sorted(zip(token.tolist(), ids[token, slot].tolist(), strict=True))
    assert further <= shape.max_further_rounds
    if pattern == "one expert":  # all tokens to two ranks
        assert (further > 0) == (shape.max_further_rounds > 0)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 400), experts_per_rank=st.integers(1, 16), ranks=st.sampled_from([1, 2, 4, 8, 64]),
    factor=st.floats(1, 3), data=st.data(),
)  # fmt: skip
def test_sizes_hold_the_worst_case_in_all_rounds_together(tokens, experts_per_rank, ranks, factor, data) -> None:
    experts = experts_per_rank * ranks
    sizes = {
        "num_tokens": tokens, "top_k": data.draw(st.integers(1, experts)), "num_experts": experts, "num_ranks": ranks,
        "buffer_factor": factor,
    }  # fmt: skip
    for kind in ("all_to_all", "all_gather", "ragged") if ranks > 1 else ("local",):
        shape = exchange_shape(kind, **sizes)
        assert shape.slots_per_rank >= tokens
        assert shape.slots_per_rank - shape.further_rows < tokens or not shape.max_further_rounds
        assert 1 <= shape.further_rows <= shape.first_rows <= tokens
        assert 1 <= shape.further_pairs <= shape.first_pairs <= shape.most_pairs
        if ranks == 1:
            assert not shape.max_further_rounds
            assert shape.first_pairs == shape.most_pairs


def test_the_first_round_holds_a_balanced_routing_and_its_fluctuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 tokens, 2 of 8 experts on 8 ranks: p = 1/4, 256 rows, a deviation of 13.86; five of them more, none of 200 overflows."""
    monkeypatch.setattr(exchange, "FLUCTUATION", 5.0)
    shape = exchange_shape("all_to_all", num_tokens=1024, top_k=2, num_experts=8, num_ranks=8, buffer_factor=1.0)
    assert (shape.first_rows, shape.further_rows) == (326, 82)
    assert shape.first_pairs == 2048 + 227 + 5  # a multiple of 8
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((200, 1024, 8)), axis=2)[:, :, :2]
    rows = np.stack([np.sum(np.any(chosen == rank, axis=2), axis=1) for rank in range(8)])
    assert 300 < rows.max() <= 326


def test_row_numbers_that_do_not_fit_are_refused() -> None:
    sizes = {"num_tokens": 2**25, "top_k": 8, "num_experts": 64, "buffer_factor": 1.25}
    assert exchange_shape("all_to_all", num_ranks=4, **sizes).num_rows(0) > 2**26
    with pytest.raises(ConfigError, match=r"is 2147483648, but must be below 2\^31, or more moe_num_chunks"):
        exchange_shape("all_to_all", num_ranks=8, **sizes)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_no_gradient_adds_rows_by_scattering(exchange: str) -> None:
    """The order of such additions is not fixed on a GPU; integers may be counted that way."""
    from test_moe_layer import HIDDEN, make_layer

    start("EP4xFSDP2")
    layer = make_layer(8, 2, True, MoEConfig(moe_load_balancing="none", moe_exchange=exchange, moe_num_chunks=2))
    x, mask = put_batch(np.zeros((8, 5, HIDDEN), np.float32)), put_batch(np.ones((8, 5), bool))
    grad = jax.grad(lambda layer, x: jnp.sum(layer(x, mask, jnp.float32, train=True)[0]), argnums=(0, 1))
    scatters = re.compile(r"scatter[-_](?:add|mul|min|max)\b")
    assert not scatters.search(str(jax.make_jaxpr(grad)(layer, x)))
    assert scatters.search(str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(x[jnp.arange(2)])))(jnp.zeros(3))))


def test_blocks_cut_the_pairs_in_expert_order() -> None:
    """Rows 0..3 with experts {1}, {0, 1}, none, {1}: pairs in order (1, 0), (0, 1), (1, 1), (3, 1), in blocks of 3."""
    ids = jnp.asarray([[1, 2], [1, 0], [2, 2], [1, 2]], jnp.int32)
    weights = jnp.asarray([[0.1, 9], [0.2, 0.3], [9, 9], [0.4, 9]])
    pairs = sort_pairs(ids, weights, 2)
    assert int(pairs.num_pairs) == 4
    first, second = (cut_block(pairs, place, 3) for place in (0, 3))
    np.testing.assert_array_equal(first.source_A, [1, 0, 1])
    np.testing.assert_allclose(first.weights_A, [0.3, 0.1, 0.2])
    np.testing.assert_array_equal(first.group_sizes_E, [1, 2])
    np.testing.assert_array_equal(first.slots_MK, [[1, 3], [2, 0], [3, 3], [3, 3]])
    np.testing.assert_array_equal(second.source_A, [3, 4, 4])
    np.testing.assert_allclose(second.weights_A, [0.4, 0, 0])
    np.testing.assert_array_equal(second.group_sizes_E, [0, 1])
    np.testing.assert_array_equal(second.slots_MK, [[3, 3], [3, 3], [3, 3], [0, 3]])


def test_auto_takes_the_exchange_that_sends_less_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moe_jax")
    few = {"num_tokens": 1000, "top_k": 2, "num_experts": 8, "num_ranks": 8, "buffer_factor": 1.25}
    assert choose_exchange(**few) == choose_exchange(**few) == "all_to_all"
    assert choose_exchange(**few | {"top_k": 8}) == "all_gather"
    messages = [message for message in caplog.messages if "'auto' takes 'all_to_all'" in message]
    assert len(messages) == 1
    assert "all_to_all sends 31 % of all_gather's rows" in messages[0]


def test_rows_that_hold_no_token_can_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in every empty row of every buffer: no value or gradient changes."""
    from test_moe_layer import check

    poisoned = []

    def poison(rows_MH, source_A, slots_MK):
        poisoned.append(rows_MH.shape)
        return rows_MH.at[source_A].get(mode="fill", fill_value=jnp.nan)

    from moe_jax.moe import experts

    # Where rows enter a buffer; the sums over a token's slots keep their zeros, which are terms of a sum.
    monkeypatch.setattr(experts, "spread_rows", poison)
    monkeypatch.setattr(routed, "send", _poisoned_send)
    check("EP4xFSDP2", "zipf", patterns=("one expert",), moe_buffer_factor=1.0)
    assert poisoned


def _poisoned_send(shape, plan, round_index, values, fill=0):
    if jnp.issubdtype(values.dtype, jnp.floating):
        return send(shape, plan, round_index, values, fill=jnp.nan)
    return send(shape, plan, round_index, values, fill)


@pytest.mark.parametrize(("combine", "largest"), [("float32", 2.0**-8), ("compute", 2.0**-6)])
def test_results_travel_in_float32_unless_asked(combine, largest) -> None:
    """C45: against one device in bf16; partial sums that travel in bf16 are rounded once more."""
    from test_moe_layer import HIDDEN, make_layer

    outputs = []
    for mesh in ("1 device", "EP4"):
        start(mesh)
        layer = make_layer(16, 8, True, MoEConfig(moe_load_balancing="none", moe_combine_dtype=combine))
        x = put_batch(np.random.default_rng(0).normal(size=(8, 5, HIDDEN)).astype(jnp.bfloat16))
        mask = put_batch(np.ones((8, 5), bool))
        y = jax.jit(lambda layer, x, m: layer(x, m, jnp.bfloat16, train=False)[0])(layer, x, mask)
        outputs.append(np.asarray(y.astype(jnp.float32)))
    difference = np.linalg.norm(outputs[0] - outputs[1]) / np.linalg.norm(outputs[0])
    assert difference < largest
    assert (difference > 2.0**-10) == (combine == "compute")


def test_narrow_results_are_added_in_float32_on_the_wire_too() -> None:
    """A bf16 reduce-scatter would add up in bf16; XLA on CPU hides it by widening, so the program is read."""
    from test_moe_layer import HIDDEN, make_layer

    start("EP4")
    moe = MoEConfig(moe_load_balancing="none", moe_exchange="all_gather", moe_combine_dtype="compute")
    layer = make_layer(8, 2, True, moe)
    x, mask = put_batch(np.zeros((8, 5, HIDDEN), jnp.bfloat16)), put_batch(np.ones((8, 5), bool))
    grad = jax.grad(lambda layer, x: jnp.sum(layer(x, mask, jnp.bfloat16, train=True)[0]), argnums=(0, 1))
    program = jax.jit(grad).lower(layer, x).as_text()
    reductions = re.findall(r"stablehlo\.reduce_scatter.*?\) : \(tensor<[^>]*>", program, re.DOTALL)
    assert reductions  # the gradient of the combine weights
    assert not [text for text in reductions if text.endswith("bf16>")]


def test_many_small_rounds_round_the_weights_gradient_once() -> None:
    """bf16, all tokens to one expert, gradients of one sign: adding up in bf16 was off by several per cent."""
    from test_moe_layer import HIDDEN, make_layer

    rng = np.random.default_rng(0)
    x = np.abs(rng.normal(size=(8, 64, HIDDEN))).astype(jnp.bfloat16)
    x[:, :, :8] = np.eye(8)[3] * 9
    mask, gradients = np.ones((8, 64), bool), []
    for mesh, switches in (("1 device", {}), ("EP8", {"moe_num_chunks": 4, "moe_buffer_factor": 1.0})):
        start(mesh)
        layer = make_layer(8, 1, False, MoEConfig(moe_load_balancing="none", **switches))
        grad = jax.jit(
            jax.grad(lambda m, x, mask: jnp.sum(m(x, mask, jnp.bfloat16, train=True)[0].astype(jnp.float32)))
        )
        d_layer = grad(layer, put_batch(x), put_batch(mask))
        gradients.append([np.asarray(p[...], np.float64) for p in (d_layer.gate_up, d_layer.down)])
    for one, many in zip(*gradients, strict=True):
        assert np.any(one)
        # One rounding of the sum to bf16 on the one device, one of each device's sum on the other.
        assert np.linalg.norm(one - many) < 2.0**-8 * np.linalg.norm(one)
