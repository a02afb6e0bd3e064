"""Text -> tokens -> packed rows -> batches that depend on the step alone, so that resuming is `batches[step]`.

R rows, B rows of a batch, S positions of a row.
"""

import ast
import dataclasses
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_jax.errors import ConfigError
from moe_jax.run_config import DataConfig

Batch = dict[str, np.ndarray]
Ids = Sequence[int] | np.ndarray
# At least this many rows are kept for evaluation when any are asked for.
MIN_EVAL_ROWS = 1
BYTES_EOS = 256


class Batches(Protocol):
    """`batches[step]` is the batch of that step."""

    def __getitem__(self, step: int) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """`encode` maps documents to token ids without special tokens; `eos_id` ends a document."""

    encode: Callable[[Sequence[str]], Iterable[Ids]]
    eos_id: int


def load_tokenizer(name: str, eos_id: int | None = None) -> Tokenizer:
    """Returns the byte tokenizer for "bytes", else the one in a folder with tokenizer.json (or in that file)."""
    if name == "bytes":
        return Tokenizer(_encode_bytes, BYTES_EOS if eos_id is None else eos_id)
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f'data.tokenizer is {name!r}, but must be "bytes" or a folder that holds tokenizer.json')
    from tokenizers import Tokenizer as FastTokenizer

    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the Rust binding raises a bare Exception
        raise ConfigError(f"data.tokenizer: {str(file)!r} cannot be read: {error}") from None
    # A stored truncation would cut documents off silently, and a stored padding fill them up.
    fast.no_truncation()
    fast.no_padding()

    def encode(documents: Sequence[str]) -> Iterable[Ids]:
        return (encoding.ids for encoding in fast.encode_batch(list(documents), add_special_tokens=False))

    return Tokenizer(encode, _eos_of(file.parent, fast.token_to_id) if eos_id is None else eos_id)


def _encode_bytes(documents: Sequence[str]) -> Iterable[Ids]:
    return (np.frombuffer(document.encode(), np.uint8) for document in documents)


def _eos_of(folder: Path, token_to_id: Callable[[str], int | None]) -> int:
    """The end-of-text id that tokenizer_config.json names by its text, or config.json by its id."""
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    found = token_to_id(text) if isinstance(text, str) else None
    if found is None:
        ids = _read_json(folder / "config.json").get("eos_token_id")
        found = ids[0] if isinstance(ids, list) and ids else ids
    if not isinstance(found, int):
        raise ConfigError(f"data.eos_id is not set, and neither tokenizer_config.json nor config.json in "
                          f"{str(folder)!r} names an end-of-text token")  # fmt: skip
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file beside the tokenizer; empty without the file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.tokenizer: {str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"data.tokenizer: {str(path)!r} holds a {type(content).__name__}, but must hold an object")
    return content


def read_documents(config: DataConfig) -> list[str]:
    """Returns the documents of `config.files` in order, empty ones left out, or the embedded corpus."""
    if not config.files:
        return list(embedded_corpus())
    documents: list[str] = []
    for name in config.files:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"data.files: {name!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.files: {name!r} is not UTF-8 text: {error}") from None
        pieces = text.split(config.document_separator) if config.document_separator else [text]
        documents.extend(piece for piece in pieces if piece.strip())
    if not documents:
        raise ConfigError(f"data.files: {list(config.files)} hold no text")
    return documents


def embedded_corpus() -> Iterator[str]:
    """Yields about 1 MB of English that every Python has: its language reference by topic, its modules' docstrings.

    The order is fixed; the text differs a little between versions of Python.
    """
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text = "\n\n".join(_docstrings(path))
        if text:
            yield text


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows as a random-access source: `rows[i]` is one row's tokens and segment_ids, int32 [S]."""

    tokens_RS: np.ndarray
    segment_ids_RS: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens_RS)

    def __getitem__(self, index: int) -> Batch:
        return {"tokens": self.tokens_RS[index], "segment_ids": self.segment_ids_RS[index]}


def pack(documents: Iterable[Ids], seq_len: int, eos_id: int) -> Rows:
    """Returns all documents, each followed by `eos_id`, laid end to end and cut into rows of `seq_len`.

    segment_ids count the documents of a row from 1, so attention and loss stay inside a document; a long document goes
    on in the next row as a segment of its own. Only the end of the last row is padding: segment 0, token `eos_id`.
    """
    pieces = [np.append(np.asarray(ids, np.int32), np.int32(eos_id)) for ids in documents]
    if not pieces:
        return Rows(*np.zeros((2, 0, seq_len), np.int32))
    lengths = np.array([len(piece) for piece in pieces])
    padding = -int(lengths.sum()) % seq_len
    tokens_RS = np.concatenate([*pieces, np.full(padding, eos_id, np.int32)]).reshape(-1, seq_len)
    owners = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    owners_RS = np.concatenate([owners, np.full(padding, -1, np.int32)]).reshape(-1, seq_len)
    segment_ids_RS = np.where(owners_RS >= 0, owners_RS - owners_RS[:, :1] + 1, 0).astype(np.int32)
    return Rows(tokens_RS, segment_ids_RS)


def load_rows(config: DataConfig, seq_len: int, vocab_size: int) -> tuple[Rows, Rows]:
    """Returns the training rows and the evaluation rows (the last `eval_fraction` of all rows).

    Every id is below `vocab_size`, or `ConfigError` names both.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.eos_id)
    _check_id("its end-of-text id (data.eos_id)", tokenizer.eos_id, config, vocab_size)
    rows = pack(tokenizer.encode(read_documents(config)), seq_len, tokenizer.eos_id)
    _check_id("a token id", int(rows.tokens_RS.max()), config, vocab_size)
    num_eval = max(round(len(rows) * config.eval_fraction), MIN_EVAL_ROWS) if config.eval_fraction else 0
    cut = len(rows) - num_eval
    if cut < 1:
        raise ConfigError(f"the data fill {len(rows)} row(s) of train.seq_len {seq_len}, and {num_eval} of them are "
                          "kept for evaluation, so none is left to train on")  # fmt: skip
    return (
        Rows(rows.tokens_RS[:cut], rows.segment_ids_RS[:cut]),
        Rows(rows.tokens_RS[cut:], rows.segment_ids_RS[cut:]),
    )


def _check_id(what: str, value: int, config: DataConfig, vocab_size: int) -> None:
    if value >= vocab_size:
        raise ConfigError(f"data.tokenizer is {config.tokenizer!r} and {what} is {value}, "
                          f"but the model's vocab_size is {vocab_size}: ids must be below it")  # fmt: skip


def training_batches(rows: Rows, batch_size: int, seed: int) -> Batches:
    """Returns an endless sequence of batches: `batches[step]` is a function of the step alone.

    Every row comes once an epoch, in an order that `seed` gives and that differs between epochs; a batch may reach over
    the end of an epoch. Made with `grain.MapDataset`.
    """
    import grain

    dataset: Any = grain.MapDataset.source(rows).seed(seed).shuffle().repeat().batch(batch_size)
    return dataset


def eval_batches(rows: Rows, batch_size: int) -> list[Batch]:
    """Returns the rows in order, the last batch filled up with padding rows, so that all have one shape."""
    missing = -len(rows) % batch_size
    filler = np.zeros((missing, rows.tokens_RS.shape[1]), np.int32)
    tokens_RS, segment_ids_RS = np.concatenate([rows.tokens_RS, filler]), np.concatenate([rows.segment_ids_RS, filler])
    starts = range(0, len(tokens_RS), batch_size)
    return [
        {"tokens": tokens_RS[i : i + batch_size], "segment_ids": segment_ids_RS[i : i + batch_size]} for i in starts
    ]
