"""Train Hugging Face Mixture-of-Experts language models with expert parallelism and FSDP, and hand them back."""

import importlib
from typing import TYPE_CHECKING, Any

from moe_jax.config import MoEConfig, ParallelConfig
from moe_jax.errors import ConfigError
from moe_jax.mesh import init, is_initialized, state

if TYPE_CHECKING:
    from moe_jax.expert_bias import update_expert_bias
    from moe_jax.hf import save_pretrained, transform
    from moe_jax.losses import next_token_loss, training_loss
    from moe_jax.model import CausalLM, ModelOutput

# Imported when first used: `converters` imports `moe_jax.config`, and `moe_jax.hf` imports `converters`.
_LAZY = {
    "transform": "moe_jax.hf",
    "save_pretrained": "moe_jax.hf",
    "CausalLM": "moe_jax.model",
    "ModelOutput": "moe_jax.model",
    "next_token_loss": "moe_jax.losses",
    "training_loss": "moe_jax.losses",
    "update_expert_bias": "moe_jax.expert_bias",
}

__all__ = [
    "CausalLM",
    "ConfigError",
    "MoEConfig",
    "ModelOutput",
    "ParallelConfig",
    "init",
    "is_initialized",
    "next_token_loss",
    "save_pretrained",
    "state",
    "training_loss",
    "transform",
    "update_expert_bias",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moe_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
