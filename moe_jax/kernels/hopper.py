"""The three legs of a grouped product for Hopper GPUs, written with Pallas' Mosaic-GPU backend.

A kernel is one persistent grid. In every block a producer warpgroup loads tiles through the copy engine (TMA) into a ring of
shared-memory stages and goes on into the next tile while two consumer warpgroups multiply (wgmma, float32 sums in registers) and
store. What a group owns may begin anywhere: its tiles begin at the last multiple of eight rows before it, which the copy engine
can address, and where a tile holds rows of another group only its own are stored, or summed.

M rows, D and F widths, E groups; K is summed over; T tiles of rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from moe_jax.kernels.tiles import CONSUMERS, ROW_ALIGNMENT, TILE_K, Tiles

LINE_BYTES = 128
STORE_ROWS = 64
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # per thread, of 65,536 in all


def rows_times_matrix(
    x_MK: jax.Array, w_EDF: jax.Array, group_sizes_E: jax.Array, *, transpose: bool, tiles: Tiles, interpret: Any = None
) -> jax.Array:
    """Row m of group e times w[e] (transpose: its transpose), in the dtype of x; zero past the last group.

    M must be a multiple of 8, D and F of 64; 16-bit floating point.
    """
    num_rows, num_groups = x_MK.shape[0], w_EDF.shape[0]
    num_inner, num_out = (w_EDF.shape[2], w_EDF.shape[1]) if transpose else (w_EDF.shape[1], w_EDF.shape[2])
    block_rows, block_columns = tiles.block
    column_tiles = _ceil_div(num_out, block_columns * tiles.cluster)
    store_columns = LINE_BYTES // x_MK.dtype.itemsize

    def body(table, count, x, w, out, x_tiles, w_tiles, stored, loaded, freed):
        where = _position()

        def tile_at(number):
            index = where.cluster + number * where.num_clusters
            row_tile, column_tile = plgpu.planar_snake(index, (count[0], column_tiles), 1, tiles.width)
            group = table[row_tile, 0]
            steps = jnp.where(group < num_groups, num_inner // TILE_K, 0)
            first = pl.multiple_of(table[row_tile, 1], ROW_ALIGNMENT)
            column = (column_tile * tiles.cluster + where.block) * block_columns
            return _Tile(steps, group, first, column, first, table[row_tile, 2], table[row_tile, 3])

        def load(tile, k, slot):
            inner, columns = pl.ds(k * TILE_K, TILE_K), pl.ds(tile.column, block_columns)
            _load_shared_rows(tiles, x.at[pl.ds(tile.row, block_rows), inner], x_tiles.at[slot], loaded.at[slot])
            source = w.at[tile.group, columns, inner] if transpose else w.at[tile.group, inner, columns]
            plgpu.copy_gmem_to_smem(source, w_tiles.at[slot], loaded.at[slot])

        def multiply(tile, k, slot, sums):
            row, column = tiles.part(where.warpgroup)
            x_tile, columns = x_tiles.at[slot, pl.ds(row, tiles.rows)], pl.ds(column, tiles.columns)

            @pl.when(tile.row + row < tile.high)  # or the group ends before this consumer's rows
            def _multiply():
                if transpose:
                    plgpu.wgmma(sums, x_tile, plgpu.transpose_ref(w_tiles.at[slot, columns], (1, 0)))
                else:
                    plgpu.wgmma(sums, x_tile, w_tiles.at[slot, :, columns])

        def store(tile, number, part, r, c):
            row, column = (a + b for a, b in zip((tile.row, tile.column), tiles.part(where.warpgroup), strict=True))
            row, column = row + r, column + c
            target = out.at[pl.ds(row, STORE_ROWS), pl.ds(column, store_columns)]
            whole = (row >= tile.low) & (row + STORE_ROWS <= tile.high)

            @pl.when(whole)
            def _store():
                _store_through(stored.at[where.warpgroup, number % 2], part, target)

            @pl.when(jnp.logical_not(whole) & (column < num_out))
            def _store_some():
                _store_rows(target, part, row, tile.low, tile.high, interpret)

        num_tiles = _div(count[0] * column_tiles - where.cluster + (where.num_clusters - 1), where.num_clusters)
        _run(tiles, where, num_tiles, tile_at, load, multiply, store, store_columns, out.dtype, loaded, freed)

    table_T4, count = _row_tiles(group_sizes_E, num_rows, block_rows)
    w_block = (block_columns, TILE_K) if transpose else (TILE_K, block_columns)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_out), x_MK.dtype),
        scratch_types=dict(
            x_tiles=_shared((tiles.stages, block_rows, TILE_K), x_MK.dtype),
            w_tiles=_shared((tiles.stages, *w_block), w_EDF.dtype),
            stored=_shared((CONSUMERS, 2, STORE_ROWS, store_columns), x_MK.dtype),
            **_ring_barriers(tiles),
        ),
        **_launch(tiles),
        interpret=interpret,
    )
    return kernel(table_T4, count, x_MK, w_EDF)


def weight_gradient(
    x_MD: jax.Array,
    dy_MF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    out_dtype: Any,
    tiles: Tiles,
    interpret: Any = None,
) -> jax.Array:
    """x[rows of e]^T dy[rows of e] [E, D, F] in `out_dtype`.

    Rows of no group take no part, whatever they hold. M must be a multiple of 8, D and F of 64; 16-bit floating point.
    """
    (num_out, num_columns), num_groups = (x_MD.shape[1], dy_MF.shape[1]), group_sizes_E.shape[0]
    block_rows, block_columns = tiles.block
    row_tiles, column_tiles = _ceil_div(num_out, block_rows), _ceil_div(num_columns, block_columns * tiles.cluster)
    group_tiles = row_tiles * column_tiles
    out_dtype = jnp.dtype(out_dtype)
    store_columns = LINE_BYTES // out_dtype.itemsize

    def body(table, x, dy, out, x_tiles, dy_tiles, stored, loaded, freed, masked):
        where = _position()
        # Large groups first, every other round in reverse: all clusters get about the same work.
        reverse = where.num_clusters - 1 - where.cluster
        rounds, rest = divmod(num_groups * group_tiles, where.num_clusters)
        num_tiles = rounds + ((reverse if rounds % 2 else where.cluster) < rest).astype(jnp.int32)

        def tile_at(number):
            index = number * where.num_clusters + jnp.where(_rem(number, 2) == 0, where.cluster, reverse)
            rank = _div(index, group_tiles)
            row_tile, column_tile = plgpu.planar_snake(
                index - rank * group_tiles, (row_tiles, column_tiles), 1, tiles.width
            )
            first, low, high = pl.multiple_of(table[rank, 1], ROW_ALIGNMENT), table[rank, 2], table[rank, 3]
            steps = jnp.where(high > low, _div(high - first + (TILE_K - 1), TILE_K), 0)
            column = (column_tile * tiles.cluster + where.block) * block_columns
            return _Tile(steps, table[rank, 0], row_tile * block_rows, column, first, low, high)

        def load(tile, k, slot):
            inner = pl.ds(tile.first + k * TILE_K, TILE_K)
            _load_shared_rows(tiles, x.at[inner, pl.ds(tile.row, block_rows)], x_tiles.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(dy.at[inner, pl.ds(tile.column, block_columns)], dy_tiles.at[slot], loaded.at[slot])

        def multiply(tile, k, slot, sums):
            start = tile.first + k * TILE_K

            @pl.when((start < tile.low) | (start + TILE_K > tile.high))
            def _mask():
                for shared in (x_tiles, dy_tiles):
                    half = shared.shape[2] // CONSUMERS
                    part = shared.at[slot, :, pl.ds(where.warpgroup * half, half)]
                    rows = start + lax.broadcasted_iota(jnp.int32, (TILE_K, half), 0)
                    rows = plgpu.layout_cast(rows, plgpu.Layout.WGMMA)
                    mine = (rows >= tile.low) & (rows < tile.high)
                    part[...] = jnp.where(mine, part[...], jnp.zeros((), part.dtype))
                plgpu.commit_smem()
                plgpu.barrier_arrive(masked)
                plgpu.barrier_wait(masked)

            row, column = tiles.part(where.warpgroup)
            x_tile = plgpu.transpose_ref(x_tiles.at[slot, :, pl.ds(row, tiles.rows)], (1, 0))
            plgpu.wgmma(sums, x_tile, dy_tiles.at[slot, :, pl.ds(column, tiles.columns)])

        def store(tile, number, part, r, c):
            row, column = (a + b for a, b in zip((tile.row, tile.column), tiles.part(where.warpgroup), strict=True))
            target = out.at[tile.group, pl.ds(row + r, STORE_ROWS), pl.ds(column + c, store_columns)]
            _store_through(stored.at[where.warpgroup, number % 2], part, target)

        _run(tiles, where, num_tiles, tile_at, load, multiply, store, store_columns, out_dtype, loaded, freed)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_groups, num_out, num_columns), out_dtype),
        scratch_types=dict(
            x_tiles=_shared((tiles.stages, TILE_K, block_rows), x_MD.dtype),
            dy_tiles=_shared((tiles.stages, TILE_K, block_columns), dy_MF.dtype),
            stored=_shared((CONSUMERS, 2, STORE_ROWS, store_columns), out_dtype),
            **_ring_barriers(tiles),
            masked=plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        **_launch(tiles),
        interpret=interpret,
    )
    return kernel(_group_table(group_sizes_E), x_MD, dy_MF)


# ---- the loop that all legs share ----


class _Position(NamedTuple):
    """Where this warpgroup is."""

    warpgroup: jax.Array
    block: jax.Array
    cluster: jax.Array
    num_clusters: int


class _Tile(NamedTuple):
    """What a block computes at a time: `steps` of K for the tile at (row, column) of the result, for `group`.

    first: the row of the operands that the group's tiles begin at; [low, high): the rows that the group owns.
    """

    steps: jax.Array
    group: jax.Array
    row: jax.Array
    column: jax.Array
    first: jax.Array
    low: jax.Array
    high: jax.Array


def _position() -> _Position:
    axis = lax.axis_index
    return _Position(axis("warpgroup"), axis("block"), axis("cluster"), lax.axis_size("cluster"))


def _run(
    tiles: Tiles,
    where: _Position,
    num_tiles: jax.Array,
    tile_at: Callable[[jax.Array], _Tile],
    load: Callable[[_Tile, jax.Array, jax.Array], None],
    multiply: Callable[[_Tile, jax.Array, jax.Array, Any], None],
    store: Callable[[_Tile, int, Any, int, int], None],
    store_columns: int,
    out_dtype: Any,
    loaded: Any,
    freed: Any,
) -> None:
    """The producer loads, the consumers multiply and store, `num_tiles` tiles of this block.

    load(tile, k, slot) and multiply(tile, k, slot, sums) are step k of a tile in a stage; store(tile, number, part, r, c) takes
    the part of 64 x `store_columns` results at (r, c) of the consumer's tile.
    """
    stages = tiles.stages

    @pl.when(where.warpgroup == CONSUMERS)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def one_tile(number, step):
            tile = tile_at(number)

            def one_step(k, step):
                slot = _rem(step, stages)
                plgpu.barrier_wait(freed.at[slot])
                load(tile, k, slot)
                return step + 1

            return lax.fori_loop(0, tile.steps, one_step, step)

        lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))
        for slot in range(stages):  # nothing may arrive at a block that is gone
            plgpu.barrier_wait(freed.at[slot])

    @pl.when(where.warpgroup < CONSUMERS)
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(freed.at[slot])

        def one_tile(number, step):
            tile = tile_at(number)

            def sum_up(sums):
                def one_step(k, step):
                    slot = _rem(step, stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    multiply(tile, k, slot, sums)
                    plgpu.wgmma_wait(1)

                    @pl.when(k > 0)
                    def _free_previous():
                        plgpu.barrier_arrive(freed.at[_rem(step + (stages - 1), stages)])

                    return step + 1

                end = lax.fori_loop(0, tile.steps, one_step, step)
                plgpu.wgmma_wait(0)

                @pl.when(tile.steps > 0)
                def _free_last():
                    plgpu.barrier_arrive(freed.at[_rem(end + (stages - 1), stages)])

                return sums[...].astype(out_dtype)

            values = pl.run_scoped(sum_up, plgpu.ACC((tiles.rows, tiles.columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
            number_stored = 0
            for r in range(0, tiles.rows, STORE_ROWS):
                for c in range(0, tiles.columns, store_columns):
                    store(tile, number_stored, values[r : r + STORE_ROWS, c : c + store_columns], r, c)
                    number_stored += 1
            return step + tile.steps

        lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load_shared_rows(tiles: Tiles, source: Any, target: Any, barrier: Any) -> None:
    """A copy that all blocks of the cluster get, each loading a part of it."""
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes="block" if tiles.cluster > 1 else None)


def _store_through(buffer: Any, part: Any, target: Any) -> None:
    """`part` to global memory by the copy engine, by way of one of two buffers.

    64 rows of a tile are an even number of parts, so that the two alternate from tile to tile as well.
    """
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    buffer[...] = part
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


def _store_rows(target: Any, part: Any, row: jax.Array, low: jax.Array, high: jax.Array, interpret: Any) -> None:
    """Those rows of `part` [64, C] into `target` whose number, counted from `row`, is in [low, high)."""
    if interpret:

        @pl.loop(jnp.maximum(low - row, 0), jnp.minimum(high - row, part.shape[0]))
        def _store_row(i):
            target[pl.ds(i, 1)] = lax.dynamic_slice_in_dim(part, i, 1)

        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar, scalar))
    def store(_, target, part, row, low, high):
        row, low, high = (s.registers.item() for s in (row, low, high))
        i32 = ir.IntegerType.get_signless(32)
        for at, registers in zip(part.layout.thread_idxs(part.shape), part.registers.flat, strict=True):
            number = arith.addi(row, arith.index_cast(i32, at[0]))
            after = arith.cmpi(arith.CmpIPredicate.sge, number, low)
            before = arith.cmpi(arith.CmpIPredicate.slt, number, high)
            with mgpu.when(arith.andi(after, before)):
                vector.store(registers, target, list(at))

    store(target, part, row, low, high)  # pyright: ignore[reportCallIssue]


# ---- what the kernels are started with ----


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """A buffer in shared memory whose last two axes lie as wgmma and the copy engine want them."""
    line = LINE_BYTES // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((ROW_ALIGNMENT, line)), plgpu.SwizzleTransform(LINE_BYTES)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _ring_barriers(tiles: Tiles) -> dict[str, Any]:
    """loaded: both operands of a stage are there. freed: all that read it, in all blocks of the cluster, are done."""
    freed = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiles.stages)
    if tiles.cluster > 1:
        freed = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=CONSUMERS, num_barriers=tiles.stages)
    return {"loaded": plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages), "freed": freed}


def _launch(tiles: Tiles) -> dict[str, Any]:
    """A persistent grid over all multiprocessors."""
    return {
        "grid": (num_cores() // tiles.cluster,),
        "grid_names": ("cluster",),
        "cluster": (tiles.cluster,),
        "cluster_names": ("block",),
        "num_threads": CONSUMERS + 1,
        "thread_name": "warpgroup",
        "compiler_params": plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    }


def num_cores() -> int:
    """Streaming multiprocessors of the device that is compiled for; 2 where there are none (interpreted on a CPU)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.num_cores if device else getattr(jax.devices()[0], "core_count", None)) or 2


def _row_tiles(group_sizes_E: jax.Array, num_rows: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """(int32 [T, 4]: group, first row, the rows [low, high) of the group; int32 [1], how many entries are tiles).

    The rows past the last group are one more group, E.
    """
    sizes_E = group_sizes_E.astype(jnp.int32)
    num_groups = sizes_E.shape[0]
    ends_G = jnp.concatenate([jnp.cumsum(sizes_E), jnp.full((1,), num_rows, jnp.int32)])
    starts_G = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends_G[:-1]])
    firsts_G = starts_G // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles_G = jnp.where(ends_G > starts_G, _ceil_div(ends_G - firsts_G, tile), 0)
    tile_ends_G = jnp.cumsum(tiles_G)
    index_T = jnp.arange(_ceil_div(num_rows, tile) + num_groups + 1, dtype=jnp.int32)
    group_T = jnp.sum(tile_ends_G[None, :] <= index_T[:, None], axis=1, dtype=jnp.int32)
    group_T = jnp.minimum(group_T, num_groups)
    first_T = firsts_G[group_T] + (index_T - (tile_ends_G - tiles_G)[group_T]) * tile
    return jnp.stack([group_T, first_T, starts_G[group_T], ends_G[group_T]], axis=1), tile_ends_G[-1:]


def _group_table(group_sizes_E: jax.Array) -> jax.Array:
    """int32 [E, 4], the largest group first: group, first row to load, its rows [low, high)."""
    sizes_E = group_sizes_E.astype(jnp.int32)
    index_E = jnp.arange(sizes_E.shape[0], dtype=jnp.int32)
    left, right = sizes_E[:, None], sizes_E[None, :]
    before_EE = (left > right) | ((left == right) & (index_E[:, None] < index_E[None, :]))
    rank_E = jnp.sum(before_EE, axis=0, dtype=jnp.int32)
    order_E = jnp.sum(jnp.where(rank_E[None, :] == index_E[:, None], index_E[None, :], 0), axis=1, dtype=jnp.int32)
    ends_E = jnp.cumsum(sizes_E)
    starts_E = ends_E - sizes_E
    firsts_E = starts_E // ROW_ALIGNMENT * ROW_ALIGNMENT
    return jnp.stack([order_E, firsts_E[order_E], starts_E[order_E], ends_E[order_E]], axis=1)


def _div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """a / b, rounded down, in the dtype of a (a Python number is int64 under jax_enable_x64)."""
    return lax.div(a, jnp.asarray(b, a.dtype))


def _rem(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """a - b (a / b), in the dtype of a."""
    return lax.rem(a, jnp.asarray(b, a.dtype))


def _ceil_div(a: Any, b: int) -> Any:
    """a / b, rounded up."""
    return -(-a // b)
