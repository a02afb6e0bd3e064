"""Hugging Face configs, in every spelling, as `ModelConfig`."""

from typing import Any

import pytest
from numpy_hf import CONFIGS, MIX, OLM, Q3

from converters.families import FAMILIES, family_of
from converters.families.rope import rope_config
from moe_jax.config import LayerConfig, ModelConfig, RopeConfig
from moe_jax.errors import ConfigError


def translate(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).model_config(hf)


def rope(**hf: Any) -> RopeConfig:
    return rope_config(hf, default_theta=1e4, max_positions=4096)


def without(hf: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if key not in keys}


def test_the_three_tiny_configs_are_translated() -> None:
    mixtral, qwen, olmoe = (translate(CONFIGS[name]) for name in ("mixtral", "qwen3_moe", "olmoe"))
    assert mixtral == ModelConfig(
        family="mixtral", vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_experts=4,
        num_experts_per_tok=2, num_heads=4, num_kv_heads=2, head_dim=16, layers=(LayerConfig(),) * 2,
        rope=RopeConfig(theta=1e6), norm_topk_prob=True, rms_norm_eps=1e-5, max_position_embeddings=512,
    )  # fmt: skip
    assert (qwen.head_dim, qwen.qk_norm, qwen.num_experts, qwen.moe_intermediate_size) == (32, "per_head", 8, 48)
    assert (qwen.norm_topk_prob, qwen.rms_norm_eps, qwen.max_position_embeddings) == (True, 1e-6, 32768)
    assert (olmoe.qk_norm, olmoe.norm_topk_prob, olmoe.clip_qkv, olmoe.rms_norm_eps) == ("full_width", False, 0.0, 1e-5)


def test_other_families_are_refused_with_the_list() -> None:
    for model_type in ("llama", None, ["mixtral"]):
        with pytest.raises(ConfigError, match=r"model_type is .*'mixtral', 'qwen3_moe', 'olmoe'"):
            family_of({"model_type": model_type})


# C01, C03: the rotary settings


def test_rope_base_is_read_from_the_nested_place() -> None:
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}
    assert translate(without(MIX, "rope_theta") | nested).rope == RopeConfig(theta=5e5)
    assert translate(MIX | nested).rope == RopeConfig(theta=5e5)  # wins over the top level
    assert translate(MIX | {"rope_scaling": None}).rope == RopeConfig(theta=1e6)
    assert translate(MIX | {"rope_parameters": {"rope_type": "default"}}).rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize(("config", "theta"), [(MIX, 1e6), (Q3, 1e4), (OLM, 1e4)])
def test_without_any_base_the_familys_default_counts(config: dict[str, Any], theta: float) -> None:
    assert translate(without(config, "rope_theta")).rope.theta == theta


SCALED = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_old_and_new_spellings_of_scaled_rope_agree(kind: str) -> None:
    new = rope(rope_parameters={"rope_type": kind, "rope_theta": 7e4, **SCALED[kind]})
    assert new.rope_type == kind
    assert new == rope(rope_theta=7e4, rope_scaling={"type": kind, **SCALED[kind]})
    assert new == rope(rope_theta=7e4, rope_scaling={"rope_type": kind, **SCALED[kind]})
    assert new == rope(rope_theta=7e4, rope_scaling={"type": "banana", "rope_type": kind, **SCALED[kind]})
    assert new.factor == SCALED[kind]["factor"]


def test_scaled_rope_is_completed_as_transformers_does() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert rope(rope_scaling=yarn).original_max_positions == 4096
    assert rope(rope_scaling=yarn, original_max_position_embeddings=512).original_max_positions == 512
    without_factor = {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert rope(rope_scaling=without_factor).factor == 4.0
    dynamic = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}
    assert rope(rope_scaling=dynamic).original_max_positions == 4096  # transformers uses max_position_embeddings


def test_all_settings_of_yarn_are_read() -> None:
    settings = {"attention_factor": 1.3, "beta_fast": 4, "beta_slow": 2, "mscale": 0.8, "mscale_all_dim": 1.2,
                "truncate": False}  # fmt: skip
    read = rope(rope_scaling={"type": "yarn", **SCALED["yarn"], **settings})
    assert {key: getattr(read, key) for key in settings} == settings
    plain = rope(rope_scaling={"type": "yarn", **SCALED["yarn"]})
    assert (plain.attention_factor, plain.beta_fast, plain.beta_slow, plain.truncate) == (0.0, 32.0, 1.0, True)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"rope_scaling": {"type": "banana"}}, "'banana'.*'default', 'linear', 'dynamic', 'yarn', 'llama3'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "short_factor": [1.0]}}, "short_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "original_max_pos"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": "1", "high_freq_factor": 4.0}},
            "low_freq_factor is '1', but must be a number",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "32"}}, "beta_fast is '32'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": [1]}}, r"mscale is \[1\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": "1.2"}}, "attention_factor is '1.2'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate is 'no'"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_other_rope_settings_are_refused(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope(**hf)


def test_two_rope_settings_must_mean_the_same() -> None:
    new = {"rope_type": "yarn", "rope_theta": 1e4, **SCALED["yarn"]}
    assert rope(rope_parameters=new, rope_scaling={"type": "yarn", **SCALED["yarn"]}) == rope(rope_parameters=new)
    with pytest.raises(ConfigError, match="contradicts"):
        rope(rope_parameters=new, rope_scaling={"type": "linear", "factor": 2.0})


# C08: head width


def test_head_width_falls_back_to_hidden_size_over_heads() -> None:
    assert translate(MIX).head_dim == translate(MIX | {"head_dim": None}).head_dim == 16
    assert translate(Q3).head_dim == 32
    assert translate(without(Q3, "head_dim")).head_dim == 16
    with pytest.raises(ConfigError, match="head_dim is 32"):
        translate(OLM | {"head_dim": 32})


def test_kv_heads_default_by_family_and_null_means_the_heads() -> None:
    assert translate(without(MIX, "num_key_value_heads") | {"num_attention_heads": 16}).num_kv_heads == 8
    assert translate(without(OLM, "num_key_value_heads")).num_kv_heads == 4
    for config in CONFIGS.values():
        assert translate(config | {"num_key_value_heads": None}).num_kv_heads == 4


# C11, C12 and other switches


def test_optional_features_are_taken_over() -> None:
    assert translate(Q3 | {"attention_bias": True}).attention_bias
    assert translate(MIX | {"hidden_act": "gelu"}).hidden_act == "gelu"
    assert translate(OLM | {"clip_qkv": 0.05}).clip_qkv == 0.05
    assert not translate(without(Q3, "norm_topk_prob")).norm_topk_prob
    assert translate(MIX | {"tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MIX, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (MIX, {"hidden_act": "mish"}, "hidden_act is 'mish'.*'silu', 'gelu'"),
        (MIX, {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        (MIX, {"sliding_window": 0}, "sliding_window is 0"),
        (MIX, {"architectures": ["MixtralForSequenceClassification"]}, "architectures"),
        (MIX, {"vocab_size": None}, "vocab_size is None"),
        (MIX, {"hidden_size": "64"}, "hidden_size is '64'"),
        (MIX, {"num_experts": 8}, "num_experts 8 contradicts num_local_experts 4"),
        (MIX, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5.*num_experts"),
        (MIX, {"num_key_value_heads": 3}, "num_kv_heads is 3"),
        (Q3, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (Q3, {"mlp_only_layers": "1"}, "mlp_only_layers"),
        (OLM, {"clip_qkv": 0}, "clip_qkv is 0"),
        (OLM, {"clip_qkv": "8"}, "clip_qkv is '8'"),
        (OLM, {"num_experts": [8]}, r"num_experts is \[8\]"),
        (OLM, {"sliding_window": 8}, "sliding_window is 8"),
    ],
)
def test_what_cannot_take_effect_is_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(config | change)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_both_names_of_the_expert_count_are_read(config: dict[str, Any]) -> None:
    bare = without(config, "num_experts", "num_local_experts")
    assert translate(bare | {"num_experts": 5}).num_experts == 5
    assert translate(bare | {"num_local_experts": 5}).num_experts == 5


def test_dense_layers_of_qwen3_moe() -> None:
    kinds = lambda **change: [layer.is_moe for layer in translate(Q3 | change).layers]  # noqa: E731
    assert kinds() == [True] * 4
    assert kinds(decoder_sparse_step=2) == [False, True, False, True]
    assert kinds(mlp_only_layers=[1]) == [True, False, True, True]
    assert kinds(decoder_sparse_step=2, mlp_only_layers=[3]) == [False, True, False, False]
    assert kinds(mlp_only_layers=None) == [True] * 4


def test_sliding_windows() -> None:
    windows = lambda config: {layer.sliding_window for layer in translate(config).layers}  # noqa: E731
    assert windows(MIX | {"sliding_window": 5}) == {5}
    assert windows(MIX) == {0}
    assert windows(Q3 | {"sliding_window": 5}) == {0}
    assert windows(Q3 | {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}) == {5}
    assert windows(Q3 | {"use_sliding_window": True}) == {4096}
    assert windows(Q3 | {"use_sliding_window": True, "sliding_window": None}) == {0}


def test_the_registry_knows_each_family_by_its_model_type() -> None:
    assert all(family.model_type == name for name, family in FAMILIES.items())
    assert list(FAMILIES) == ["mixtral", "qwen3_moe", "olmoe"]
