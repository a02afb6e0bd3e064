"""Qwen3-MoE."""

from typing import Any

from converters.families.common import (
    FUSED_LAYOUT,
    QWEN_LAYOUT,
    Family,
    Reader,
    check_common,
    common_fields,
    num_experts,
    window_of,
)
from converters.families.rope import rope_config
from moe_jax.config import LayerConfig, ModelConfig
from moe_jax.errors import require

# transformers 5.24, Qwen3MoeConfig
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def _layers(hf: dict[str, Any], read: Reader) -> tuple[LayerConfig, ...]:
    """Every `decoder_sparse_step`-th layer is MoE unless named dense; a window holds for all layers."""
    step, dense = read.integer("decoder_sparse_step"), hf.get("mlp_only_layers") or []
    require(step >= 1, "decoder_sparse_step", step, "a positive integer")
    require(isinstance(dense, list) and all(isinstance(n, int) for n in dense), "mlp_only_layers", dense,
            "a list of layer numbers")  # fmt: skip
    window = window_of(hf.get("sliding_window", DEFAULTS["sliding_window"])) if read.flag("use_sliding_window") else 0
    return tuple(
        LayerConfig(is_moe=number not in dense and (number + 1) % step == 0, sliding_window=window)
        for number in range(read.integer("num_hidden_layers"))
    )


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The model of a parsed config.json."""
    check_common(hf)
    read = Reader(hf, DEFAULTS)
    fields = common_fields(hf, DEFAULTS)
    return ModelConfig(
        family="qwen3_moe",
        num_experts=num_experts(hf, 128),
        moe_intermediate_size=read.integer("moe_intermediate_size"),
        layers=_layers(hf, read),
        rope=rope_config(hf, default_theta=1e4, max_positions=fields["max_position_embeddings"]),
        norm_topk_prob=read.flag("norm_topk_prob"),
        attention_bias=read.flag("attention_bias"),
        qk_norm="per_head",
        **fields,
    )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", model_config, (QWEN_LAYOUT, FUSED_LAYOUT))
