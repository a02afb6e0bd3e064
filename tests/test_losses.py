"""next_token_loss against a per-token loop in numpy; training_loss on a stand-in model with known parts."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from moe_jax import mesh
from moe_jax.config import MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.losses import IGNORE, next_labels, next_token_loss, training_loss
from moe_jax.sharding import BATCH, P

TOLERANCE = 2e-6  # float32 sums of some hundred terms
VOCAB = 11


def slow_loss(logits: Any, tokens: Any, segments: Any = None, labels: Any = None) -> tuple[float, int]:
    logits, labels = np.asarray(logits, np.float64), np.asarray(tokens if labels is None else labels)
    total, count = 0.0, 0
    for b in range(labels.shape[0]):
        for s in range(labels.shape[1] - 1):
            if segments is not None and (segments[b][s] != segments[b][s + 1] or segments[b][s + 1] == 0):
                continue
            if labels[b, s + 1] == -100:
                continue
            row = logits[b, s]
            total += np.log(np.exp(row).sum()) - row[labels[b, s + 1]]
            count += 1
    return total / max(count, 1), count


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 6, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (8, 6)).astype(np.int32)
    segments = np.sort(rng.integers(1, 4, (8, 6)), axis=1).astype(np.int32)
    segments[::3, 4:] = 0
    segments[1] = 0
    labels = np.where(rng.random((8, 6)) < 0.3, -100, tokens).astype(np.int32)
    return logits, tokens, segments, labels


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("with_labels", [False, True])
def test_loss_and_count_equal_the_loop(batch: Any, with_segments: bool, with_labels: bool) -> None:
    logits, tokens, segments, labels = batch
    segments, labels = segments if with_segments else None, labels if with_labels else None
    loss, count = next_token_loss(*map(_array, (logits, tokens, segments, labels)))
    expected, expected_count = slow_loss(logits, tokens, segments, labels)
    assert int(count) == expected_count == int(jnp.sum(next_labels(*map(_array, (tokens, segments, labels))) != IGNORE))
    np.testing.assert_allclose(loss, expected, rtol=TOLERANCE)


def _array(x: Any) -> Any:
    return None if x is None else jnp.asarray(x)


@pytest.mark.parametrize("degrees", [{}, {"expert_parallel_degree": 4, "hybrid_shard_degree": 1}])
def test_sharded_batch_gives_the_global_mean_and_a_sharded_gradient(batch: Any, degrees: dict[str, int]) -> None:
    logits, tokens, segments, _ = batch
    state = mesh.init(degrees)
    put = [jax.device_put(x, NamedSharding(state.mesh, P(BATCH))) for x in (logits, tokens, segments)]
    (loss, count), gradient = jax.jit(jax.value_and_grad(next_token_loss, has_aux=True))(*put)
    expected, expected_count = slow_loss(logits, tokens, segments)
    np.testing.assert_allclose(loss, expected, rtol=TOLERANCE)
    assert int(count) == expected_count
    assert gradient.sharding.spec == P(BATCH, None, None)
    alone = jax.grad(lambda x: next_token_loss(x, _array(tokens), _array(segments))[0])(_array(logits))
    np.testing.assert_allclose(gradient, alone, atol=TOLERANCE)


def test_first_token_of_a_document_and_padding_are_not_labels() -> None:
    tokens = jnp.array([[5, 6, 2, 7, 8, 2, 2, 2]])
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    assert next_labels(tokens, segments).tolist() == [[6, 2, -100, 8, 2, -100, -100, -100]]


def test_end_of_text_id_stays_a_label_when_it_is_the_padding_id_too() -> None:  # C87
    tokens, segments = jnp.array([[5, 6, 2, 2, 2]]), jnp.array([[1, 1, 1, 0, 0]])
    assert next_labels(tokens, segments).tolist() == [[6, 2, -100, -100, -100]]


@pytest.mark.parametrize(("segments", "labels"), [([[0, 0, 0, 0]], None), (None, [[-100, -100, -100, -100]])])
def test_no_label_at_all_gives_zero_loss_and_zero_gradient(segments: Any, labels: Any) -> None:  # C86
    logits, tokens = jnp.full((1, 4, 3), 1e4), jnp.zeros((1, 4), jnp.int32)
    segments, labels = (_array(None if x is None else np.array(x, np.int32)) for x in (segments, labels))
    (loss, count), gradient = jax.value_and_grad(next_token_loss, has_aux=True)(logits, tokens, segments, labels)
    assert float(loss) == 0
    assert int(count) == 0
    assert not np.any(np.asarray(gradient))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = jnp.zeros((1, 3, 5), jnp.bfloat16)
    loss, _ = next_token_loss(logits, jnp.zeros((1, 3), jnp.int32))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(5), rtol=TOLERANCE)


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """Logits that do not depend on anything; aux 3 and z 5."""

    moe: MoEConfig

    def __call__(self, tokens: jax.Array, segment_ids: Any, positions: Any, *, train: bool, key: Any,
                 first_row: int) -> Any:  # fmt: skip
        assert train
        assert first_row == 0
        if positions is not None:
            raise LookupError(positions.tolist())
        zeros = jnp.zeros((*tokens.shape, VOCAB))
        return SimpleNamespace(logits=zeros, aux_loss=jnp.array(3.0), z_loss=jnp.array(5.0), router="statistics")


@pytest.mark.parametrize(("mode", "weight_of_aux"), [("aux_loss", 0.01), ("sinkhorn", 0.0), ("none", 0.0),
                                                    ("expert_bias", 0.0), ("balanced", 0.0)])  # fmt: skip
def test_training_loss_adds_aux_under_aux_loss_only_and_reports_the_parts_unweighted(
    mode: Any, weight_of_aux: float
) -> None:
    moe = MoEConfig(moe_load_balancing=mode, moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.1)
    batch = {"tokens": jnp.zeros((2, 4), jnp.int32), "segment_ids": jnp.ones((2, 4), jnp.int32)}
    loss, parts = training_loss(FakeModel(moe), batch, None)
    np.testing.assert_allclose(loss, np.log(VOCAB) + weight_of_aux * 3 + 0.1 * 5, rtol=TOLERANCE)
    np.testing.assert_allclose([parts.ce, parts.aux, parts.z], [np.log(VOCAB), 3, 5], rtol=TOLERANCE)
    assert int(parts.count) == 6
    assert parts.router == "statistics"


def test_positions_reach_the_model_and_unknown_batch_keys_are_refused() -> None:
    tokens = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(LookupError, match=r"\[\[4, 5, 6\]\]"):
        training_loss(FakeModel(MoEConfig()), {"tokens": tokens, "positions": jnp.array([[4, 5, 6]])}, None)
    with pytest.raises(ConfigError, match=r"'attention_mask'.*known keys: labels, positions, segment_ids, tokens"):
        training_loss(FakeModel(MoEConfig()), {"tokens": tokens, "attention_mask": tokens}, None)
