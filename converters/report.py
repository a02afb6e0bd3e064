"""What a checkpoint folder holds, from its config and file headers alone."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from converters.bridge import open_folder
from converters.io import num_bytes
from moe_jax.config import ModelConfig
from moe_jax.model import parameter_shapes
from moe_jax.source import TensorInfo


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Number of parameters: all, those that one token passes through, and those of one expert."""

    total: int
    active: int
    one_expert: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """The parameters of a model; a tied head counts once, and the embedding as active."""
    total = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    one_expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_moe_layers * (config.num_experts - config.num_experts_per_tok) * one_expert
    return ParameterCount(total, total - idle, one_expert)


def _dtypes(tensors: Iterable[TensorInfo]) -> str:
    counts = Counter(t.dtype for t in tensors)
    return ", ".join(f"{dtype} ({n} tensors)" for dtype, n in counts.most_common())


def _windows(config: ModelConfig) -> str:
    widths = {layer.sliding_window for layer in config.layers} - {0}
    return ", ".join(map(str, sorted(widths))) or "none"


def describe(folder: str | Path, *, carry_unknown: bool = False) -> dict[str, str]:
    """Label -> text for `inspect`; loads no weights."""
    loaded = open_folder(folder, carry_unknown=carry_unknown)
    config, tensors = loaded.model_config, loaded.source.tensors
    count, rope = count_parameters(config), config.rope
    scaling = f", factor {rope.factor:g}" if rope.rope_type != "default" else ""
    shards = {t.file for t in tensors}
    return {
        "family": config.family,
        "layers": f"{config.num_layers}, of which {config.num_moe_layers} MoE",
        "hidden size": f"{config.hidden_size}",
        "experts": f"{config.num_experts} a layer, {config.num_experts_per_tok} per token, "
        f"width {config.moe_intermediate_size}, {count.one_expert:,} parameters each",
        "attention": f"{config.num_heads} heads, {config.num_kv_heads} kv heads, head width {config.head_dim}, "
        f"sliding window {_windows(config)}",
        "rope": f"{rope.rope_type}, theta {rope.theta:g}{scaling}",
        "vocabulary": f"{config.vocab_size}, {'tied' if config.tie_word_embeddings else 'untied'} head",
        "parameters": f"{count.total:,} total, {count.active:,} active per token",
        "weights": f"{sum(map(num_bytes, tensors)):,} bytes in {len(tensors)} tensors, {len(shards)} file(s)",
        "dtypes": _dtypes(tensors),
        "other files": ", ".join(loaded.source.files),
    }


def print_report(folder: str | Path, *, carry_unknown: bool = False) -> None:
    """Prints `describe` as a table."""
    table = Table(title=str(folder), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in describe(folder, carry_unknown=carry_unknown).items():
        table.add_row(label, text)
    Console().print(table)
