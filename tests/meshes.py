"""The meshes that tests run on, by name, on a part of the eight simulated devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax.config import ModelConfig
from moe_jax.hf import abstract_model, fill
from moe_jax.model import CausalLM, named_parameters
from moe_jax.sharding import batch_spec

# name -> (expert, fsdp, replica) sizes
MESHES = {
    "1 device": (1, 1, 1),
    "EP2": (2, 1, 1),
    "EP4": (4, 1, 1),
    "EP8": (8, 1, 1),
    "FSDP2": (1, 2, 1),
    "FSDP4": (1, 4, 1),
    "EP2xFSDP2": (2, 2, 1),
    "EP2xFSDP4": (2, 4, 1),
    "EP4xFSDP2": (4, 2, 1),
    "replica2xEP2xFSDP2": (2, 2, 2),
}


def start(name: str, **settings: Any) -> None:
    """Makes the named mesh the current one."""
    expert, fsdp, replica = MESHES[name]
    config = {"expert_parallel_degree": expert, "hybrid_shard_degree": fsdp, **settings}
    moe_jax.init(config, devices=jax.devices()[: expert * fsdp * replica])


def put_batch(array: np.ndarray) -> jax.Array:
    """An array with its rows spread over the current mesh."""
    return jax.device_put(array, jax.NamedSharding(moe_jax.state.mesh, batch_spec(array.ndim)))


def values_of(model: Any) -> dict[str, np.ndarray]:
    """Parameter name -> value on the host."""
    return {name: np.asarray(param[...]) for name, param in named_parameters(model).items()}


def model_of(values: dict[str, np.ndarray], config: ModelConfig, moe: moe_jax.MoEConfig, **options: Any) -> CausalLM:
    """A float32 model with these parameter values on the current mesh, without compiling an initialisation."""
    return fill(abstract_model(config, moe, jnp.float32, None, **options), lambda name, index: values[name][index])
