"""One training step over micro-batches, and an evaluation.

A micro-batches, B rows of one, S positions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from moe_jax import mesh
from moe_jax.checkpoint import TrainState
from moe_jax.config import MoEConfig
from moe_jax.data import Batch
from moe_jax.expert_bias import bias_range, update_expert_bias
from moe_jax.losses import IGNORE, Losses, next_labels, next_token_loss, router_loss, training_loss
from moe_jax.metrics import StepMetrics
from moe_jax.moe.statistics import combine_statistics
from moe_jax.sharding import BATCH, P

NOISE_TAG = 0x6E6F6973  # beyond the number of any layer
TrainStep = Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, StepMetrics]]


def make_train_step(optimizer: optax.GradientTransformation, schedule: optax.Schedule) -> TrainStep:
    """Returns the jitted (state, batches) -> (state, metrics); the state is donated.

    batches: tokens and segment_ids, [A, B, S], from `put_batch`. The A micro-batches run one after the other and make
    one update, that of the mean over all their counted labels.
    """

    def train_step(state: TrainState, batches: dict[str, jax.Array]) -> tuple[TrainState, StepMetrics]:
        moe = state.model.moe
        key = jax.random.fold_in(noise_root(moe), state.step) if moe.draws_random_numbers else None
        loss, parts, grads = accumulated_gradients(state.model, batches, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.model)
        model = optax.apply_updates(state.model, updates)
        router = parts.router
        if moe.moe_load_balancing == "expert_bias":
            model = update_expert_bias(model, router.counts)
        bias_min, bias_max = bias_range(model)
        metrics = StepMetrics(
            loss=loss, ce=parts.ce, aux=parts.aux, z=parts.z, grad_norm=optax.tree.norm(grads),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32), num_labels=parts.count,
            counts=router.counts, dropped=router.dropped, entropy=router.entropy, layer_aux=router.aux_loss,
            layer_z=router.z_loss, mean_logit=router.mean_logit, max_logit=router.max_logit,
            plan_iterations=router.plan_iterations, further_rounds=router.further_rounds, further_blocks=router.further_blocks,
            bias_min=bias_min, bias_max=bias_max,
        )  # fmt: skip
        return TrainState(model, opt_state, state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0)


def noise_root(moe: MoEConfig) -> jax.Array:
    """The key of all router noise and shuffles; not the one of the initial weights, which comes from the same seed."""
    return jax.random.fold_in(jax.random.key(moe.random_seed), NOISE_TAG)


def accumulated_gradients(
    model: Any, batches: dict[str, jax.Array], key: jax.Array | None = None
) -> tuple[jax.Array, Losses, Any]:
    """Returns (loss, parts, gradients) of all micro-batches, as one large batch has them where that is defined.

    A micro-batch's cross entropy weighs as much as its share of the counted labels, its router losses as much as its share
    of the real tokens. So cross entropy, z-loss and the "sequence" loss are those of one large batch; the other balancing losses
    and the plans (sinkhorn, balanced, a capacity) are each micro-batch's own. Token counts are summed.
    """
    num_micro_batches, rows = batches["tokens"].shape[:2]

    def weighted_loss(model: Any, batch: dict[str, jax.Array], index: jax.Array, label_share, token_share):
        parts = training_loss(model, batch, key, first_row=index * rows)[1]
        parts = dataclasses.replace(
            parts, ce=parts.ce * label_share, aux=parts.aux * token_share, z=parts.z * token_share
        )
        return parts.ce + router_loss(model.moe, parts.aux, parts.z), parts

    def gradients_of(*micro: Any) -> tuple[jax.Array, Losses, Any]:
        (loss, parts), grads = jax.value_and_grad(weighted_loss, has_aux=True)(model, *micro)
        return loss, parts, grads

    if num_micro_batches == 1:
        one = jnp.float32(1)
        return gradients_of({name: array[0] for name, array in batches.items()}, jnp.int32(0), one, one)
    labels_ABS = jax.vmap(next_labels)(batches["tokens"], batches["segment_ids"])
    label_shares_A = _shares(jnp.sum(labels_ABS != IGNORE, axis=(1, 2)))
    token_shares_A = _shares(jnp.sum(batches["segment_ids"] != 0, axis=(1, 2)))
    indices_A = jnp.arange(num_micro_batches, dtype=jnp.int32)

    def body(grads: Any, micro: Any) -> tuple[Any, Any]:
        *figures, more = gradients_of(*micro)
        return jax.tree.map(jnp.add, grads, more), figures

    micros = (batches, indices_A, label_shares_A, token_shares_A)
    grads, (loss_A, parts) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, model), micros)
    total = Losses(
        *(jnp.sum(x, axis=0) for x in (parts.ce, parts.aux, parts.z, parts.count)),
        router=combine_statistics(parts.router, token_shares_A),
    )
    return jnp.sum(loss_A), total, grads


def _shares(counts_A: jax.Array) -> jax.Array:
    """Each one's part of the sum, float32; equal parts of nothing."""
    total = jnp.sum(counts_A)
    return jnp.where(total > 0, counts_A / jnp.maximum(total, 1), 1 / counts_A.shape[0]).astype(jnp.float32)


@jax.jit
def eval_step(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns (mean loss, number of labels) of one batch under the model's own routing."""
    output = model(batch["tokens"], batch["segment_ids"], train=False)
    return next_token_loss(output.logits, batch["tokens"], batch["segment_ids"])


def evaluate(model: Any, batches: Sequence[Batch], stop: Callable[[], bool] = lambda: False) -> float | None:
    """Returns the mean loss over all labels of `batches`; None when `stop` says so before the end."""
    results = []
    for batch in batches:
        if stop():
            return None
        results.append(eval_step(model, {name: array[0] for name, array in put_batch(batch, 1).items()}))
    losses, counts = np.array(jax.device_get(results), np.float64).T
    return float(np.sum(losses * counts) / max(np.sum(counts), 1))


def put_batch(batch: Batch, accumulation_steps: int) -> dict[str, jax.Array]:
    """Returns host arrays [A * B, S] as [A, B, S] with B cut over the whole mesh; a process copies its own rows."""
    sharding = NamedSharding(mesh.state.mesh, P(None, BATCH, None))

    def put(array: np.ndarray) -> jax.Array:
        micro = array.reshape(accumulation_steps, -1, array.shape[-1])
        return jax.make_array_from_callback(micro.shape, sharding, lambda index: micro[index])

    return {name: put(array) for name, array in batch.items()}


def num_compilations(step: Any) -> int:
    """How many programs a jitted function has compiled. JAX has no public way to ask; its own tests use this one."""
    return step._cache_size()
