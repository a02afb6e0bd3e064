"""Hugging Face checkpoints as sources of parameters, and parameters as Hugging Face checkpoints."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converters.families import Family, family_of
from converters.families.common import HEAD, entries
from converters.io import (
    DEFAULT_SHARD_BYTES,
    CheckpointReader,
    assign_shards,
    carried_files,
    dtype_name,
    gathered_error,
    list_names,
    write_checkpoint,
)
from converters.mapping import EXACT_DTYPES, Block, Entry, Fetch, View, extract, place, problems_of, read_block
from moe_jax.config import ModelConfig
from moe_jax.errors import ConfigError
from moe_jax.source import HFSource, TensorInfo

logger = logging.getLogger("moe_jax")

EMBEDDING, EMBEDDING_PATH = "model.embed_tokens.weight", "embed.weight"
_LEFTOVER_SUFFIX = "rotary_emb.inv_freq"
# Companions of weights that are stored as codes (fp8, mxfp4, gptq, awq, bitsandbytes).
_QUANTISED_SUFFIXES = ("scale_inv", "_scale", "_scales", "_blocks", ".qweight", ".qzeros", ".scales", ".g_idx",
                       ".absmax", ".quant_map")  # fmt: skip
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_CARRY_HINT = " to this family (carry_unknown=True or --carry-unknown carries them along)"


@dataclasses.dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose config and tensor list are checked and whose values are read on demand.

    model_config: the model it holds.
    source: what an export of it needs.
    """

    model_config: ModelConfig
    source: HFSource
    _blocks: Mapping[str, Sequence[Block]] = dataclasses.field(repr=False)
    _view: View = dataclasses.field(repr=False)

    def read(self, leaf_name: str, slices: Sequence[slice]) -> np.ndarray:
        """The region `slices` (one a dim) of a parameter as float32; touches only that part of the files."""
        return read_block(self._blocks[leaf_name], slices, self._view)


def _group(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.leaf, []).append(block)
    return groups


def _table(family: Family, config: ModelConfig, names: Sequence[str]) -> list[Entry]:
    """The rows that tensors called `names` must fit; a tied model needs no head, but may have one."""
    with_head = not config.tie_word_embeddings or HEAD in names
    return entries(config, family.detect(names, config), with_head=with_head)


def _check_tied_head(table: Iterable[Entry], config: ModelConfig, view: View) -> None:
    """Refuses a head that differs from the embedding in a model whose config ties the two."""
    if config.tie_word_embeddings and any(entry.name == HEAD for entry in table):
        head, embedding = view(HEAD), view(EMBEDDING)
        rows = max(1, 2**24 // max(head.shape[-1], 1))  # compared piecewise to bound the memory
        if any(not np.array_equal(head[i : i + rows], embedding[i : i + rows]) for i in range(0, len(head), rows)):
            raise ConfigError(
                f"config.json says tie_word_embeddings true, but {HEAD} differs from {EMBEDDING}; "
                "set tie_word_embeddings to false or remove the head from the file"
            )


def is_leftover(name: str) -> bool:
    """Whether a tensor is a buffer that old checkpoints stored and nothing reads."""
    return name.endswith(_LEFTOVER_SUFFIX)


def _without_leftovers(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The tensors without leftover buffers."""
    tensors = list(tensors)
    kept = [t for t in tensors if not is_leftover(t.name)]
    if len(kept) < len(tensors):
        logger.info("ignoring %d leftover %s tensor(s); an export leaves them out", len(tensors) - len(kept),
                    _LEFTOVER_SUFFIX)  # fmt: skip
    return kept


def _refuse_quantised(unknown: Sequence[str]) -> None:
    codes = [name for name in unknown if name.endswith(_QUANTISED_SUFFIXES)]
    if codes:
        raise ConfigError(f"the checkpoint is quantised (it holds {list_names(codes)}); dequantise it first")


def open_folder(folder: str | Path, *, carry_unknown: bool = False) -> LoadedCheckpoint:
    """The checkpoint in `folder`, with all its names, shapes and dtypes checked and no weights read.

    carry_unknown: keep tensors that the model does not use for the export, instead of refusing them.
    """
    reader = CheckpointReader(folder)
    family = family_of(reader.config)
    config = family.model_config(reader.config)
    tensors = _without_leftovers(reader.tensors.values())
    table = _table(family, config, list(reader.tensors))
    known = {entry.name for entry in table}
    unknown = [t.name for t in tensors if t.name not in known]
    _refuse_quantised(unknown)
    checked = [t for t in tensors if t.name in known] if carry_unknown else tensors
    if problems := problems_of(table, checked, _CARRY_HINT):
        raise gathered_error(f"checkpoint {str(folder)!r} does not fit its config.json", problems)
    _check_tied_head(table, config, reader.view)
    extras = {name: np.array(reader.view(name)) for name in unknown}
    if extras:
        logger.info("carrying %d tensor(s) that the model does not use: %s", len(extras), list_names(extras))
    source = HFSource(reader.config, tuple(tensors), carried_files(folder), extras)
    return LoadedCheckpoint(config, source, _group(place(table, config)), reader.view)


def open_state_dict(
    hf_config: dict[str, Any], tensors: Mapping[str, np.ndarray], files: Mapping[str, bytes]
) -> LoadedCheckpoint:
    """The model of a torch state dict (its tensors as numpy arrays); its export has the family's usual layout on disk.

    files: what to carry into the export; a config.json is made from `hf_config` where it is absent.
    """
    family = family_of(hf_config)
    config = family.model_config(hf_config)
    infos = _without_leftovers(TensorInfo(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
    table = _table(family, config, list(tensors))
    _refuse_quantised([t.name for t in infos if t.name not in {entry.name for entry in table}])
    if problems := problems_of(table, infos):
        raise gathered_error("the model's state dict does not fit its config", problems)
    _check_tied_head(table, config, lambda name: tensors[name])
    given = {t.name: t.dtype for t in infos}
    dtypes = {entry.path: given[entry.name] for entry in reversed(table)}  # a tied head does not decide
    source = _fresh_source(family, config, hf_config, files, dtypes.__getitem__)
    return LoadedCheckpoint(config, source, _group(place(table, config)), lambda name: tensors[name])


def new_source(hf_config: dict[str, Any], files: Mapping[str, bytes], dtype: str) -> tuple[ModelConfig, HFSource]:
    """The model of a config without weights, and how it is written: the family's usual layout, all tensors in `dtype`.

    dtype: "float32", "bfloat16" or "float16" (or the safetensors spelling).
    """
    family = family_of(hf_config)
    stored = _DTYPE_NAMES.get(dtype, dtype)
    if stored not in EXACT_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(map(repr, _DTYPE_NAMES))}")
    config = family.model_config(hf_config)
    return config, _fresh_source(family, config, hf_config, files, lambda path: stored)


def _fresh_source(
    family: Family,
    config: ModelConfig,
    hf_config: dict[str, Any],
    files: Mapping[str, bytes],
    dtype_of: Callable[[str], str],
) -> HFSource:
    """A source in the family's default layout; `dtype_of` gives the dtype of a parameter path."""
    table = entries(config, family.layouts[0], with_head=not config.tie_word_embeddings)
    tensors = tuple(TensorInfo(e.name, dtype_of(e.path), e.shape) for e in table)
    files = dict(files)
    if "config.json" not in files:
        dtype = {name: key for key, name in _DTYPE_NAMES.items()}[dtype_of(EMBEDDING_PATH)]
        key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
        architectures = hf_config.get("architectures") or [family.architecture]
        hf_config = {**hf_config, "architectures": architectures, key: dtype}
        files["config.json"] = (json.dumps(hf_config, indent=2, sort_keys=True) + "\n").encode()
    return HFSource(hf_config, tensors, files)


def _assigned(source: HFSource, max_shard_bytes: int | None) -> list[TensorInfo]:
    """The source's tensors with their files; the recorded ones unless a limit is given or some are not recorded."""
    if max_shard_bytes is None and all(t.file for t in source.tensors):
        return list(source.tensors)
    return assign_shards(source.tensors, max_shard_bytes or DEFAULT_SHARD_BYTES)


def _remember_last(fetch: Fetch) -> Fetch:
    """`fetch`, keeping its last result: gate and up of one expert are two tensors of one block."""
    return functools.lru_cache(maxsize=1)(fetch)


def export(
    config: ModelConfig,
    source: HFSource,
    fetch: Fetch,
    folder: str | Path,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a Hugging Face checkpoint with the names, dtypes and other files of `source`.

    fetch(leaf, prefix): the parameter at the leading integers `prefix`, float32: one layer, or one expert of it.
    max_shard_bytes: pack the tensors anew by this limit; None keeps the source's files.
    """
    family = family_of(source.config)
    names = [t.name for t in source.tensors]
    table = _table(family, config, names)
    if problems := problems_of(table, [t for t in source.tensors if t.name not in source.extras]):
        raise gathered_error("the source's tensors do not fit the model", problems)
    blocks = {block.entry.name: block for block in place(table, config)}
    tensors = _assigned(source, max_shard_bytes)
    dtypes = {t.name: t.dtype for t in tensors}
    fetch_halves = _remember_last(fetch)

    def get(name: str) -> np.ndarray:
        if name in source.extras:
            return source.extras[name]
        halved = len(blocks[name].entry.index) > len(blocks[name].entry.lead)
        return extract(blocks[name], fetch_halves if halved else fetch, dtypes[name])

    write_checkpoint(folder, tensors, get, source.files)
