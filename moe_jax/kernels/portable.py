"""The three legs of a grouped product for any device: a loop over the visits of row tiles to matrices.

The loop walks a list of visits, one for each (row tile, group) pair that share rows, so at most M / tile + E products of a tile
with a matrix: nothing of E times the work, as `lax.ragged_dot` does on CPU, and no padded copy.
"""

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives import vary_like, zeros_like_type

MAX_TILE = 512
MIN_TILE = 16


def _tile_size(num_rows: int, num_groups: int) -> int:
    """A power of two near half of the mean group, so that few rows of a tile belong to another group."""
    half_group = max(num_rows // (2 * num_groups), 1)
    return min(num_rows, MAX_TILE, max(MIN_TILE, 1 << (half_group.bit_length() - 1)))


def _visits(group_sizes_E: jax.Array, num_rows: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(groups_V, tiles_V, bounds, count): visit v multiplies row tile `tiles[v]` by the matrix of group `groups[v]`.

    Only the first `count` of the V = ceil(M / tile) + E entries are visits. `bounds` [E + 1] are the groups' first rows.
    """
    num_groups = group_sizes_E.shape[0]
    ends_E = jnp.cumsum(group_sizes_E)
    starts_E = ends_E - group_sizes_E
    first_E = starts_E // tile
    visits_E = jnp.where(group_sizes_E > 0, (ends_E - 1) // tile - first_E + 1, 0)
    visit_ends_E = jnp.cumsum(visits_E)
    index_V = jnp.arange(_ceil_div(num_rows, tile) + num_groups, dtype=group_sizes_E.dtype)
    groups_V = jnp.minimum(jnp.searchsorted(visit_ends_E, index_V, side="right"), num_groups - 1)
    tiles_V = first_E[groups_V] + index_V - (visit_ends_E - visits_E)[groups_V]
    return groups_V, tiles_V, jnp.concatenate([jnp.zeros_like(ends_E[:1]), ends_E]), visit_ends_E[-1]


def _ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _tile_rows(tile_index, group, bounds, num_rows: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """(first row to load, mask [tile, 1] of the rows that this visit owns); the last tile is moved back to stay inside."""
    start = tile_index * tile
    load = jnp.minimum(start, num_rows - tile)
    rows = load + jnp.arange(tile, dtype=load.dtype)
    owned = (rows >= jnp.maximum(start, bounds[group])) & (rows < bounds[group + 1])
    return load, owned[:, None]


def rows_times_matrix(x_MD: jax.Array, w_EDF: jax.Array, group_sizes_E: jax.Array, *, transpose: bool) -> jax.Array:
    num_rows, num_out = x_MD.shape[0], w_EDF.shape[1 if transpose else 2]
    tile = _tile_size(num_rows, w_EDF.shape[0])
    groups_V, tiles_V, bounds, count = _visits(group_sizes_E, num_rows, tile)
    contract = (((1,), (1 if transpose else 0,)), ((), ()))

    def visit(v, out):
        load, owned = _tile_rows(tiles_V[v], groups_V[v], bounds, num_rows, tile)
        rows = lax.dynamic_slice_in_dim(x_MD, load, tile)
        matrix = lax.dynamic_index_in_dim(w_EDF, groups_V[v], keepdims=False)
        product = lax.dot_general(rows, matrix, contract, preferred_element_type=jnp.float32).astype(out.dtype)
        kept = jnp.where(owned, product, lax.dynamic_slice_in_dim(out, load, tile))
        return lax.dynamic_update_slice_in_dim(out, kept, load, 0)

    out = zeros_like_type((num_rows, num_out), x_MD.dtype, x_MD, w_EDF, group_sizes_E)
    return lax.fori_loop(vary_like(jnp.zeros((), count.dtype), count), count, visit, out)


def weight_gradient(
    x_MD: jax.Array, dy_MF: jax.Array, group_sizes_E: jax.Array, total_EDF: jax.Array | None
) -> jax.Array:
    num_rows, num_groups = x_MD.shape[0], group_sizes_E.shape[0]
    tile = _tile_size(num_rows, num_groups)
    groups_V, tiles_V, bounds, count = _visits(group_sizes_E, num_rows, tile)

    def visit(v, dw_EDF):
        load, owned = _tile_rows(tiles_V[v], groups_V[v], bounds, num_rows, tile)
        # Both sides are masked: a row of another group may hold NaN, and 0 * NaN is NaN.
        x = jnp.where(owned, lax.dynamic_slice_in_dim(x_MD, load, tile), 0)
        dy = jnp.where(owned, lax.dynamic_slice_in_dim(dy_MF, load, tile), 0)
        product = lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        old = lax.dynamic_index_in_dim(dw_EDF, groups_V[v], keepdims=False)
        return lax.dynamic_update_index_in_dim(dw_EDF, old + product, groups_V[v], 0)

    if total_EDF is None:
        shape = (num_groups, x_MD.shape[1], dy_MF.shape[1])
        total_EDF = zeros_like_type(shape, jnp.float32, x_MD, dy_MF, group_sizes_E)
    return lax.fori_loop(vary_like(jnp.zeros((), count.dtype), count), count, visit, total_EDF)
