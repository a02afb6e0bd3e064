"""The Hopper kernels in Pallas' GPU interpreter against plain products, their tables of tiles, and what they are lowered to.

The interpreter of jax 0.10 raises on what the GPU's copy engine leaves out (columns past the last one) and knows no clusters, no
transposed operands and no layouts: there, the cases take whole blocks, clusters of one, and stand-ins for the operations.
"""

import dataclasses
import faulthandler
import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec
from reference import relative_norm

from moe_jax.collectives import vary_like
from moe_jax.kernels import hopper, portable
from moe_jax.kernels.grouped_matmul import grouped_matmul, input_gradient, weight_gradient
from moe_jax.kernels.tiles import Tiles

IS_COMPLETE = hasattr(plgpu, "InterpretGPUParams")
if IS_COMPLETE:
    INTERPRET = plgpu.InterpretGPUParams()
else:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    INTERPRET = InterpretGPUParams(out_of_bounds_reads="uninitialized")  # NaN, where the GPU reads zeros
HANG_SECONDS = 150  # where a thread of jax 0.10's interpreter raises, the others wait forever

F32_RELATIVE = 1e-6  # sums of at most a few hundred products
HALF_STEP = {"bfloat16": 4e-3, "float16": 5e-4}  # half a step of the result

SMALL = Tiles(rows=64, columns=128, stages=2)
BESIDE = dataclasses.replace(SMALL, side_by_side=True)
CLUSTER = dataclasses.replace(SMALL, stages=3, cluster=2 if IS_COMPLETE else 1)
INNER, OUT = (192, 192) if IS_COMPLETE else (128, 128)  # the former leave a part of the last block empty

# name: rows, group sizes. The rows past the sum hold NaN.
GROUPS = {
    "odd": (240, (0, 1, 7, 8, 9, 63, 64, 65)),
    "one holds all": (200, (0, 0, 200, 0)),
    "all empty": (136, (0, 0, 0)),
}


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    """Under a mesh that an earlier test left, the eight devices would wait for each other inside the interpreter."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])):
        yield
    faulthandler.cancel_dump_traceback_later()


class Flipped(tuple):
    """A range of a buffer that is read transposed."""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what the interpreter of jax 0.10 does not know: wgmma of transposed operands, and layouts."""
    if IS_COMPLETE:
        return
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

    to_range, get_content = utils.to_range, GPUSharedMemory.get_buffer_content

    def to_flipped_range(transforms):
        *others, last = transforms or (None,)
        return Flipped(to_range(tuple(others))) if hasattr(last, "permutation") else to_range(transforms)

    def get_flipped(memory, key, index, *args, **options):
        content, *rest = get_content(memory, key, tuple(index), *args, **options)
        return (content.T if isinstance(index, Flipped) else content), *rest

    monkeypatch.setattr(utils, "to_range", to_flipped_range)
    monkeypatch.setattr(GPUSharedMemory, "get_buffer_content", get_flipped)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr("moe_jax.kernels.choice.device_kind", lambda: "NVIDIA H200")


def draw(name, dtype="bfloat16", inner=INNER, out=OUT):
    """x, w, dy, sizes; x and dy are NaN in the rows of no group."""
    num_rows, sizes = GROUPS[name]
    rng = np.random.default_rng(0)
    shapes = (num_rows, inner), (len(sizes), inner, out), (num_rows, out)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    nothing = jnp.arange(num_rows)[:, None] >= sum(sizes)
    return jnp.where(nothing, jnp.nan, x), w, jnp.where(nothing, jnp.nan, dy), jnp.asarray(sizes, jnp.int32)


def by_group(x, w, dy, sizes):
    """y, dx and dw in float64; zeros in the rows of no group."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw, start = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start += size
    return {"forward": y, "input_gradient": dx, "weight_gradient": dw}


def run_leg(leg, tiles, x, w, dy, sizes, **options):
    if leg == "weight_gradient":
        options = {"out_dtype": jnp.float32, **options}
        return hopper.weight_gradient(x, dy, sizes, tiles=tiles, interpret=INTERPRET, **options)
    a, transpose = (dy, True) if leg == "input_gradient" else (x, False)
    return hopper.rows_times_matrix(a, w, sizes, transpose=transpose, tiles=tiles, interpret=INTERPRET)


LEGS = pytest.mark.parametrize("leg", ["forward", "input_gradient", "weight_gradient"])


@LEGS
@pytest.mark.parametrize(("name", "tiles", "dtype"), [
    ("odd", SMALL, "bfloat16"),
    ("one holds all", SMALL, "bfloat16"),
    ("all empty", SMALL, "bfloat16"),
    ("odd", BESIDE, "float16"),
    ("odd", CLUSTER, "bfloat16"),
], ids=lambda value: value if isinstance(value, str) else f"cluster{value.cluster}{'beside' * value.side_by_side}")  # fmt: skip
def test_a_leg_is_one_product_for_each_group(leg, name, tiles, dtype, stand_ins):
    arrays = draw(name, dtype)
    found = np.asarray(run_leg(leg, tiles, *arrays), np.float64)
    expected = by_group(*arrays)[leg]
    tolerance = F32_RELATIVE if leg == "weight_gradient" else HALF_STEP[dtype]
    assert relative_norm(found, expected) < tolerance
    if leg != "weight_gradient":
        assert not np.any(found[sum(GROUPS[name][1]) :])


def test_the_weight_gradient_is_rounded_once(stand_ins):
    arrays = draw("odd")
    found = run_leg("weight_gradient", SMALL, *arrays, out_dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    expected = jnp.asarray(by_group(*arrays)["weight_gradient"], jnp.bfloat16)
    assert np.mean(np.asarray(found != expected)) < 1e-3  # ties, decided by the order of the float32 sum


def test_the_public_legs_take_any_number_of_rows_and_add_to_a_total(stand_ins, on_h200, monkeypatch):
    for name in ("rows_times_matrix", "weight_gradient"):
        monkeypatch.setattr(hopper, name, partial(getattr(hopper, name), interpret=INTERPRET))
    monkeypatch.setattr("moe_jax.kernels.choice.default_tiles", lambda shape: SMALL)
    x, w, dy, sizes = draw("odd", inner=128, out=128)
    x, dy = x[:-3], dy[:-3]
    expected = by_group(x, w, dy, sizes)
    total = np.random.default_rng(1).normal(size=w.shape).astype(np.float32)
    assert relative_norm(grouped_matmul(x, w, sizes).astype(jnp.float32), expected["forward"]) < HALF_STEP["bfloat16"]
    with pytest.raises(ValueError, match="leave one of them out"):
        weight_gradient(x, dy, sizes, jnp.asarray(total), out_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="must have one dtype, not bfloat16 and float32"):
        grouped_matmul(x, w.astype(jnp.float32), sizes)
    found = weight_gradient(x, dy, sizes, jnp.asarray(total))
    assert found.dtype == jnp.float32
    assert relative_norm(found, expected["weight_gradient"] + total) < F32_RELATIVE
    assert np.array_equal(np.asarray(found)[0], total[0])  # an empty group adds nothing


# ---- tables of tiles ----

NUM_ROWS, NUM_GROUPS = 1400, 7  # always the same, so that nothing is compiled anew
SIZES = st.lists(st.integers(0, 200), min_size=NUM_GROUPS, max_size=NUM_GROUPS)
row_tiles = jax.jit(hopper._row_tiles, static_argnums=(1, 2))
group_table = jax.jit(hopper._group_table)


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, is_full=st.booleans(), tile=st.sampled_from([64, 128, 256]))
def test_every_row_is_stored_by_one_tile_of_its_group(sizes, is_full, tile):
    if is_full:
        sizes[-1] += NUM_ROWS - sum(sizes)
    table, count = map(np.asarray, row_tiles(jnp.asarray(sizes, jnp.int32), NUM_ROWS, tile))
    ends = np.cumsum([*sizes, NUM_ROWS - sum(sizes)])
    starts = ends - np.diff(ends, prepend=0)
    group_of_row = np.repeat(np.arange(NUM_GROUPS + 1), ends - starts)
    stored = np.zeros(NUM_ROWS, int)
    assert count[0] <= len(table)
    for group, first, low, high in table[: count[0]]:
        assert first % 8 == 0
        assert (low, high) == (starts[group], ends[group])
        rows = slice(max(first, low), min(first + tile, high))
        assert rows.start < rows.stop
        assert np.all(group_of_row[rows] == group)
        stored[rows] += 1
    assert np.all(stored == 1)
    expected = [-(-(end - start // 8 * 8) // tile) for start, end in zip(starts, ends, strict=True) if end > start]
    assert count[0] == sum(expected)


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES)
def test_groups_are_ordered_by_size_and_every_one_is_there(sizes):
    table = np.asarray(group_table(jnp.asarray(sizes, jnp.int32)))
    ends = np.cumsum(sizes)
    order = sorted(range(NUM_GROUPS), key=lambda e: (-sizes[e], e))
    expected = [(e, (ends[e] - sizes[e]) // 8 * 8, ends[e] - sizes[e], ends[e]) for e in order]
    assert table.tolist() == [list(map(int, row)) for row in expected]


# ---- what the legs become ----


def abstract_arrays(num_rows, num_groups, inner, out):
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((num_groups,), jnp.int32)
    return array((num_rows, inner)), array((num_groups, inner, out)), array((num_rows, out)), sizes


PUBLIC = {
    "forward": lambda x, w, dy, sizes: grouped_matmul(x, w, sizes),
    "input_gradient": lambda x, w, dy, sizes: input_gradient(dy, w, sizes),
    "weight_gradient": lambda x, w, dy, sizes: weight_gradient(x, dy, sizes),
    "weight_gradient, added": lambda x, w, dy, sizes: weight_gradient(x, dy, sizes, jnp.ones(w.shape, jnp.float32)),
}


def all_legs(x, w, dy, sizes):
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, vary_like(w, x), sizes), x, w)
    return y, *pull(dy)


def cuda_text(f, arrays):
    return jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def assert_kernels_only(text, number, largest):
    """`number` calls of kernels, no product besides, and no array of more than `largest` numbers."""
    lines = text.splitlines()
    rest = "\n".join(line for line in lines if "custom_call @mosaic_gpu" not in line)  # they hold the kernel as text
    assert len(lines) - len(rest.splitlines()) == number
    assert not re.search(r"dot_general|ragged_dot|custom_call", rest)
    sizes = [np.prod([int(n) for n in shape.split("x")]) for shape in re.findall(r"tensor<((?:\d+x)*\d+)x[a-z]", rest)]
    assert max(sizes) <= largest


@pytest.mark.parametrize("leg", PUBLIC)
def test_a_leg_is_lowered_to_one_kernel_and_no_dense_product(leg, on_h200):
    num_rows, num_groups, inner, out = 4096, 128, 256, 384
    text = cuda_text(PUBLIC[leg], abstract_arrays(num_rows, num_groups, inner, out))
    assert_kernels_only(text, 1, num_groups * inner * out)


def test_rows_that_do_not_divide_by_eight_are_padded(on_h200):
    arrays = abstract_arrays(1021, 16, 128, 192)
    text = cuda_text(all_legs, arrays)
    assert_kernels_only(text, 3, 1024 * 192 * 2)
    calls = re.findall(r"custom_call @mosaic_gpu.*", text)
    assert all("tensor<1024x" in call and "tensor<1021x" not in call for call in calls)
    assert [a.shape for a in jax.eval_shape(all_legs, *arrays)] == [(1021, 192), (1021, 128), (16, 128, 192)]


@pytest.mark.parametrize("experts", ["cut", "replicated"])
def test_the_legs_lower_inside_shard_map(experts, on_h200):
    """With its check of what varies over the mesh: the gradient of replicated weights is summed over it."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    cut, none = PartitionSpec("expert"), PartitionSpec()
    w = cut if experts == "cut" else none
    num_rows, inner, out = 1024, 128, 192
    arrays = abstract_arrays(num_rows, 16, inner, out)
    with jax.set_mesh(mesh):
        text = cuda_text(jax.shard_map(all_legs, in_specs=(cut, w, cut, w), out_specs=(cut, cut, w)), arrays)
    assert_kernels_only(text, 3, max(num_rows * out, 16 * inner * out))
    assert ("all_reduce" in text) == (experts == "replicated")


def test_a_total_is_added_to_in_a_loop_inside_shard_map(on_h200):
    """As the further blocks of a training step do; each device has its own number of them."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    cut = PartitionSpec("expert")

    def legs(x, w, dy, sizes):
        start = jnp.sum(sizes), vary_like(jnp.ones(w.shape, jnp.float32), x)
        step = lambda carry: (carry[0] - 1, weight_gradient(x, dy, sizes, carry[1]))  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[0] > 0, step, start)[1]

    with jax.set_mesh(mesh):
        text = cuda_text(jax.shard_map(legs, in_specs=cut, out_specs=cut), abstract_arrays(1024, 16, 128, 192))
    assert_kernels_only(text, 1, 16 * 128 * 192)


@pytest.mark.parametrize("num_groups", [8, 64])
@pytest.mark.parametrize("leg", ["forward", "input_gradient", "weight_gradient"])
def test_the_portable_program_has_no_product_of_all_rows_with_every_matrix(leg, num_groups):
    """By the compiler's own count, in which a loop whose length is data counts once."""
    num_rows, inner, out = 4096, 32, 48
    compiled = jax.jit(PUBLIC[leg]).lower(*abstract_arrays(num_rows, num_groups, inner, out)).compile()
    product = 2 * inner * out
    tile = portable._tile_size(num_rows, num_groups)
    assert tile * product <= compiled.cost_analysis()["flops"] <= 2 * (num_rows + num_groups * tile) * product
