"""OLMoE."""

from typing import Any

from converters.families.common import (
    FUSED_LAYOUT,
    QWEN_LAYOUT,
    Family,
    Reader,
    check_common,
    common_fields,
    equal_layers,
    is_number,
    num_experts,
)
from converters.families.rope import rope_config
from moe_jax.config import LayerConfig, ModelConfig
from moe_jax.errors import require

# transformers 5.24, OlmoeConfig; kv heads default to the heads
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The model of a parsed config.json."""
    check_common(hf)
    read = Reader(hf, DEFAULTS)
    fields = common_fields({"num_key_value_heads": None, **hf}, DEFAULTS)
    width = fields["num_heads"] * fields["head_dim"]
    require(width == fields["hidden_size"], "head_dim", fields["head_dim"],
            "hidden_size / num_attention_heads (the q and k norms of olmoe have that width)")  # fmt: skip
    window = hf.get("sliding_window")
    require(window is None, "sliding_window", window, "null (olmoe has no window)")
    clip = hf.get("clip_qkv")
    require(clip is None or (is_number(clip) and clip > 0), "clip_qkv", clip, "a positive number or null")
    return ModelConfig(
        family="olmoe",
        num_experts=num_experts(hf, 64),
        moe_intermediate_size=fields["intermediate_size"],
        layers=equal_layers(hf, 16, LayerConfig()),
        rope=rope_config(hf, default_theta=1e4, max_positions=fields["max_position_embeddings"]),
        norm_topk_prob=read.flag("norm_topk_prob"),
        attention_bias=read.flag("attention_bias"),
        qk_norm="full_width",
        clip_qkv=float(clip or 0.0),
        **fields,
    )


FAMILY = Family("olmoe", "OlmoeForCausalLM", model_config, (QWEN_LAYOUT, FUSED_LAYOUT))
