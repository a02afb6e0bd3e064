"""Which implementation a leg takes on which device, the tables of tiles, and how `moe-jax tune` fills one."""

import dataclasses
import json
import statistics
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from moe_jax.errors import ConfigError
from moe_jax.kernels import choice, tuning
from moe_jax.kernels.choice import LEGS, Choice, Shape, choose
from moe_jax.kernels.tiles import Tiles
from moe_jax.kernels.tuning import KNOWN_MODELS, MoEShape, add_entries, candidates, leg_shapes, tune

H200 = "NVIDIA H200"
SHAPE = Shape("forward", jnp.bfloat16, 131072, 128, 2048, 1536)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.TILES_VARIABLE, raising=False)
    choice._tables.cache_clear()
    choice._warn_once.cache_clear()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda device: monkeypatch.setattr(choice, "device_kind", lambda: device)


@pytest.mark.parametrize(("device", "implementation"), [
    ("cpu", "portable"),
    ("NVIDIA A100-SXM4-40GB", "portable"),
    ("NVIDIA B200", "portable"),
    ("NVIDIA GB200", "portable"),
    ("NVIDIA H200", "mosaic_gpu"),
    ("NVIDIA H100 80GB HBM3", "mosaic_gpu"),
    ("NVIDIA GH200 480GB", "mosaic_gpu"),
    ("NVIDIA H20", "mosaic_gpu"),
])  # fmt: skip
def test_hopper_gpus_take_the_hopper_kernels(device: str, implementation: str, on: Any, caplog: Any) -> None:
    on(device)
    chosen = choose(SHAPE)
    assert chosen.implementation == implementation
    assert (chosen.tiles is not None) == (implementation == "mosaic_gpu")
    assert chosen.reason is None
    assert caplog.messages == []


def test_without_a_gpu_the_device_is_a_cpu() -> None:
    assert choice.device_kind() == "cpu"
    assert choose(SHAPE) == Choice("portable", None, None)


@pytest.mark.parametrize(("change", "reason"), [
    ({"dtype": jnp.float32}, "dtype is float32; it takes bfloat16 and float16"),
    ({"inner": 96}, "the inner width is 96; it takes multiples of 64"),
    ({"out": 96}, "the outer width is 96; it takes multiples of 64"),
])  # fmt: skip
def test_an_obstacle_is_said_once(change: dict[str, Any], reason: str, on: Any, caplog: Any) -> None:
    on(H200)
    for _ in range(2):
        assert choose(SHAPE._replace(**change)) == Choice("portable", None, reason)
    assert caplog.messages == [f"grouped_matmul: the forward leg does not use the Hopper kernel: {reason}"]


@pytest.mark.parametrize(("num_rows", "num_groups", "rows_class"), [
    (1024, 1, 1024), (1023, 1, 512), (1025, 1, 1024), (131072, 128, 1024), (131071, 128, 512), (5, 8, 1), (0, 8, 1),
])  # fmt: skip
def test_the_rows_class_is_a_power_of_two_at_most_the_mean(num_rows: int, num_groups: int, rows_class: int) -> None:
    assert SHAPE._replace(num_rows=num_rows, num_groups=num_groups).rows_class == rows_class


def test_default_tiles_leave_little_of_their_last_column_empty() -> None:
    assert choice.default_tiles(SHAPE) == Tiles()
    assert choice.default_tiles(SHAPE._replace(out=128)).columns == 128
    assert choice.default_tiles(SHAPE._replace(leg="input_gradient", inner=128)).columns == 128
    assert choice.default_tiles(SHAPE._replace(leg="input_gradient", out=128)) == Tiles()


# ---- tables ----


def test_every_entry_of_the_shipped_table_builds_tiles() -> None:
    path = Path(str(resources.files("moe_jax.kernels").joinpath("tiles.json")))
    for key, entry in choice.read_table(path).items():
        assert choice.is_hopper(key)
        assert any(f" {leg} " in key for leg in LEGS)
        assert choice.tiles_entry(Tiles(**entry)) == entry


def test_a_table_of_ones_own_goes_before_the_shipped_one(tmp_path: Path, on: Any, monkeypatch: Any) -> None:
    on(H200)
    tiles, shipped, key = Tiles(rows=128, columns=128, stages=3, width=2), Tiles(width=3), choice.table_key(SHAPE, H200)
    add_entries(tmp_path / "tiles.json", {key: shipped})
    monkeypatch.setattr(choice.resources, "files", lambda _: tmp_path)
    assert choose(SHAPE).tiles == shipped
    add_entries(tmp_path / "own.json", {key: tiles})
    monkeypatch.setenv(choice.TILES_VARIABLE, str(tmp_path / "own.json"))
    assert choose(SHAPE).tiles == tiles
    assert choose(SHAPE._replace(num_rows=1000)).tiles != tiles
    assert choose(SHAPE._replace(leg="weight_gradient")).tiles != tiles
    monkeypatch.setattr(choice, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    assert choose(SHAPE).tiles != tiles


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", '{"key": {"lines": 3}}', '{"key": {"columns": 64}}', '{"key": {"stages": 1}}', '{"key": 7}', None],
)
def test_a_broken_table_is_named(content: str | None, tmp_path: Path, on: Any, monkeypatch: Any) -> None:
    on(H200)
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(choice.TILES_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=rf"own\.json.*{choice.TILES_VARIABLE}.*must be a table of tiles"):
        choose(SHAPE)


def test_entries_are_added_to_a_table_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    add_entries(path, {})
    assert choice.read_table(path) == {}
    add_entries(path, {"b": Tiles(width=2), "a": Tiles()})
    add_entries(path, {"b": Tiles(width=4), "c": Tiles(cluster=2)})
    assert json.loads(path.read_text()) == {"a": {}, "b": {"width": 4}, "c": {"cluster": 2}}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiles.json"]


def test_a_table_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "tiles.json"
    add_entries(path, {"a": Tiles()})
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        add_entries(path, {"b": Tiles()})
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiles.json"]


# ---- tune ----


def test_both_matrices_have_every_leg() -> None:
    shapes = leg_shapes(KNOWN_MODELS["Qwen3-30B-A3B"])
    assert len(shapes) == 6
    assert shapes["gate_up", "forward"] == SHAPE
    assert shapes["down", "weight_gradient"][2:] == (131072, 128, 768, 2048)
    assert {name: model.num_rows for name, model in KNOWN_MODELS.items()} == {
        "Mixtral-8x7B": 16384, "Qwen3-30B-A3B": 131072, "OLMoE-1B-7B": 131072, "large": 262144,
    }  # fmt: skip


def test_candidates_start_with_the_default_and_waste_few_columns() -> None:
    wide = candidates(SHAPE._replace(out=2048))
    assert wide[0] == Tiles()
    assert len(wide) == len(set(wide)) == 20
    assert {tiles.cluster for tiles in wide} == {1, 2}
    assert any(tiles.side_by_side for tiles in wide)
    narrow = candidates(SHAPE._replace(leg="input_gradient", inner=768))  # two blocks of 256 columns make 1024
    assert narrow[0] == Tiles()
    assert {tiles.block[1] * tiles.cluster for tiles in narrow} == {128, 256}
    assert candidates(SHAPE._replace(out=64)) == [choice.default_tiles(SHAPE._replace(out=64))]


def fake_seconds(shape: Shape, tiles: list[Tiles], say: Any) -> tuning.Seconds:
    """The last candidate is the fastest by its median, though not by its best round."""
    seconds = {each: [2.0, 2.0, 0.5] for each in tiles}
    return seconds | {tiles[-1]: [1.0, 1.0, 9.0]}


def test_tune_keeps_the_fastest_of_every_leg(tmp_path: Path, on: Any, monkeypatch: Any) -> None:
    on(H200)
    path, said = tmp_path / "tiles.json", []
    add_entries(path, {"another": Tiles()})
    models = {"one": MoEShape(4096, 2, 16, 512, 256), "odd": MoEShape(4096, 2, 16, 512, 96)}
    legs = ("forward", "weight_gradient")
    tune(models, path, legs, measure=fake_seconds, say=said.append)
    table = choice.read_table(path)
    assert len(table) == 1 + 2 * 2 + 2  # gate_up of "odd" is 192 wide; its down has no Hopper kernel
    assert "another" in table
    monkeypatch.setenv(choice.TILES_VARIABLE, str(path))
    for shape in leg_shapes(models["one"], legs=legs).values():
        assert choose(shape).tiles == candidates(shape)[-1]
    assert sum("no Hopper kernel for this leg: the inner width is 96" in line for line in said) == 2
    assert said[0] == "[1/8] one gate_up forward: 8192 rows in 16 groups, 512 x 512"
    assert "(default)" in "".join(said)
    rate = 2 * 8192 * 512 * 512 / 1.0 / 1e12
    assert said[1].split()[0] == f"{rate:.1f}"


def test_tune_says_when_nothing_works(tmp_path: Path, on: Any) -> None:
    on(H200)
    said: list[str] = []
    tune(
        {"one": MoEShape(64, 2, 4, 64, 64)},
        tmp_path / "tiles.json",
        ("forward",),
        measure=lambda *_: {},
        say=said.append,
    )
    assert said.count("  no candidate works") == 2
    assert choice.read_table(tmp_path / "tiles.json") == {}


def test_tune_needs_a_hopper_gpu(tmp_path: Path, on: Any) -> None:
    on("NVIDIA B200")
    with pytest.raises(ConfigError, match=r"kernels for Hopper GPUs.*runs on 'NVIDIA B200'"):
        tune({"one": MoEShape(64, 2, 4, 64, 64)}, tmp_path / "tiles.json")
    assert list(tmp_path.iterdir()) == []


def test_candidates_that_fail_or_differ_are_said_and_left_out(monkeypatch: Any) -> None:
    """With stand-ins for the kernels: one exceeds shared memory, one is wrong, one gives NaN."""
    good, too_large, wrong, nan = (dataclasses.replace(Tiles(), width=width) for width in (1, 2, 3, 4))

    def call(shape: Shape, tiles: Tiles, a: Any, b: Any, sizes_E: Any) -> Any:
        if tiles == too_large:
            raise ValueError("exceeds available shared memory\nmore")
        return a + {wrong: 1.0, nan: jnp.nan}.get(tiles, 0.0)

    monkeypatch.setattr(tuning, "leg_call", call)
    monkeypatch.setattr(tuning, "portable_call", lambda shape, a, b, sizes_E: a)
    monkeypatch.setattr(tuning, "BURST_SECONDS", 1e-4)
    said: list[str] = []
    shape = Shape("weight_gradient", jnp.bfloat16, 100, 4, 64, 64)
    seconds = tuning.measure_tiles(shape, [too_large, good, wrong, nan], said.append)
    assert list(seconds) == [good]
    assert len(seconds[good]) == tuning.ROUNDS
    assert statistics.median(seconds[good]) > 0
    assert [line.split(":")[0] for line in said] == [
        "  does not work", *(f"  differs by {number} from the portable product" for number in ("1.0e+00", "nan"))
    ]  # fmt: skip
    assert said[0].endswith("exceeds available shared memory")


@pytest.mark.parametrize("leg", LEGS)
def test_inputs_fit_the_kernels(leg: str) -> None:
    a, b, sizes_E = tuning.leg_inputs(Shape(leg, jnp.bfloat16, 101, 4, 64, 128))
    rows = 104  # the next multiple of eight
    shapes = {"forward": ((rows, 64), (4, 64, 128)), "input_gradient": ((rows, 128), (4, 64, 128)),
              "weight_gradient": ((rows, 64), (rows, 128))}  # fmt: skip
    assert (a.shape, b.shape) == shapes[leg]
    assert int(sizes_E.sum()) == 101
