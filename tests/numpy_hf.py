"""Small Hugging Face folders made with numpy alone, for tests that must run without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

import converters
from converters.io import DTYPES, INDEX_NAME

# Prime vocabularies, so that nothing divides by luck.
MIX: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "rope_theta": 1e6,
    "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
Q3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 101, "hidden_size": 64,
    "intermediate_size": 160, "moe_intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "rope_theta": 1e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
OLM: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 89, "hidden_size": 64,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None, "rope_theta": 1e4,
    "torch_dtype": "bfloat16",
}  # fmt: skip
# The smallest that trains: its vocabulary is the bytes and an end of text.
TINY: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "sliding_window": None, "hidden_act": "silu", "dtype": "float32", "architectures": ["MixtralForCausalLM"],
}  # fmt: skip
CONFIGS = {"mixtral": MIX, "qwen3_moe": Q3, "olmoe": OLM}


def random_tensors(config: dict[str, Any], dtype: str = "BF16", seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes of the family's usual layout."""
    rng = np.random.default_rng(seed)
    source = converters.new_source(config, {}, dtype)[1]
    return {t.name: rng.standard_normal(t.shape, np.float32).astype(DTYPES[t.dtype]) for t in source.tensors}


def fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights with the experts of each layer stacked, as transformers 5 holds them in memory."""
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[str, list[np.ndarray]]] = {}
    projections = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if ".experts." in name:
            block, rest = name.split(".experts.")
            group = experts.setdefault(block, {"gate": [], "up": [], "down": []})
            group[projections[rest.split(".")[1]]].append(tensor)
        else:
            result[name] = tensor
    for block, group in experts.items():
        gate_up = [np.concatenate(pair) for pair in zip(group["gate"], group["up"], strict=True)]
        result[f"{block}.experts.gate_up_proj"] = np.stack(gate_up)
        result[f"{block}.experts.down_proj"] = np.stack(group["down"])
    return result


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    index: bool = True,
    files: dict[str, bytes] | None = None,
) -> Path:
    """Writes a checkpoint folder, the tensors dealt out to the shards in turn."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: tensors[n] for n in tensors if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    if shards > 1 and index:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, read by the safetensors library."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def read_all(loaded: converters.LoadedCheckpoint) -> dict[str, np.ndarray]:
    """Every parameter of an opened checkpoint, whole."""
    from moe_jax.model import parameter_shapes

    shapes = parameter_shapes(loaded.model_config)
    return {name: loaded.read(name, [slice(None)] * len(shape)) for name, shape in shapes.items()}


def export_again(loaded: converters.LoadedCheckpoint, folder: Path, max_shard_bytes: int | None = None) -> Path:
    """Exports an opened checkpoint through plain numpy parameters."""
    parameters = read_all(loaded)
    converters.export(
        loaded.model_config, loaded.source, lambda leaf, prefix: parameters[leaf][prefix], folder, max_shard_bytes
    )
    return folder
