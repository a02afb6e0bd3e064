"""What the families of the Llama-like block share: reading a config, and the table of tensor names."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from converters.mapping import WHOLE, Entry
from moe_jax.config import ACTIVATIONS, LayerConfig, ModelConfig
from moe_jax.errors import ConfigError, require

HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """How a file spells the MoE block of a layer.

    block: the module inside the layer.
    projections: names of the gate, up and down matrix of one expert; empty when all experts are stacked in two tensors.
    """

    block: str
    projections: tuple[str, ...] = ()


QWEN_LAYOUT = ExpertLayout("mlp", ("gate_proj", "up_proj", "down_proj"))
FUSED_LAYOUT = ExpertLayout("mlp")


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`: its config translation, the layouts that are read (the first is the one written by default)."""

    model_type: str
    architecture: str
    model_config: Callable[[dict[str, Any]], ModelConfig]
    layouts: tuple[ExpertLayout, ...]

    def detect(self, names: Iterable[str], config: ModelConfig) -> ExpertLayout:
        """The layout that most tensor names fit; the first one where none does."""
        names = set(names)
        return max(self.layouts, key=lambda layout: sum(e.name in names for e in entries(config, layout)))


def check_common(hf: Mapping[str, Any]) -> None:
    """Refuses what no family here supports."""
    if hf.get("quantization_config") is not None:
        raise ConfigError("the checkpoint is quantised (quantization_config is set); dequantise it first")
    dropout = hf.get("attention_dropout")
    require(dropout in (None, 0), "attention_dropout", dropout, "0 (dropout is not supported)")
    architectures = hf.get("architectures") or ["ForCausalLM"]
    require(str(architectures[0]).endswith("ForCausalLM"), "architectures", architectures, "a ...ForCausalLM class")


def num_experts(hf: Mapping[str, Any], default: int) -> int:
    """The number of experts, which files spell `num_experts` or `num_local_experts`."""
    read = Reader(hf, {})
    values = {key: read.integer(key) for key in ("num_experts", "num_local_experts") if hf.get(key) is not None}
    if len(set(values.values())) > 1:
        raise ConfigError(
            f"num_experts {values['num_experts']} contradicts num_local_experts {values['num_local_experts']}"
        )
    return next(iter(values.values()), default)


class Reader:
    """Reads keys of a config with the family's defaults for absent ones, and checks their types."""

    def __init__(self, hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **hf}

    def integer(self, key: str) -> int:
        value = self._values[key]
        require(isinstance(value, int) and not isinstance(value, bool), key, value, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self._values[key]
        require(is_number(value), key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._values[key]
        require(isinstance(value, bool), key, value, "true or false")
        return value


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def common_fields(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The `ModelConfig` fields that all families here read alike (`rope` and the MoE ones not among them)."""
    read = Reader(hf, defaults)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    require(heads >= 1, "num_attention_heads", heads, "positive")
    # Absent means the class default, null means one kv head a head.
    kv_heads = heads if hf.get("num_key_value_heads", 0) is None else read.integer("num_key_value_heads")
    act = hf.get("hidden_act", defaults["hidden_act"])
    require(act in ACTIVATIONS, "hidden_act", act, f"one of {', '.join(map(repr, ACTIVATIONS))}")
    return {
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads if hf.get("head_dim") is None else read.integer("head_dim"),
        "num_experts_per_tok": read.integer("num_experts_per_tok"),
        "hidden_act": act,
        "rms_norm_eps": read.number("rms_norm_eps"),
        "initializer_range": read.number("initializer_range"),
        "tie_word_embeddings": read.flag("tie_word_embeddings"),
        "max_position_embeddings": read.integer("max_position_embeddings"),
    }


def window_of(value: Any) -> int:
    """The sliding window of all layers; null is 0, none."""
    require(
        value is None or (isinstance(value, int) and value > 0), "sliding_window", value, "a positive integer or null"
    )
    return value or 0


def equal_layers(hf: Mapping[str, Any], default: int, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """`num_hidden_layers` times the same layer."""
    return (layer,) * Reader(hf, {"num_hidden_layers": default}).integer("num_hidden_layers")


def _linear(name: str, path: str, *, out: tuple[int, ...], into: tuple[int, ...]) -> Entry:
    """A weight `[out, in]` on disk, held as `[*into, *out]`."""
    n = len(into)
    axes = (*range(n, n + len(out)), *range(n))
    return Entry(name, path, (), axes, (math.prod(out), math.prod(into)))


def _vector(name: str, path: str, *dims: int) -> Entry:
    return Entry(name, path, (), tuple(range(len(dims))), (math.prod(dims),))


def _attention_entries(c: ModelConfig, hf: str, ours: str) -> Iterator[Entry]:
    heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    for p, n in heads.items():
        yield _linear(f"{hf}.{p}_proj.weight", f"{ours}.{p}", out=(n, c.head_dim), into=(c.hidden_size,))
        if c.attention_bias:
            yield _vector(f"{hf}.{p}_proj.bias", f"{ours}.{p}_bias", n, c.head_dim)
        if c.qk_norm != "none" and p != "v":
            width = c.head_dim if c.qk_norm == "per_head" else n * c.head_dim
            yield _vector(f"{hf}.{p}_norm.weight", f"{ours}.{p}_norm.weight", width)
    yield _linear(f"{hf}.o_proj.weight", f"{ours}.o", out=(c.hidden_size,), into=(c.num_heads, c.head_dim))
    if c.attention_bias:
        yield _vector(f"{hf}.o_proj.bias", f"{ours}.o_bias", c.hidden_size)


def _mlp_entries(c: ModelConfig, hf: str, ours: str) -> Iterator[Entry]:
    h, i = c.hidden_size, c.intermediate_size
    yield Entry(f"{hf}.gate_proj.weight", f"{ours}.gate_up", (WHOLE, 0), (1, 0), (i, h))
    yield Entry(f"{hf}.up_proj.weight", f"{ours}.gate_up", (WHOLE, 1), (1, 0), (i, h))
    yield _linear(f"{hf}.down_proj.weight", f"{ours}.down", out=(h,), into=(i,))


def _experts_of_layer(c: ModelConfig, layout: ExpertLayout, hf: str, ours: str) -> Iterator[Entry]:
    h, i, e = c.hidden_size, c.moe_intermediate_size, c.num_experts
    if not layout.projections:
        yield Entry(f"{hf}.experts.gate_up_proj", f"{ours}.gate_up", (), (0, 2, 3, 1), (e, 2 * i, h))
        yield Entry(f"{hf}.experts.down_proj", f"{ours}.down", (), (0, 2, 1), (e, h, i))
        return
    gate, up, down = layout.projections
    for expert in range(e):
        prefix = f"{hf}.experts.{expert}"
        yield Entry(f"{prefix}.{gate}.weight", f"{ours}.gate_up", (expert, WHOLE, 0), (1, 0), (i, h))
        yield Entry(f"{prefix}.{up}.weight", f"{ours}.gate_up", (expert, WHOLE, 1), (1, 0), (i, h))
        yield Entry(f"{prefix}.{down}.weight", f"{ours}.down", (expert,), (1, 0), (h, i))


def moe_entries(config: ModelConfig, layout: ExpertLayout, layer: int) -> Iterator[Entry]:
    """The rows of the MoE block of one layer, its router included."""
    hf, ours = f"model.layers.{layer}.{layout.block}", f"layers.{layer}.mlp"
    yield _linear(f"{hf}.gate.weight", f"{ours}.router", out=(config.num_experts,), into=(config.hidden_size,))
    yield from _experts_of_layer(config, layout, hf, ours)


def entries(config: ModelConfig, layout: ExpertLayout, *, with_head: bool = True) -> list[Entry]:
    """The whole table, without `lm_head.weight` if not `with_head`; in a tied model that row is the embedding again."""
    h, v = config.hidden_size, config.vocab_size
    rows = [Entry("model.embed_tokens.weight", "embed.weight", (), (0, 1), (v, h))]
    for number, layer in enumerate(config.layers):
        hf, ours = f"model.layers.{number}", f"layers.{number}"
        rows.append(_vector(f"{hf}.input_layernorm.weight", f"{ours}.attn_norm.weight", h))
        rows.append(_vector(f"{hf}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", h))
        rows.extend(_attention_entries(config, f"{hf}.self_attn", f"{ours}.attn"))
        is_moe = layer.is_moe
        rows.extend(moe_entries(config, layout, number) if is_moe else _mlp_entries(config, f"{hf}.mlp", f"{ours}.mlp"))
    rows.append(_vector("model.norm.weight", "final_norm.weight", h))
    if with_head and config.tie_word_embeddings:
        rows.append(Entry(HEAD, "embed.weight", (), (0, 1), (v, h)))
    elif with_head:
        rows.append(_linear(HEAD, "lm_head.weight", out=(v,), into=(h,)))
    return rows
