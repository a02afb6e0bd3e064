"""Where a model came from, and what its Hugging Face folder has to look like when it is handed back."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk: its name, dtype in safetensors' spelling ("BF16"), shape, and the file that holds it.

    `file` is "" while no shard is assigned; the export then packs tensors by its size limit.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class HFSource:
    """The Hugging Face side of a model: everything an exact export needs besides the parameters.

    config: the parsed config.json.
    tensors: every tensor of the checkpoint, in the layout (names, dtypes, shards) of the source.
    files: the other files of the folder, relative path -> bytes, carried unchanged.
    extras: tensors that the model does not use, carried unchanged.

    Two sources are equal when all of that is equal (by a digest): it travels as a static part of the model's pytree, so two
    models of one checkpoint have one structure and share compiled code.
    """

    config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _digest(self) -> bytes:
        digest = hashlib.sha256(json.dumps([self.config, [dataclasses.astuple(t) for t in self.tensors]]).encode())
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        for name, array in sorted(self.extras.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HFSource) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def save(self, folder: Path) -> None:
        """Writes this record into `folder` (made if absent), readable by `load`."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {"config": self.config, "tensors": [dataclasses.asdict(t) for t in self.tensors]}
        (folder / "source.json").write_text(json.dumps(record))
        for name, content in self.files.items():
            path = folder / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if self.extras:
            save_file(self.extras, folder / "extras.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> "HFSource":
        """Reads what `save` wrote."""
        record = json.loads((folder / "source.json").read_text())
        tensors = tuple(TensorInfo(t["name"], t["dtype"], tuple(t["shape"]), t["file"]) for t in record["tensors"])
        root = folder / "files"
        files = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        extras = load_file(folder / "extras.safetensors") if (folder / "extras.safetensors").exists() else {}
        return cls(record["config"], tensors, files, extras)
