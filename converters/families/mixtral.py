"""Mixtral."""

from typing import Any

from converters.families.common import (
    FUSED_LAYOUT,
    ExpertLayout,
    Family,
    check_common,
    common_fields,
    equal_layers,
    num_experts,
    window_of,
)
from converters.families.rope import rope_config
from moe_jax.config import LayerConfig, ModelConfig

# transformers 5.24, MixtralConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The model of a parsed config.json."""
    check_common(hf)
    fields = common_fields(hf, DEFAULTS)
    return ModelConfig(
        family="mixtral",
        num_experts=num_experts(hf, 8),
        moe_intermediate_size=fields["intermediate_size"],
        layers=equal_layers(hf, 32, LayerConfig(sliding_window=window_of(hf.get("sliding_window")))),
        rope=rope_config(hf, default_theta=1e6, max_positions=fields["max_position_embeddings"]),
        norm_topk_prob=True,
        **fields,
    )


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    model_config,
    (
        ExpertLayout("block_sparse_moe", ("w1", "w3", "w2")),
        ExpertLayout("mlp", ("w1", "w3", "w2")),
        FUSED_LAYOUT,
    ),
)
