"""Which implementation a leg of the grouped product takes, and with which tiles: decided from shapes and the device, at trace time.

`tiles.json` holds measured tiles by device, leg and shape class; `moe-jax tune` adds to a table of one's own, which
`MOE_JAX_TILES=FILE` reads first.
"""

import dataclasses
import functools
import json
import logging
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.errors import ConfigError
from moe_jax.kernels.tiles import TILE_K, Tiles

LOG = logging.getLogger(__name__)
LEGS = ("forward", "input_gradient", "weight_gradient")
TILES_VARIABLE = "MOE_JAX_TILES"


class Shape(NamedTuple):
    """A leg: M rows in E groups; `inner` and `out` are the widths of one group's matrix in the forward product [D, F]."""

    leg: str
    dtype: Any
    num_rows: int
    num_groups: int
    inner: int
    out: int

    @property
    def rows_class(self) -> int:
        """The power of two nearest below the mean rows of a group."""
        return 1 << max(self.num_rows // self.num_groups, 1).bit_length() - 1


class Choice(NamedTuple):
    """implementation: "mosaic_gpu" (Hopper) or "portable". tiles: of the former. reason: why a Hopper GPU got the latter."""

    implementation: str
    tiles: Tiles | None
    reason: str | None


def choose(shape: Shape) -> Choice:
    """What the leg runs as on the device that is compiled for; warns once where a Hopper GPU gets no Hopper kernel."""
    choice = choice_for(shape, device_kind())
    if choice.reason is not None:
        _warn_once(f"grouped_matmul: the {shape.leg} leg does not use the Hopper kernel: {choice.reason}")
    return choice


def choice_for(shape: Shape, device: str) -> Choice:
    """What the leg runs as on a kind of device."""
    if not is_hopper(device):
        return Choice("portable", None, None)
    reason = hopper_obstacle(shape)
    if reason is not None:
        return Choice("portable", None, reason)
    return Choice("mosaic_gpu", tuned_tiles(shape, device) or default_tiles(shape), None)


def hopper_obstacle(shape: Shape) -> str | None:
    """What keeps a leg from the Hopper kernels."""
    if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype is {jnp.dtype(shape.dtype).name}; it takes bfloat16 and float16"
    for name, width in (("inner", shape.inner), ("outer", shape.out)):
        if width % TILE_K:
            return f"the {name} width is {width}; it takes multiples of {TILE_K}"
    return None


def default_tiles(shape: Shape) -> Tiles:
    """Tiles for a shape that was not measured: the widest that does not leave much of its last column empty."""
    columns = shape.inner if shape.leg == "input_gradient" else shape.out
    padded = {wide: -(-columns // wide) * wide for wide in (256, 128)}
    if padded[256] <= 1.05 * padded[128]:
        return Tiles()
    return Tiles(rows=128, columns=128, width=16)


def tuned_tiles(shape: Shape, device: str) -> Tiles | None:
    """The entry of the tables for this device and shape class."""
    key = table_key(shape, device)
    for table in _tables(os.environ.get(TILES_VARIABLE) or None):
        if key in table:
            return Tiles(**table[key])
    return None


def table_key(shape: Shape, device: str) -> str:
    """An entry's key: device, leg, matrix, and rows of a group (a power of two)."""
    return f"{device} {shape.leg} {shape.inner}x{shape.out} rows {shape.rows_class}"


def device_kind() -> str:
    """The kind of the device that is compiled for, such as "NVIDIA H200"."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.device_kind if abstract else jax.devices()[0].device_kind


def is_gpu() -> bool:
    """Whether the device that is compiled for is a GPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return (abstract.platform if abstract else jax.devices()[0].platform) in ("gpu", "cuda", "rocm")


def is_hopper(device: str) -> bool:
    """Whether `device` (a device kind) is a GPU of compute capability 9.0."""
    return re.search(r"\b(H100|H200|H800|H20|GH200)\b", device) is not None


@functools.cache
def _tables(own: str | None) -> tuple[dict[str, dict[str, Any]], ...]:
    shipped = json.loads(resources.files("moe_jax.kernels").joinpath("tiles.json").read_text())
    if own is None:
        return (shipped,)
    return read_table(Path(own)), shipped


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """A table of tiles from a file; ConfigError where it is none."""
    try:
        table = json.loads(path.read_text())
        for entry in table.values():
            Tiles(**entry)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(path)!r} ({TILES_VARIABLE}, or --out) must be a table of tiles as `moe-jax tune` writes it: {error}"
        ) from None
    return table


def tiles_entry(tiles: Tiles) -> dict[str, Any]:
    """What the tables hold for tiles: all that differs from the defaults."""
    return {f.name: getattr(tiles, f.name) for f in dataclasses.fields(Tiles) if getattr(tiles, f.name) != f.default}


@functools.cache
def _warn_once(text: str) -> None:
    LOG.warning(text)
