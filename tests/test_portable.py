"""The tiles of the portable grouped product: they cover every row of a group once, and little else."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels import portable

pytestmark = pytest.mark.usefixtures("one_device")


def rows_of_visits(sizes, num_rows, tile):
    """(group, first row, rows of the tile, whether it may be moved back) of every visit, read from the plan."""
    visits, part = portable._visits(jnp.array(sizes, jnp.int32), num_rows, tile), portable._part_size(tile)
    num_rest = -(-tile // part)
    last = [] if part == tile else [part, tile]  # a rest that is a whole tile may be moved back in its own loop
    sizes_of_loops = [tile, *(min(tile, part * (k + 1)) for k in range(num_rest)), *last]
    found = []
    for index, (size, (first, end)) in enumerate(zip(sizes_of_loops, visits.bounds, strict=True)):
        moved_back = index >= (1 if part == tile else len(sizes_of_loops) - 2)
        found += [
            (int(visits.groups_V[v]), int(visits.starts_V[v]), size, moved_back) for v in range(int(first), int(end))
        ]
    assert len(found) == sum(int(end - first) for first, end in visits.bounds)
    return found


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=5, max_size=5),
    tile=st.sampled_from([1, 8, 16, 37, 64]),
    spare=st.integers(0, 30),
)
def test_tiles_cover_every_row_of_a_group_once_and_stay_inside(sizes, tile, spare):
    num_rows = max(sum(sizes) + spare, tile)
    starts = np.cumsum([0, *sizes])
    seen = np.zeros((len(sizes), num_rows), int)
    for group, start, size, moved_back in rows_of_visits(sizes, num_rows, tile):
        assert start + size <= num_rows or moved_back
        seen[group, start : min(start + size, starts[group + 1])] += 1
    for group, size in enumerate(sizes):
        assert np.all(seen[group, starts[group] : starts[group] + size] == 1)
        assert np.sum(seen[group]) == size


@pytest.mark.parametrize("kind", ["even", "skewed", "small ones last"])
@pytest.mark.parametrize("num_groups", [8, 64])
def test_tiles_waste_at_most_a_part_for_each_group(num_groups, kind):
    num_rows = 16384
    shares = np.random.default_rng(0).dirichlet(np.full(num_groups, 2.0 if kind == "skewed" else 100.0))
    sizes = np.random.default_rng(0).multinomial(num_rows, shares)
    if kind == "small ones last":
        sizes = [num_rows - num_groups + 1, *[1] * (num_groups - 1)]
    tile = portable.FULL_TILES * portable._tile_size(num_rows, num_groups)
    computed = sum(size for *_, size, _ in rows_of_visits(sizes, num_rows, tile))
    assert computed <= num_rows + num_groups * portable._part_size(tile) + tile  # one full tile may be moved back
