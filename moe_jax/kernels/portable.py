"""The three legs of a grouped product for any device: loops over tiles of rows, each times the matrix of its group.

A group is cut into full tiles from its first row on, and one smaller tile for the rest, of the least of a few sizes that holds it.
That makes at most M / tile + E products of a tile with a matrix, in which few rows are wasted: nothing of E times the work, as
`lax.ragged_dot` does on CPU, and no padded copy.

A product has a static shape, so each size of tile is a loop of its own, over the groups that have one. (As branches of one loop,
XLA would copy the whole result in every iteration.) A rest so near the last row that its tile would reach beyond is computed by a
tile that is moved back.

M rows, D and F inner and outer width, E groups, V visits: (tile, group) pairs.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives import vary_like, zeros_like_type
from moe_jax.kernels.choice import is_gpu

MAX_TILE = 256
MIN_TILE = 16
# The full tile in _tile_size: so a group of about the mean size is one visit, and its matrix is read once.
FULL_TILES = 2
# The rest of a group is rounded up to whole parts of a full tile.
TILE_PARTS, MIN_PART = 8, 16

Carry = TypeVar("Carry")


class Visits(NamedTuple):
    """The visits, those of one size of tile side by side.

    groups_V, starts_V, ends_V: the group, the first row of the tile, and the row after the group's last one.
    bounds: the first visit of each size of tile and the one after its last.
    """

    groups_V: jax.Array
    starts_V: jax.Array
    ends_V: jax.Array
    bounds: list[tuple[jax.Array, jax.Array]]


class Tile(NamedTuple):
    """`size` rows from `load` on, of which the visit owns [start, end), the leading `num_owned` of the tile for certain."""

    size: int
    num_owned: int
    load: jax.Array
    start: jax.Array
    end: jax.Array
    group: jax.Array

    def rows_of(self, x_MD: jax.Array, first: int = 0) -> jax.Array:
        """The tile's rows, without the leading `first`."""
        return lax.dynamic_slice_in_dim(x_MD, self.load + first, self.size - first)

    def owned_of(self, x_MD: jax.Array) -> jax.Array:
        """The tile's rows, zeros in place of those that are not owned: they may hold NaN, and 0 * NaN is NaN."""
        rows = self.rows_of(x_MD)
        return rows if self.num_owned == self.size else jnp.where(self._is_owned(0), rows, 0)

    def write(self, product: jax.Array, out_MF: jax.Array) -> jax.Array:
        """`out_MF` with the owned rows of the product."""
        sure, rest = product[: self.num_owned], product[self.num_owned :]
        if len(sure):
            out_MF = lax.dynamic_update_slice_in_dim(out_MF, sure, self.load, 0)
        if len(rest):
            rest = jnp.where(self._is_owned(self.num_owned), rest, self.rows_of(out_MF, self.num_owned))
            out_MF = lax.dynamic_update_slice_in_dim(out_MF, rest, self.load + self.num_owned, 0)
        return out_MF

    def _is_owned(self, first: int) -> jax.Array:
        rows = self.load + jnp.arange(first, self.size, dtype=self.load.dtype)
        return ((rows >= self.start) & (rows < self.end))[:, None]


def _tile_size(num_rows: int, num_groups: int) -> int:
    """The power of two from the mean group on."""
    mean_group = -(-num_rows // num_groups)
    return min(num_rows, MAX_TILE, max(MIN_TILE, 1 << (mean_group - 1).bit_length()))


def _part_size(tile: int) -> int:
    if is_gpu():  # each size is a product more to compile and tune, which takes seconds there
        return tile
    return min(tile, max(_ceil_div(tile, TILE_PARTS), MIN_PART))


def _visits(group_sizes_E: jax.Array, num_rows: int, tile: int) -> Visits:
    """V = M / tile + E entries: the full tiles; then the groups by the number of parts of their rest, those moved back last.

    Moved back are a tile of one part for a rest of one part, and else a full tile: only the first of them can have more.
    """
    num_groups, num_full, part = group_sizes_E.shape[0], num_rows // tile, _part_size(tile)
    ends_E = jnp.cumsum(group_sizes_E)
    full_E = group_sizes_E // tile
    full_ends_E = jnp.cumsum(full_E)
    index_V = jnp.arange(num_full, dtype=group_sizes_E.dtype)
    groups_V = jnp.minimum(jnp.searchsorted(full_ends_E, index_V, side="right"), num_groups - 1)
    starts_V = (ends_E - group_sizes_E)[groups_V] + (index_V - (full_ends_E - full_E)[groups_V]) * tile
    rest_starts_E = ends_E - group_sizes_E % tile
    parts_E = _ceil_div(group_sizes_E % tile, part)
    most_parts = _ceil_div(tile, part)
    moved_back = (parts_E > 0) & (rest_starts_E + jnp.minimum(parts_E * part, tile) > num_rows)
    num_kinds = 1 if part == tile else most_parts + 2  # a whole tile may be moved back anyway
    kind_E = parts_E if part == tile else jnp.where(moved_back, most_parts + jnp.minimum(parts_E, 2), parts_E)
    order_E = jnp.argsort(kind_E)
    kinds = jnp.arange(num_kinds + 1, dtype=kind_E.dtype)
    bounds = num_full + jnp.sum(kind_E[None, :] <= kinds[:, None], axis=1, dtype=group_sizes_E.dtype)
    groups_V = jnp.concatenate([groups_V.astype(order_E.dtype), order_E])
    return Visits(
        groups_V, jnp.concatenate([starts_V, rest_starts_E[order_E]]), ends_E[groups_V],
        [(jnp.zeros_like(bounds[0]), full_ends_E[-1]), *((bounds[k], bounds[k + 1]) for k in range(num_kinds))],
    )  # fmt: skip


def _ceil_div(a, b: int):
    """a / b, rounded up."""
    return -(-a // b)


def _for_each_tile(
    group_sizes_E: jax.Array, num_rows: int, visit: Callable[[Tile, Carry], Carry], carry: Carry
) -> Carry:
    """`carry` after `visit(tile, carry)` for all tiles."""
    tile = min(num_rows, FULL_TILES * _tile_size(num_rows, group_sizes_E.shape[0]))
    part = _part_size(tile)
    visits = _visits(group_sizes_E, num_rows, tile)
    # Of a rest only the last part is in doubt.
    rests = [(min(n, tile), n - part) for n in range(part, tile + part, part)]
    sizes = [(tile, tile), *rests, *([] if part == tile else [(part, 0), (tile, 0)])]
    for (size, num_owned), (first, last) in zip(sizes, visits.bounds, strict=True):

        def body(v: jax.Array, carry: Carry, size: int = size, num_owned: int = num_owned) -> Carry:
            start = visits.starts_V[v]
            load = start if num_owned else jnp.minimum(start, num_rows - size)
            return visit(Tile(size, num_owned, load, start, visits.ends_V[v], visits.groups_V[v]), carry)

        carry = lax.fori_loop(vary_like(first, last), last, body, carry)
    return carry


def rows_times_matrix(x_MD: jax.Array, w_EDF: jax.Array, group_sizes_E: jax.Array, *, transpose: bool) -> jax.Array:
    """Row m of group e times w[e] or its transpose, in the dtype of x, accumulated in float32; zero past the last group."""
    contract = (((1,), (1 if transpose else 0,)), ((), ()))

    def visit(tile: Tile, out_MF: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(w_EDF, tile.group, keepdims=False)
        product = lax.dot_general(tile.rows_of(x_MD), matrix, contract, preferred_element_type=jnp.float32)
        return tile.write(product.astype(out_MF.dtype), out_MF)

    shape = (x_MD.shape[0], w_EDF.shape[1 if transpose else 2])
    out_MF = zeros_like_type(shape, x_MD.dtype, x_MD, w_EDF, group_sizes_E)
    return _for_each_tile(group_sizes_E, x_MD.shape[0], visit, out_MF)


def weight_gradient(
    x_MD: jax.Array, dy_MF: jax.Array, group_sizes_E: jax.Array, total_EDF: jax.Array | None
) -> jax.Array:
    """x[rows of e]^T dy[rows of e], float32, added to `total_EDF` in place; rows of no group take no part."""

    def visit(tile: Tile, dw_EDF: jax.Array) -> jax.Array:
        x, dy = tile.owned_of(x_MD), tile.owned_of(dy_MF)
        product = lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        old = lax.dynamic_index_in_dim(dw_EDF, tile.group, keepdims=False)
        return lax.dynamic_update_index_in_dim(dw_EDF, old + product, tile.group, 0)

    if total_EDF is None:
        shape = (group_sizes_E.shape[0], x_MD.shape[1], dy_MF.shape[1])
        total_EDF = zeros_like_type(shape, jnp.float32, x_MD, dy_MF, group_sizes_E)
    return _for_each_tile(group_sizes_E, x_MD.shape[0], visit, total_EDF)
