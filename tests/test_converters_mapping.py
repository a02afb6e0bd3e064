"""The table of tensors: complete, reversible, and readable in any rectangular slice."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_hf import CONFIGS, MIX, Q3

from converters.families import FAMILIES
from converters.families.common import entries
from converters.io import DTYPES
from converters.mapping import WHOLE, Block, Entry, extract, place, problems_of, read_block
from moe_jax.config import ModelConfig
from moe_jax.errors import ConfigError
from moe_jax.model import parameter_shapes
from moe_jax.source import TensorInfo

MODELS = {
    **CONFIGS,
    "mixtral tied": MIX | {"tie_word_embeddings": True},
    "qwen3_moe dense pattern": Q3 | {"decoder_sparse_step": 2, "attention_bias": True},
    "qwen3_moe odd layer": Q3 | {"mlp_only_layers": [0, 3]},
}
LAYOUTS = [(name, i) for name, config in MODELS.items() for i in range(len(FAMILIES[config["model_type"]].layouts))]


def table(name: str, layout: int) -> tuple[ModelConfig, list[Block]]:
    family = FAMILIES[MODELS[name]["model_type"]]
    config = family.model_config(MODELS[name])
    rows = entries(config, family.layouts[layout], with_head=not config.tie_word_embeddings)
    return config, place(rows, config)


def random_leaves(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in parameter_shapes(config).items()}


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_rows_cover_every_parameter_exactly_once(name: str, layout: int) -> None:
    config, blocks = table(name, layout)
    counts = {leaf: np.zeros(shape, int) for leaf, shape in parameter_shapes(config).items()}
    for block in blocks:
        counts[block.leaf][block.index] += 1
    assert all((count == 1).all() for count in counts.values())
    assert len({block.entry.name for block in blocks}) == len(blocks)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_extracting_and_reading_is_the_identity(name: str, layout: int) -> None:
    config, blocks = table(name, layout)
    leaves = random_leaves(config)
    tensors = {b.entry.name: extract(b, lambda leaf, prefix: leaves[leaf][prefix], "F32") for b in blocks}
    assert all(tensors[b.entry.name].shape == b.entry.shape for b in blocks)
    for leaf, value in leaves.items():
        mine = [block for block in blocks if block.leaf == leaf]
        np.testing.assert_array_equal(read_block(mine, [WHOLE] * value.ndim, tensors.__getitem__), value)


def draw_slice(data: st.DataObject, n: int) -> slice:
    start = data.draw(st.integers(0, n))
    return data.draw(st.sampled_from([WHOLE, slice(None, start), slice(start, data.draw(st.integers(start, n)))]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slice_equals_the_slice_of_the_whole(data: st.DataObject) -> None:
    _, blocks = table(*data.draw(st.sampled_from(LAYOUTS)))
    leaf, shape = data.draw(st.sampled_from(sorted({(b.leaf, b.leaf_shape) for b in blocks})))
    slices = [draw_slice(data, n) for n in shape]
    rng = np.random.default_rng(2)
    mine = [block for block in blocks if block.leaf == leaf]
    tensors = {b.entry.name: rng.standard_normal(b.entry.shape).astype(DTYPES["BF16"]) for b in mine}
    whole = read_block(mine, [WHOLE] * len(slices), tensors.__getitem__)
    part = read_block(mine, slices, tensors.__getitem__)
    assert part.dtype == np.float32
    np.testing.assert_array_equal(part, whole[tuple(slices)])


def test_gate_and_up_of_an_expert_land_where_the_contract_says() -> None:
    config, blocks = table("mixtral", 0)
    rng = np.random.default_rng(3)
    tensors = {b.entry.name: rng.standard_normal(b.entry.shape).astype(np.float32) for b in blocks}
    layer = "model.layers.1.block_sparse_moe.experts.2"
    by_leaf = lambda leaf: read_block(  # noqa: E731
        [b for b in blocks if b.leaf == leaf], [WHOLE] * len(parameter_shapes(config)[leaf]), tensors.__getitem__
    )
    gate_up, down = by_leaf("runs.0.0.mlp.gate_up"), by_leaf("runs.0.0.mlp.down")
    np.testing.assert_array_equal(gate_up[1, 2, :, 0], tensors[f"{layer}.w1.weight"].T)
    np.testing.assert_array_equal(gate_up[1, 2, :, 1], tensors[f"{layer}.w3.weight"].T)
    np.testing.assert_array_equal(down[1, 2], tensors[f"{layer}.w2.weight"].T)
    query = by_leaf("runs.0.0.attn.q")  # [R, H, N, D]
    np.testing.assert_array_equal(query[0, :, 3, 5], tensors["model.layers.0.self_attn.q_proj.weight"][3 * 16 + 5])
    output = by_leaf("runs.0.0.attn.o")  # [R, N, D, H]
    np.testing.assert_array_equal(output[0, 3, 5], tensors["model.layers.0.self_attn.o_proj.weight"][:, 3 * 16 + 5])


def test_only_the_tensors_of_the_region_are_looked_at() -> None:
    _, blocks = table("qwen3_moe", 0)
    mine = [b for b in blocks if b.leaf == "runs.0.0.mlp.down"]
    asked: list[str] = []

    def view(name: str) -> np.ndarray:
        asked.append(name)
        return np.zeros((64, 48), np.float32)

    read_block(mine, [slice(1, 3), slice(6, 8), WHOLE, WHOLE], view)
    assert asked == [f"model.layers.{n}.mlp.experts.{e}.down_proj.weight" for n in (1, 2) for e in (6, 7)]


def test_reading_allocates_no_more_than_the_region() -> None:
    entry = Entry("x", "x", (), (1, 0), (2048, 1024))
    block = Block(entry, "x", (), (1024, 2048))
    tensor = np.ones((2048, 1024), DTYPES["BF16"])
    tracemalloc.start()
    part = read_block([block], [slice(0, 128), WHOLE], lambda name: tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.shape == (128, 2048)
    assert peak < 1.2 * part.nbytes


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_half_precision_number_survives_both_ways(dtype: str) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    every = every[np.isfinite(every.astype(np.float32))]
    block = Block(Entry("x", "x", (), (0,), every.shape), "x", (), every.shape)
    value = read_block([block], [WHOLE], lambda name: every)
    assert extract(block, lambda leaf, prefix: value, dtype).tobytes() == every.tobytes()


def test_values_beyond_the_dtype_are_refused_by_name() -> None:
    block = Block(Entry("big.weight", "x", (), (0,), (2,)), "x", (), (2,))
    with pytest.raises(ConfigError, match=r"big\.weight.*F16"):
        extract(block, lambda leaf, prefix: np.array([1, 1e6], np.float32), "F16")


def test_all_problems_are_gathered_with_their_names() -> None:
    rows = [Entry(name, "embed.weight", (), (0, 1), (4, 2)) for name in ("a", "b", "c", "d")]
    good: dict[str, Any] = {"dtype": "F32", "shape": (4, 2)}
    tensors = [TensorInfo("a", **good), TensorInfo("a", **good), TensorInfo("b", "F32", (2, 4)),
               TensorInfo("c", "F64", (4, 2)), TensorInfo("zzz", **good)]  # fmt: skip
    text = "; ".join(problems_of(rows, tensors, " to us"))
    assert "1 tensor(s) missing: d" in text
    assert "1 tensor(s) unknown to us: zzz" in text
    assert "1 tensor(s) duplicate: a" in text
    assert "b has shape [2, 4], but the config asks for [4, 2]" in text
    assert "c has dtype F64, allowed are F32, BF16, F16" in text


def test_long_lists_of_names_are_cut_with_their_count() -> None:
    rows = [Entry(f"t{i}", "embed.weight", (), (0, 1), (4, 2)) for i in range(50)]
    (problem,) = problems_of(rows, [])
    assert problem.startswith("50 tensor(s) missing: t0, t1,")
    assert problem.endswith("t19, ... and 30 more")
