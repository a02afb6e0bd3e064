"""Next-token cross entropy, and the whole training loss with its parts reported apart.

B rows, S positions, V vocabulary, L MoE layers, E experts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import MoEConfig
from moe_jax.errors import refuse_unknown

# Hugging Face's label for "no loss here".
IGNORE = -100
BATCH_KEYS = ("tokens", "segment_ids", "positions", "labels")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Losses:
    """The unweighted parts of the training loss, float32 scalars, and what the routers did.

    ce: mean cross entropy over the `count` counted labels; aux, z: `ModelOutput.aux_loss` and `z_loss`.
    """

    ce: Any
    aux: Any
    z: Any
    count: Any
    router: Any


def next_labels(
    tokens_BS: Int[Array, "B S"], segment_ids_BS: Int[Array, "B S"] | None = None,
    labels_BS: Int[Array, "B S"] | None = None,
) -> Int[Array, "B S"]:  # fmt: skip
    """Returns, for every position, the id to predict there, or -100.

    A label counts where the next position is a real token (segment not 0) of the same segment as this one, and is not
    -100 in `labels_BS`, which defaults to the tokens and is given unshifted, as in Hugging Face.
    """
    next_BS = _shift(tokens_BS if labels_BS is None else labels_BS, IGNORE)
    if segment_ids_BS is None:
        return next_BS
    same_BS = (segment_ids_BS > 0) & (_shift(segment_ids_BS, 0) == segment_ids_BS)
    return jnp.where(same_BS, next_BS, IGNORE)


def _shift(x_BS: jax.Array, last: int) -> jax.Array:
    """Moves every row one to the left and puts `last` at its end, without a change of layout."""
    end_B1 = jnp.full_like(x_BS[:, :1], last)
    return jnp.concatenate([x_BS[:, 1:], end_B1], axis=1)


def next_token_loss(
    logits_BSV: Float[Array, "B S V"], tokens_BS: Int[Array, "B S"], segment_ids_BS: Int[Array, "B S"] | None = None,
    labels_BS: Int[Array, "B S"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:  # fmt: skip
    """Returns the mean cross entropy of the next token in float32, and the number of labels it is the mean of.

    The mean is over the global batch, whatever its sharding, and 0 (with gradient 0) when no label counts.
    `next_labels` says which do.
    """
    labels_BS = next_labels(tokens_BS, segment_ids_BS, labels_BS)
    counted_BS = labels_BS != IGNORE
    logits_BSV = logits_BSV.astype(jnp.float32)
    # A comparison fused into the sum: a gather's transpose is a scatter, whose layout explicit sharding cannot infer.
    vocabulary_V = jnp.arange(logits_BSV.shape[-1], dtype=labels_BS.dtype)
    hit_BSV = labels_BS[:, :, None] == vocabulary_V[None, None, :]
    label_logits_BS = jnp.sum(jnp.where(hit_BSV, logits_BSV, 0.0), axis=-1)
    nll_BS = jax.nn.logsumexp(logits_BSV, axis=-1) - label_logits_BS
    count = jnp.sum(counted_BS)
    return jnp.sum(jnp.where(counted_BS, nll_BS, 0.0)) / jnp.maximum(count, 1), count


def training_loss(
    model: Any, batch: dict[str, jax.Array], key: jax.Array | None, *, first_row: jax.Array | int = 0
) -> tuple[jax.Array, Losses]:
    """Returns the loss to differentiate and its parts.

    Cross entropy + `moe_z_loss_coeff` * z, and where the config uses it + `moe_aux_loss_coeff` * aux.
    batch: tokens [B, S], and optionally segment_ids, positions and labels of the same shape; other keys are refused.
    key, first_row: as in `CausalLM.__call__`.
    """
    refuse_unknown("the batch", batch, BATCH_KEYS)
    tokens_BS, segment_ids_BS = batch["tokens"], batch.get("segment_ids")
    output = model(tokens_BS, segment_ids_BS, batch.get("positions"), train=True, key=key, first_row=first_row)
    ce, count = next_token_loss(output.logits, tokens_BS, segment_ids_BS, batch.get("labels"))
    return ce + router_loss(model.moe, output.aux_loss, output.z_loss), Losses(
        ce, output.aux_loss, output.z_loss, count, output.router
    )


def router_loss(moe: MoEConfig, aux: jax.Array, z: jax.Array) -> jax.Array:
    """Returns the routers' part of the training loss, weighted by their coefficients."""
    loss = moe.moe_z_loss_coeff * z
    return loss + moe.moe_aux_loss_coeff * aux if moe.uses_aux_loss else loss
