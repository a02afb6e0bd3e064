"""Safetensors folders, without knowledge of model families and without torch.

Reading parses the headers itself and hands out lazy views of memory-mapped files: nothing is copied until a caller
slices. Writing goes shard by shard into a temporary folder, which is renamed at the end.
"""

import dataclasses
import json
import logging
import math
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moe_jax.errors import ConfigError
from moe_jax.source import TensorInfo

logger = logging.getLogger("moe_jax")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 10**9
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHT_SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
TEMPLATES = "additional_chat_templates"
LARGE_FILE_BYTES = 100 * 10**6  # far above any tokenizer's files
MAX_NAMES = 20  # of one kind listed in a message
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype) -> str:
    """The safetensors spelling of a numpy dtype: "BF16" for ml_dtypes.bfloat16."""
    if dtype not in _DTYPE_NAMES:
        raise ConfigError(f"dtype {dtype} cannot be stored; supported are {', '.join(map(str, _DTYPE_NAMES))}")
    return _DTYPE_NAMES[dtype]


def num_bytes(tensor: TensorInfo) -> int:
    """Size of the tensor's data on disk."""
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def list_names(names: Iterable[str]) -> str:
    """The names joined by commas; from `MAX_NAMES` on cut, with the count of those left out."""
    names = list(names)
    more = f", ... and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def gathered_error(what: str, problems: Sequence[str]) -> ConfigError:
    """One error for all problems of one thing."""
    return ConfigError(f"{what}: {'; '.join(problems)}")


def parse_size(size: str | int) -> int:
    """Bytes of a size such as "100MB", "5GB" (powers of 1000), "1GiB" (of 1024) or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise ConfigError(f"size is {size!r}, but must look like '100MB', '5GB', '1GiB' or be a number of bytes")
    number, prefix, binary = match.groups()
    result = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    if result < 1:
        raise ConfigError(f"size is {size!r}, but must be at least one byte")
    return result


@dataclasses.dataclass(frozen=True)
class _Located:
    """A tensor and where its data starts in its file."""

    info: TensorInfo
    offset: int


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder; quantised checkpoints are refused."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder {str(folder)!r} does not exist or is not a folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"checkpoint folder {str(folder)!r} has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} holds a {type(config).__name__}, but must hold a JSON object")
    return config


def _check_whole(path: Path, size: int) -> None:
    """Refuses what is plainly no safetensors file: empty, a git-lfs pointer, a text."""
    if size == 0:
        raise ConfigError(f"file {path.name} is empty (0 bytes)")
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"file {path.name} is a git-lfs pointer, not the weights (run `git lfs pull`)")
    if size < 8 or int.from_bytes(start[:8], "little") + 8 > size:
        raise ConfigError(f"file {path.name} is cut off or no safetensors file (its header would end after the file)")


def _parse_entry(name: str, entry: Any, file: str, data_start: int, data_size: int) -> _Located:
    try:
        dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"tensor {name} in {file} has a malformed header entry") from None
    if dtype.startswith(("F8_", "F6_", "F4")):
        raise ConfigError(f"tensor {name} in {file} is quantised ({dtype}); dequantise the checkpoint first")
    if dtype not in DTYPES:
        raise ConfigError(f"tensor {name} in {file} has dtype {dtype}; supported are {', '.join(DTYPES)}")
    info = TensorInfo(name, dtype, shape, file)
    if min(shape, default=0) < 0 or begin < 0 or end - begin != num_bytes(info):
        raise ConfigError(f"tensor {name} in {file} is {dtype} {list(shape)}, which does not fill bytes {begin}..{end}")
    if end > data_size:
        raise ConfigError(f"file {file} is cut off: tensor {name} ends {end - data_size} bytes after the file")
    return _Located(info, data_start + begin)


def _read_header(path: Path, file: str, problems: list[str]) -> dict[str, _Located]:
    """The tensors of one file by name; what is wrong with it is added to `problems`."""
    size = path.stat().st_size
    try:
        _check_whole(path, size)
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except ConfigError as error:
        problems.append(str(error))
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        problems.append(f"file {file} is no safetensors file (its header is not a JSON object)")
        return {}
    found: dict[str, _Located] = {}
    errors: list[str] = []
    for name, entry in entries.items():
        try:
            found[name] = _parse_entry(name, entry, file, 8 + length, size - 8 - length)
        except ConfigError as error:
            errors.append(str(error))
    problems.extend(errors[:MAX_NAMES])
    if len(errors) > MAX_NAMES:
        problems.append(f"and {len(errors) - MAX_NAMES} more tensors of {file}")
    return found


def _read_index(path: Path) -> dict[str, str]:
    """The map tensor name -> file of an index; refuses files outside the folder."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{str(path)!r} is no safetensors index (a JSON object with a weight_map)") from None
    for file in sorted(map(str, files)):
        parts = PurePosixPath(file.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or not file.endswith(".safetensors") or ":" in file:
            raise ConfigError(f"{path.name} names {file!r}, but must name .safetensors files inside the folder")
    return weight_map


def _files_of(folder: Path) -> list[str]:
    """The weight files of a folder without an index."""
    files = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if SINGLE_NAME in files:
        return [SINGLE_NAME]
    if files:
        return files
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ConfigError(
            f"checkpoint folder {str(folder)!r} holds only pickle files ({list_names(pickles)}), which can run code "
            "when loaded; convert them to safetensors"
        )
    raise ConfigError(f"checkpoint folder {str(folder)!r} holds no .safetensors file")


class CheckpointReader:
    """Lazy access to the tensors of a safetensors folder.

    folder, config: the folder and its parsed config.json.
    tensors: every tensor by name, in the order of the files and their headers.

    All that is wrong with the files is gathered and raised as one `ConfigError`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        if self.config.get("quantization_config") is not None:
            raise ConfigError(
                f"checkpoint {str(folder)!r} is quantised (quantization_config in its config.json); dequantise it first"
            )
        self._maps: dict[str, np.memmap] = {}
        weight_map = self._weight_map()
        self._located = self._from_files() if weight_map is None else self._from_index(weight_map)
        self.tensors: dict[str, TensorInfo] = {name: found.info for name, found in self._located.items()}

    def _weight_map(self) -> dict[str, str] | None:
        """The index, if there is one; refuses a whole file beside an index of other files."""
        if not (self.folder / INDEX_NAME).is_file():
            return None
        weight_map = _read_index(self.folder / INDEX_NAME)
        if (self.folder / SINGLE_NAME).exists() and SINGLE_NAME not in weight_map.values():
            raise ConfigError(
                f"checkpoint {str(self.folder)!r} holds both {SINGLE_NAME} and an index of other files; remove one"
            )
        return weight_map

    def _from_files(self) -> dict[str, _Located]:
        problems: list[str] = []
        located: dict[str, _Located] = {}
        for file in _files_of(self.folder):
            for name, found in _read_header(self.folder / file, file, problems).items():
                if name in located:
                    first = located[name].info.file
                    problems.append(f"tensor {name} is in {first} and in {file}, and no index says which one counts")
                located[name] = found
        if problems:
            raise gathered_error(f"checkpoint {str(self.folder)!r} cannot be read", problems)
        return located

    def _from_index(self, weight_map: dict[str, str]) -> dict[str, _Located]:
        """The tensors that the index lists, each from the file it names; others in those files must be listed too."""
        problems: list[str] = []
        headers: dict[str, dict[str, _Located]] = {}
        for file in sorted(set(weight_map.values())):
            if not (self.folder / file).is_file():
                problems.append(f"file {file}, listed in {INDEX_NAME}, is missing")
            else:
                found = _read_header(self.folder / file, file, broken := [])
                problems.extend(broken)
                headers.update({} if broken else {file: found})
        absent = [f"{n} (in {f})" for n, f in weight_map.items() if f in headers and n not in headers[f]]
        if absent:
            problems.append(f"{INDEX_NAME} lists tensors that their file does not hold: {list_names(absent)}")
        unlisted = [f"{n} (in {f})" for f, found in headers.items() for n in found if n not in weight_map]
        if unlisted:
            problems.append(f"tensors that {INDEX_NAME} does not list: {list_names(unlisted)}")
        if problems:
            raise gathered_error(f"checkpoint {str(self.folder)!r} cannot be read", problems)
        return {n: place for file, found in headers.items() for n, place in found.items() if weight_map[n] == file}

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file; only the pages that are used get read."""
        place = self._located[name]
        info = place.info
        if 0 in info.shape:
            return np.empty(info.shape, DTYPES[info.dtype])
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(self.folder / info.file, np.uint8, "r")
        return np.ndarray(info.shape, DTYPES[info.dtype], self._maps[info.file], place.offset)


def _is_carried(path: Path) -> bool:
    name = path.name
    weights = name.endswith(WEIGHT_SUFFIXES) or name.removesuffix(".index.json").endswith(WEIGHT_SUFFIXES)
    return path.is_file() and not name.startswith(".") and not weights


def carried_files(folder: str | Path) -> dict[str, bytes]:
    """The files that travel unchanged with the weights: relative path -> content.

    That is every other visible file at the top of the folder (config, tokenizer, templates, README, ...) and
    `additional_chat_templates/`. Logs what stays behind, and warns of files above `LARGE_FILE_BYTES`.
    """
    folder = Path(folder)
    paths = [path for path in folder.iterdir() if _is_carried(path)]
    paths += [path for path in folder.glob(f"{TEMPLATES}/*") if _is_carried(path)]
    if left := _left_behind(folder):
        logger.info("%s: not carried into an export: %s", folder, list_names(left))
    for path in paths:
        if path.stat().st_size > LARGE_FILE_BYTES:
            logger.warning("%s: %s has %d MB and is held in memory until the export", folder, path.name,
                           path.stat().st_size // 10**6)  # fmt: skip
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(paths)}


def _left_behind(folder: Path) -> list[str]:
    """The visible sub-folders that do not travel, and the .safetensors files that the folder's index does not name."""
    index = folder / INDEX_NAME
    used = set(_read_index(index).values()) if index.is_file() else {SINGLE_NAME}
    known = {TEMPLATES, *(PurePosixPath(file).parts[0] for file in used)}
    folders = [p.name + "/" for p in folder.iterdir() if p.is_dir() and p.name not in known and p.name[0] != "."]
    single = index.is_file() or (folder / SINGLE_NAME).is_file()  # otherwise all of them are read
    extra = [p.name for p in folder.glob("*.safetensors") if single and p.name not in used and p.name[0] != "."]
    return sorted(folders) + sorted(extra)


def assign_shards(tensors: Sequence[TensorInfo], max_bytes: int) -> list[TensorInfo]:
    """The same tensors, each with the file of its shard; a shard exceeds `max_bytes` only when one tensor does."""
    shards: list[list[TensorInfo]] = [[]]
    filled = 0
    for tensor in tensors:
        size = num_bytes(tensor)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    count = len(shards)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [dataclasses.replace(t, file=name) for name, shard in zip(names, shards, strict=True) for t in shard]


def check_target(folder: str | Path) -> None:
    """Refuses an output folder that holds anything, the source folder among them."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output folder {str(folder)!r} exists and is not a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"output folder {str(folder)!r} is not empty; choose a new or empty folder")


def _write_index(folder: Path, tensors: Sequence[TensorInfo]) -> None:
    """The index as transformers writes it; tied tensors count where they are stored."""
    metadata = {
        "total_parameters": sum(math.prod(t.shape) for t in tensors),
        "total_size": sum(num_bytes(t) for t in tensors),
    }
    index = {"metadata": metadata, "weight_map": {t.name: t.file for t in tensors}}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shard(path: Path, tensors: Sequence[TensorInfo], get: Callable[[str], np.ndarray]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        array = np.ascontiguousarray(get(tensor.name)).reshape(tensor.shape)
        if array.dtype != DTYPES[tensor.dtype]:
            raise AssertionError(f"{tensor.name} is {array.dtype}, recorded as {tensor.dtype}")
        arrays[tensor.name] = array
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path, metadata={"format": "pt"})


def _move_up(temporary: Path) -> None:
    """Moves the content of a folder into its parent: the index and the config, without which nothing loads, last."""
    last = (INDEX_NAME, "config.json")
    moved: list[Path] = []
    try:
        for path in sorted(temporary.iterdir(), key=lambda path: (path.name in last, path.name == last[-1])):
            moved.append(path.rename(temporary.parent / path.name))
        temporary.rmdir()
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def write_checkpoint(
    folder: str | Path,
    tensors: Sequence[TensorInfo],
    get: Callable[[str], np.ndarray],
    files: Mapping[str, bytes],
) -> None:
    """Writes `tensors` into the files they name, one shard in memory at a time, an index where needed, and `files`.

    Everything is written to a temporary folder beside `folder`, which is renamed at the end, so that a failure leaves
    nothing that looks finished. An empty folder that is there already may be a mount point, which nothing can replace:
    the temporary one is then made in it, and its content moved up at the end. A target that is not empty is refused.
    """
    folder = Path(folder).resolve()
    check_target(folder)
    exists = folder.exists()
    shards: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        shards.setdefault(tensor.file, []).append(tensor)
    temporary = (folder if exists else folder.parent) / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    temporary.mkdir(parents=True)
    try:
        for file, shard in shards.items():
            _write_shard(temporary / file, shard, get)
        if set(shards) != {SINGLE_NAME}:
            _write_index(temporary, tensors)
        for name, content in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(content)
        _move_up(temporary) if exists else temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
