"""Tiny random Hugging Face checkpoints for tests, made offline with transformers and torch (imported on use).

Every optional feature of a variant has a value that matters (no bias is zero, no norm weight is one), so a port that
ignores one shows up in the logits.
"""

import json
from pathlib import Path
from typing import Any

from converters.parity import warm_up_torch

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
# The ramp of these betas lies inside the six frequencies of a tiny head.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 12,
    "norm_topk_prob": True,
}
_OLMOE: dict[str, Any] = {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3}

VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12}
    | {"sliding_window": 5},
    "mixtral_tied": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"tie_word_embeddings": True},
    "qwen3_moe": _QWEN | {"mlp_only_layers": [1], "attention_bias": True},
    "qwen3_moe_yarn": _QWEN | {"rope_parameters": _YARN},
    "qwen3_moe_nonorm": _QWEN | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "olmoe": _OLMOE | {"clip_qkv": 0.9},
    "olmoe_norm": _OLMOE | {"norm_topk_prob": True, "num_key_value_heads": 4, "attention_bias": True},
}
DTYPES = ("float32", "bfloat16", "float16", "mixed")


def _randomise(model: Any, seed: int) -> None:
    """Refills every parameter so that logits, router scores and branches are of order one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.2 * noise
            elif parameter.ndim == 1:
                value = 1 + 0.2 * noise
            elif "embed_tokens" in name:
                value = noise * (0.4 if tied else 1.0)
            else:
                value = 1.2 * noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value)


def _cast(model: Any, dtype: str) -> None:
    """Casts the parameters only (`model.to` would round the rotary tables); "mixed" keeps gates and norms float32."""
    import torch

    kept = (lambda name: "gate.weight" in name or "norm" in name) if dtype == "mixed" else (lambda name: False)
    target = torch.bfloat16 if dtype == "mixed" else getattr(torch, dtype)
    for name, parameter in model.named_parameters():
        if not kept(name):
            parameter.data = parameter.data.to(target)
    model.config.dtype = target


def make_model(variant: str, *, dtype: str = "float32", seed: int = 0, **config_overrides: Any) -> Any:
    """A random torch model of `variant`, in evaluation mode with eager attention and experts."""
    import copy

    from transformers import AutoConfig, AutoModelForCausalLM

    warm_up_torch()
    settings = copy.deepcopy(_COMMON | VARIANTS[variant] | config_overrides)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **options).float().eval()
    _randomise(model, seed)
    _cast(model, dtype)
    return model


def _rewrite_legacy(folder: Path) -> None:
    """Rewrites config.json with the keys that checkpoints published before transformers 5 use."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config, indent=2) + "\n")


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(vocab_size - 4)]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} w1 {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def make_checkpoint(
    folder: str | Path,
    variant: str,
    *,
    dtype: str = "bfloat16",
    shards: int = 1,
    legacy_config: bool = False,
    seed: int = 0,
    tokenizer: bool = False,
    fused: bool = False,
    **config_overrides: Any,
) -> Path:
    """Writes a checkpoint of one of `VARIANTS` into `folder` and returns that.

    dtype: one of `DTYPES`; "mixed" is bfloat16 with float32 gates and norms.
    shards: about how many weight files to aim for.
    legacy_config: config.json in the spelling before transformers 5.
    tokenizer: also write a word-level tokenizer ("w0", "w1", ...) with a chat template.
    fused: the stacked in-memory layout of transformers 5 instead of one tensor per expert and projection.
    """
    folder = Path(folder)
    model = make_model(variant, dtype=dtype, seed=seed, **config_overrides)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = size // shards + 1 if shards > 1 else "5GB"
    model.save_pretrained(folder, max_shard_size=limit, save_original_format=not fused)
    if tokenizer:
        _save_tokenizer(folder, model.config.vocab_size)
    if legacy_config:
        _rewrite_legacy(folder)
    return folder
