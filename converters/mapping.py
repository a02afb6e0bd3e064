"""The table between Hugging Face tensors and parameters, read in both directions from the same rows.

A row says: `hf = param[path][index].transpose(axes).reshape(shape)`. `path` is the logical name inside one layer
("layers.3.attn.q"); `moe_jax.model.layer_slots` places it in the stacked leaf ("runs.0.0.attn.q", repeat 3).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np

from converters.io import DTYPES, list_names
from moe_jax.config import ModelConfig
from moe_jax.errors import ConfigError
from moe_jax.model import layer_slots, parameter_shapes
from moe_jax.source import TensorInfo

Index = tuple[int | slice, ...]
Fetch = Callable[[str, tuple[int, ...]], np.ndarray]
View = Callable[[str], np.ndarray]
# What float32 holds exactly, so that a tensor comes back with the same bytes.
EXACT_DTYPES = ("F32", "BF16", "F16")
WHOLE = slice(None)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row: the tensor `name` is the block `index` of the parameter `path`, transposed by `axes`, as `shape`.

    `index` counts in the leaf's own dims (without the stacking one): whole slices and integers, which remove their dim.
    """

    name: str
    path: str
    index: Index
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def lead(self) -> tuple[int, ...]:
        """The integers that `index` starts with: the expert of a per-expert tensor."""
        lead: list[int] = []
        for i in self.index:
            if isinstance(i, slice):
                break
            lead.append(i)
        return tuple(lead)


@dataclasses.dataclass(frozen=True)
class Block:
    """An entry placed in its stacked leaf: `prefix` is the repeat index, or () for a leaf outside the layers."""

    entry: Entry
    leaf: str
    prefix: tuple[int, ...]
    leaf_shape: tuple[int, ...]

    @cached_property
    def index(self) -> Index:
        """The block as an index of every dim of the stacked leaf."""
        index = (*self.prefix, *self.entry.index)
        return (*index, *[WHOLE] * (len(self.leaf_shape) - len(index)))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block in the parameter's order of dims."""
        return tuple(n for n, i in zip(self.leaf_shape, self.index, strict=True) if isinstance(i, slice))

    def from_hf(self, tensor: np.ndarray) -> np.ndarray:
        """The block in the parameter's layout, as a view of the Hugging Face tensor."""
        axes = self.entry.axes
        return tensor.reshape([self.shape[a] for a in axes]).transpose(np.argsort(axes))

    def to_hf(self, block: np.ndarray) -> np.ndarray:
        """The Hugging Face tensor of the block, which has the parameter's layout."""
        return block.transpose(self.entry.axes).reshape(self.entry.shape)

    def intersect(self, region: Sequence[slice]) -> tuple[tuple[slice | int, ...], tuple[slice, ...]] | None:
        """Where `region` of the leaf and this block meet: (index into the region, index into the block), or None."""
        target: list[slice | int] = []
        inside: list[slice] = []
        for i, wanted in zip(self.index, region, strict=True):
            if isinstance(i, slice):
                target.append(WHOLE)
                inside.append(wanted)
            elif wanted.start <= i < wanted.stop:
                target.append(i - wanted.start)
            else:
                return None
        return tuple(target), tuple(inside)


def place(entries: Iterable[Entry], config: ModelConfig) -> list[Block]:
    """The entries with their stacked leaves."""
    slots = layer_slots(config)
    shapes = parameter_shapes(config)
    blocks: list[Block] = []
    for entry in entries:
        leaf, prefix = entry.path, ()
        if entry.path.startswith("layers."):
            _, layer, rest = entry.path.split(".", 2)
            slot = slots[int(layer)]
            leaf, prefix = f"runs.{slot.run}.{slot.position}.{rest}", (slot.repeat,)
        blocks.append(Block(entry, leaf, prefix, shapes[leaf]))
    return blocks


def read_block(blocks: Sequence[Block], slices: Sequence[slice], view: View) -> np.ndarray:
    """The region `slices` of one leaf as float32, assembled from those `blocks` (of that leaf) that it meets.

    `view` gives a tensor as a lazy array: only the region's part of it is touched.
    """
    region = [slice(*s.indices(n)[:2]) for s, n in zip(slices, blocks[0].leaf_shape, strict=True)]
    out = np.empty([max(s.stop - s.start, 0) for s in region], np.float32)
    for block in blocks:
        meeting = block.intersect(region)
        if meeting is not None:
            target, inside = meeting
            out[target] = block.from_hf(view(block.entry.name))[inside]
    return out


def extract(block: Block, fetch: Fetch, dtype: str) -> np.ndarray:
    """The Hugging Face tensor of `block` in the safetensors dtype `dtype`.

    `fetch(leaf, prefix)` gives the leaf at the leading integers `prefix`: one layer, or one expert of it.
    Values beyond the range of `dtype` are refused.
    """
    lead = block.entry.lead
    part = np.asarray(fetch(block.leaf, (*block.prefix, *lead)))[block.entry.index[len(lead) :]]
    try:
        with np.errstate(over="raise"):
            stored = part.astype(DTYPES[dtype], copy=False)
    except FloatingPointError:
        raise ConfigError(f"{block.entry.name} holds values beyond the range of its dtype {dtype}") from None
    return np.ascontiguousarray(block.to_hf(stored))


def _misfit(tensor: TensorInfo, entry: Entry) -> str:
    """What is wrong with a tensor that has a known name, or ""."""
    if tensor.dtype not in EXACT_DTYPES:
        return f"{tensor.name} has dtype {tensor.dtype}, allowed are {', '.join(EXACT_DTYPES)}"
    if tensor.shape != entry.shape:
        return f"{tensor.name} has shape {list(tensor.shape)}, but the config asks for {list(entry.shape)}"
    return ""


def problems_of(entries: Sequence[Entry], tensors: Sequence[TensorInfo], unknown_hint: str = "") -> list[str]:
    """Everything that keeps `tensors` from being exactly what `entries` describe, one text a kind, with the names."""
    known = {entry.name: entry for entry in entries}
    seen: set[str] = set()
    doubled = [t.name for t in tensors if t.name in seen or seen.add(t.name)]
    missing = [name for name in known if name not in seen]
    unknown = [t.name for t in tensors if t.name not in known]
    misfits = [text for t in tensors if t.name in known and (text := _misfit(t, known[t.name]))]
    problems: list[str] = []
    for kind, names in (("missing", missing), ("unknown", unknown), ("duplicate", doubled)):
        if names:
            hint = unknown_hint if kind == "unknown" else ""
            problems.append(f"{len(names)} tensor(s) {kind}{hint}: {list_names(names)}")
    if misfits:
        problems.append(f"{len(misfits)} tensor(s) of the wrong shape or dtype: {list_names(misfits)}")
    return problems
