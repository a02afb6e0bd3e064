"""One training step over micro-batches, and an evaluation.

A micro-batches, B rows of one, S positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from moe_jax import mesh
from moe_jax.checkpoint import TrainState
from moe_jax.data import Batch
from moe_jax.losses import IGNORE, Losses, next_labels, next_token_loss, training_loss
from moe_jax.metrics import StepMetrics
from moe_jax.sharding import BATCH, P

TrainStep = Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, StepMetrics]]


def make_train_step(optimizer: optax.GradientTransformation, schedule: optax.Schedule) -> TrainStep:
    """Returns the jitted (state, batches) -> (state, metrics); the state is donated.

    batches: tokens and segment_ids, [A, B, S], from `put_batch`. The A micro-batches run one after the other and make
    one update, that of the mean over all their counted labels.
    """

    def train_step(state: TrainState, batches: dict[str, jax.Array]) -> tuple[TrainState, StepMetrics]:
        loss, parts, grads = accumulated_gradients(state.model, batches)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.model)
        model = optax.apply_updates(state.model, updates)
        metrics = StepMetrics(
            loss=loss, ce=parts.ce, aux=parts.aux, z=parts.z, grad_norm=optax.tree.norm(grads),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32), num_labels=parts.count,
            counts=parts.router.counts, dropped=parts.router.dropped, entropy=parts.router.entropy,
        )  # fmt: skip
        return TrainState(model, opt_state, state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0)


def accumulated_gradients(model: Any, batches: dict[str, jax.Array]) -> tuple[jax.Array, Losses, Any]:
    """Returns (loss, parts, gradients) of all micro-batches, each weighted by its share of the counted labels.

    The cross entropy is so the mean over all labels, as in one large batch; a micro-batch without labels has no part
    in it. Without any label at all the micro-batches weigh the same, which leaves the router losses. Token counts are
    summed.
    """

    def weighted(batch: dict[str, jax.Array], weight: jax.Array) -> tuple[jax.Array, Losses, Any]:
        (loss, parts), grads = jax.value_and_grad(training_loss, has_aux=True)(model, batch, None)
        return jax.tree.map(lambda x: x * weight if jnp.issubdtype(x.dtype, jnp.floating) else x, (loss, parts, grads))

    num_micro_batches = batches["tokens"].shape[0]
    if num_micro_batches == 1:
        return weighted({name: array[0] for name, array in batches.items()}, jnp.float32(1))
    labels_ABS = jax.vmap(next_labels)(batches["tokens"], batches["segment_ids"])
    counts_A = jnp.sum(labels_ABS != IGNORE, axis=(1, 2))
    total = jnp.sum(counts_A)
    weights_A = jnp.where(total > 0, counts_A / jnp.maximum(total, 1), 1 / num_micro_batches).astype(jnp.float32)

    def body(grads: Any, micro: Any) -> tuple[Any, Any]:
        *figures, more = weighted(*micro)
        return jax.tree.map(jnp.add, grads, more), figures

    grads, figures = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, model), (batches, weights_A))
    loss, parts = jax.tree.map(lambda x: jnp.sum(x, axis=0), figures)
    return loss, parts, grads


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
