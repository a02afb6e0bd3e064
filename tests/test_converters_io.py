"""Safetensors folders: what is read, what is refused and how it is written."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from converters.io import (
    INDEX_NAME,
    CheckpointReader,
    assign_shards,
    carried_files,
    dtype_name,
    num_bytes,
    parse_size,
    read_config,
    write_checkpoint,
)
from moe_jax.errors import ConfigError
from moe_jax.source import TensorInfo

TENSORS = {
    "a": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b": (np.arange(1200) / 7).astype(ml_dtypes.bfloat16).reshape(3, 20, 20),
    "c": np.array([65504, 6e-8, -0.0, 1], np.float16),
    "scalar": np.array(3, np.int64),
    "nothing": np.zeros((0, 4), np.float32),
}
TWO_FILES: tuple[str, ...] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def make_folder(folder: Path, files: dict[str, dict[str, np.ndarray]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    return folder


def two_shards(folder: Path) -> Path:
    index = {"a": TWO_FILES[0], "c": TWO_FILES[0], "b": TWO_FILES[1]}
    files = {TWO_FILES[0]: {n: TENSORS[n] for n in "ac"}, TWO_FILES[1]: {"b": TENSORS["b"]}}
    return make_folder(folder, files, index)


def write_raw(folder: Path, header: object, data: bytes = b"") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "weights.safetensors"])
def test_reader_gives_every_tensor_exactly(tmp_path: Path, file: str) -> None:
    reader = CheckpointReader(make_folder(tmp_path / "in", {file: TENSORS}))
    assert reader.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert reader.tensors[name] == TensorInfo(name, dtype_name(tensor.dtype), tensor.shape, file)
        view = reader.view(name)
        assert view.dtype == tensor.dtype
        assert view.tobytes() == tensor.tobytes()


def test_views_are_lazy_and_read_only(tmp_path: Path) -> None:
    view = CheckpointReader(two_shards(tmp_path / "in")).view("a")
    assert not view.flags.owndata
    assert not view.flags.writeable


def test_the_data_may_start_at_any_offset(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # an odd start: files of other writers need not be aligned
    folder = write_raw(tmp_path / "in", text, np.array([1.5, -2], np.float32).tobytes())
    np.testing.assert_array_equal(CheckpointReader(folder).view("x"), [1.5, -2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1024]), "cut off"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "cut off"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), "git-lfs"),
        (lambda path: path.unlink(), "missing"),
    ],
)
def test_a_broken_shard_is_refused_by_its_name(tmp_path: Path, spoil, message: str) -> None:
    """C18: cut off, empty, or a git-lfs pointer in a shard's place."""
    folder = two_shards(tmp_path / "in")
    spoil(folder / TWO_FILES[1])
    with pytest.raises(ConfigError, match=message) as error:
        CheckpointReader(folder)
    assert TWO_FILES[1] in str(error.value)
    assert TWO_FILES[0] not in str(error.value)


def test_all_broken_shards_are_reported_together(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "in")
    (folder / TWO_FILES[0]).write_bytes(b"")
    (folder / TWO_FILES[1]).unlink()
    with pytest.raises(ConfigError, match=f"{TWO_FILES[1]}.*missing|{TWO_FILES[0]}.*{TWO_FILES[1]}") as error:
        CheckpointReader(folder)
    assert TWO_FILES[0] in str(error.value)


@pytest.mark.parametrize(
    "file", ["../evil.safetensors", "/tmp/evil.safetensors", "sub/../../evil.safetensors", "evil.bin"]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    folder = make_folder(tmp_path / "in", {}, {"a": file})
    save_file(TENSORS, tmp_path / "evil.safetensors")
    with pytest.raises(ConfigError, match="inside the folder"):
        CheckpointReader(folder)


def test_an_index_must_agree_with_the_files(tmp_path: Path) -> None:
    index = {"a": TWO_FILES[0], "ghost": TWO_FILES[0]}
    folder = make_folder(tmp_path / "in", {TWO_FILES[0]: {"a": TENSORS["a"], "c": TENSORS["c"]}}, index)
    with pytest.raises(ConfigError, match=r"ghost \(in model-00001.*does not list: c"):
        CheckpointReader(folder)


@pytest.mark.parametrize("text", ["[]", "{}", "not json", '{"weight_map": []}'])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path / "in", {TWO_FILES[0]: TENSORS})
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(ConfigError, match="no safetensors index"):
        CheckpointReader(folder)


@pytest.mark.parametrize("chosen", [0, 1])
def test_the_index_decides_between_two_copies_of_a_key(tmp_path: Path, chosen: int) -> None:
    """C21: the index's value; without an index a refusal."""
    shards = [{"x": np.full(3, i, np.float32), f"only{i}": np.ones(1)} for i in range(2)]
    files = dict(zip(TWO_FILES, shards, strict=True))
    index = {"x": TWO_FILES[chosen], "only0": TWO_FILES[0], "only1": TWO_FILES[1]}
    reader = CheckpointReader(make_folder(tmp_path / "indexed", files, index))
    np.testing.assert_array_equal(reader.view("x"), chosen)
    assert reader.tensors["x"].file == TWO_FILES[chosen]
    with pytest.raises(ConfigError, match=r"tensor x is in .*00001.* and in .*00002.*no index"):
        CheckpointReader(make_folder(tmp_path / "plain", files))


def test_a_whole_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "in")
    save_file(TENSORS, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="holds both"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "quantised"),
        ({"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}, "dtype X9"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fill"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}, "does not fill"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}, "cut off"),
        ({"dtype": "F32", "shape": [1]}, "malformed"),
    ],
)
def test_bad_header_entries_are_refused_by_tensor(tmp_path: Path, entry: dict, message: str) -> None:
    folder = write_raw(tmp_path / "in", {"the.tensor": entry}, b"\0" * 8)
    with pytest.raises(ConfigError, match=f"the.tensor.*{message}|{message}.*the.tensor"):
        CheckpointReader(folder)


@pytest.mark.parametrize("header", [b"{", b"[1]", b"\xff\xfe"])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors is no safetensors file"):
        CheckpointReader(write_raw(tmp_path / "in", header))


def test_folders_without_readable_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        CheckpointReader(tmp_path)
    folder = make_folder(tmp_path / "in", {})
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        CheckpointReader(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"pickle files \(pytorch_model\.bin\).*convert them to safetensors"):
        CheckpointReader(folder)


def test_config_must_be_a_json_object_without_quantisation(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", {"model.safetensors": TENSORS})
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ConfigError, match="quantised"):
        CheckpointReader(folder)
    for text in ("[]", "{"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_config(folder)


def test_carried_files_are_all_but_weights_and_hidden_files(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "in")
    kept = {"config.json": b"{}", "README.md": b"# hi", "tokenizer.model": b"\0\1", "code.py": b"",
            "additional_chat_templates/tool.jinja": b"{{ x }}"}  # fmt: skip
    left = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "tf.h5", "x.onnx", ".gitattributes",
            "sub/deep.txt", "flax_model.msgpack", "a.pt", "b.pth", "c.ckpt")  # fmt: skip
    for name, content in kept.items() | {(name, b"weights") for name in left}:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert carried_files(folder) == kept


def test_what_is_not_carried_and_what_is_large_is_said_in_the_log(tmp_path: Path, monkeypatch, caplog) -> None:
    folder = two_shards(tmp_path / "in")
    save_file({"x": np.ones(1, np.float32)}, folder / "extra.safetensors")
    for name in ("onnx", "additional_chat_templates", ".cache"):
        (folder / name).mkdir()
    (folder / "corpus.txt").write_bytes(b"x" * 2_000_001)
    monkeypatch.setattr("converters.io.LARGE_FILE_BYTES", 2_000_000)
    with caplog.at_level("INFO", "moe_jax"):
        carried_files(folder)
    assert caplog.messages == [
        f"{folder}: not carried into an export: onnx/, extra.safetensors",
        f"{folder}: corpus.txt has 2 MB and is held in memory until the export",
    ]


def infos(tensors: dict[str, np.ndarray], file: str = "") -> list[TensorInfo]:
    return [TensorInfo(name, dtype_name(t.dtype), t.shape, file) for name, t in tensors.items()]


def test_shards_respect_the_limit_and_keep_the_order() -> None:
    tensors = infos({f"t{i}": np.zeros(10, np.float32) for i in range(5)} | {"big": np.zeros(100, np.float32)})
    shards = assign_shards(tensors, 80)
    assert [t.name for t in shards] == [t.name for t in tensors]
    assert [t.file[6:11] for t in shards] == ["00001", "00001", "00002", "00002", "00003", "00004"]
    assert {t.file for t in assign_shards(tensors, 10**6)} == {"model.safetensors"}
    assert all(t.file.endswith("-of-00004.safetensors") for t in shards)


def test_written_checkpoints_read_back_and_their_index_is_true(tmp_path: Path) -> None:
    tensors = assign_shards(infos(TENSORS), 2400)
    assert len({t.file for t in tensors}) == 3
    write_checkpoint(tmp_path / "out", tensors, TENSORS.__getitem__, {"config.json": b"{}", "sub/x.txt": b"1"})
    reader = CheckpointReader(tmp_path / "out")
    assert {t.name: t for t in tensors} == reader.tensors
    assert all(reader.view(n).tobytes() == t.tobytes() for n, t in TENSORS.items())
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    sizes = {"total_size": sum(map(num_bytes, tensors)), "total_parameters": sum(t.size for t in TENSORS.values())}
    assert index == {"metadata": sizes, "weight_map": {t.name: t.file for t in tensors}}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "np") as handle:
            assert handle.metadata() == {"format": "pt"}
    assert (tmp_path / "out" / "sub" / "x.txt").read_bytes() == b"1"


def test_one_file_gets_no_index_unless_its_name_needs_one(tmp_path: Path) -> None:
    for file, has_index in (("model.safetensors", False), ("model-00001-of-00001.safetensors", True)):
        folder = tmp_path / file
        write_checkpoint(folder, infos(TENSORS, file), TENSORS.__getitem__, {"config.json": b"{}"})
        assert (folder / INDEX_NAME).exists() == has_index
        assert CheckpointReader(folder).tensors.keys() == TENSORS.keys()


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def get(name: str) -> np.ndarray:
        if name == "c":
            raise RuntimeError("no more")
        return TENSORS[name]

    with pytest.raises(RuntimeError):
        write_checkpoint(tmp_path / "out", assign_shards(infos(TENSORS), 2400), get, {})
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_not_empty_is_refused_untouched(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "in")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="not empty"):
        write_checkpoint(folder, infos(TENSORS, "model.safetensors"), TENSORS.__getitem__, {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_empty_folder_is_filled_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    inode = (tmp_path / "real").stat().st_ino
    files = {"config.json": b"{}", "additional_chat_templates/a.jinja": b"x"}
    write_checkpoint(tmp_path / "link", assign_shards(infos(TENSORS), 2400), TENSORS.__getitem__, files)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_ino == inode  # nothing can replace a mount point
    assert CheckpointReader(tmp_path / "real").tensors.keys() == TENSORS.keys()
    assert carried_files(tmp_path / "real") == files
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}
    assert not [path for path in (tmp_path / "real").iterdir() if path.name.startswith(".")]


def test_a_failed_write_leaves_an_empty_folder_empty(tmp_path: Path, monkeypatch) -> None:
    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    original = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: (fail if b.name == "config.json" else original)(a, b))
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(
            tmp_path, infos(TENSORS, "model.safetensors"), TENSORS.__getitem__, {"config.json": b"{}", "a/b": b""}
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100MB", 10**8),
        ("5GB", 5 * 10**9),
        ("1GiB", 2**30),
        ("2kib", 2048),
        ("7", 7),
        (9, 9),
        ("1.5 kB", 1500),
        ("3B", 3),
    ],
)
def test_sizes_are_parsed(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-5", "0", "5XB", "MB", "7iB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size is"):
        parse_size(text)
