"""Balancing without a loss: each expert's selection bias is moved against its load error after every optimizer step.

R repeats of a layer, L MoE layers, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.errors import ConfigError
from moe_jax.model import layer_slots, named_parameters

NAME = "expert_bias"


def is_expert_bias(name: str) -> bool:
    """Whether a parameter (or a moment of the optimizer for it) is a selection bias."""
    return name.rsplit(".", 1)[-1] == NAME


def update_expert_bias(model: Any, counts_LE: jax.Array) -> Any:
    """Returns the model with the biases of all MoE layers moved by one step (arXiv:2408.15664, section 3.1).

    counts_LE: int [L, E], the pairs of each expert in all micro-batches of the step, `ModelOutput.router.counts`. A bias moves by
    `expert_bias_update_rate` times sign(mean - count), or for the update "proportional" times (mean - count) / mean; a layer
    without tokens keeps its biases. Call it after the optimizer's update. Raises `ConfigError` under another balancing mode.
    """
    moe = model.moe
    if moe.moe_load_balancing != "expert_bias":
        raise ConfigError(
            f"moe_load_balancing is {moe.moe_load_balancing!r}, but must be 'expert_bias' to update a bias"
        )
    counts_LE = counts_LE.astype(jnp.float32)
    mean_L1 = jnp.mean(counts_LE, axis=1, keepdims=True)
    error_LE = (mean_L1 - counts_LE) / jnp.maximum(mean_L1, 1e-9)
    direction_LE = jnp.sign(error_LE) if moe.expert_bias_update == "sign" else error_LE
    steps = dict(zip(_bias_names(model), moe.expert_bias_update_rate * direction_LE, strict=True))

    def moved(name: str, bias_RE: jax.Array) -> jax.Array:
        if not is_expert_bias(name):
            return bias_RE
        return bias_RE + jnp.stack([steps[name, repeat] for repeat in range(bias_RE.shape[0])])

    names = named_parameters(model)
    leaves = [moved(name, leaf) for name, leaf in zip(names, jax.tree.leaves(model), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def bias_range(model: Any) -> tuple[jax.Array, jax.Array]:
    """(smallest, largest) selection bias of every MoE layer, float32 [L]; zeros where the mode has none."""
    if model.moe.moe_load_balancing != "expert_bias":
        zeros = jnp.zeros(model.config.num_moe_layers, jnp.float32)
        return zeros, zeros
    names = named_parameters(model)
    biases = [names[name][...][repeat] for name, repeat in _bias_names(model)]
    return jnp.stack([jnp.min(b) for b in biases]), jnp.stack([jnp.max(b) for b in biases])


def _bias_names(model: Any) -> list[tuple[str, int]]:
    """(name of the stacked parameter, index in it) of every MoE layer's bias, in the order of the layers."""
    slots = zip(layer_slots(model.config), model.config.layers, strict=True)
    return [(f"runs.{slot.run}.{slot.position}.mlp.{NAME}", slot.repeat) for slot, layer in slots if layer.is_moe]
