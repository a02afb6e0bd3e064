"""Packing against a hand-made case, the split, ids out of range, and batches as a pure function of the step."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_jax.data import (
    embedded_corpus,
    eval_batches,
    load_rows,
    load_tokenizer,
    pack,
    read_documents,
    training_batches,
)
from moe_jax.errors import ConfigError
from moe_jax.run_config import DataConfig


def test_pack_ends_documents_splits_long_ones_and_pads_the_last_row() -> None:
    rows = pack([[5, 6], [7], [1, 2, 3, 4, 5]], seq_len=4, eos_id=9)
    assert rows.tokens_RS.tolist() == [[5, 6, 9, 7], [9, 1, 2, 3], [4, 5, 9, 9]]
    assert rows.segment_ids_RS.tolist() == [[1, 1, 1, 2], [1, 2, 2, 2], [1, 1, 1, 0]]


def test_pack_keeps_a_real_end_of_text_apart_from_padding() -> None:  # C87
    rows = pack([[5, 6]], seq_len=5, eos_id=2)
    assert rows.tokens_RS.tolist() == [[5, 6, 2, 2, 2]]
    assert rows.segment_ids_RS.tolist() == [[1, 1, 1, 0, 0]]


def test_pack_loses_no_token_and_keeps_the_order() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50, rng.integers(0, 30)).tolist() for _ in range(40)]
    rows = pack(documents, seq_len=16, eos_id=50)
    real = rows.tokens_RS[rows.segment_ids_RS > 0].tolist()
    assert real == [token for document in documents for token in [*document, 50]]
    assert (np.diff(rows.segment_ids_RS, axis=1)[:-1] >= 0).all()
    assert (rows.segment_ids_RS[:, 0] == 1).all()


def test_embedded_corpus_is_deterministic_english_of_about_a_megabyte() -> None:
    first, second = list(embedded_corpus()), list(embedded_corpus())
    assert first == second
    assert 500_000 < sum(map(len, first)) < 3_000_000
    assert " the " in first[0]


def test_default_data_hold_out_the_last_rows() -> None:
    train, held_out = load_rows(DataConfig(eval_fraction=0.1), seq_len=512, vocab_size=257)
    total = len(train) + len(held_out)
    assert len(held_out) == round(0.1 * total)
    everything, nothing = load_rows(DataConfig(eval_fraction=0.0), seq_len=512, vocab_size=257)
    assert len(everything) == total
    assert len(nothing) == 0
    np.testing.assert_array_equal(everything.tokens_RS[-len(held_out) :], held_out.tokens_RS)


def test_bytes_need_a_vocabulary_above_their_end_of_text_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'bytes'.*256.*vocab_size is 256"):
        load_rows(DataConfig(), seq_len=8, vocab_size=256)
    with pytest.raises(ConfigError, match=r"a token id is \d+.*vocab_size is 97"):
        load_rows(DataConfig(eos_id=0), seq_len=8, vocab_size=97)
    (tmp_path / "a.txt").write_text("AB" * 20)
    train, _ = load_rows(DataConfig(files=(str(tmp_path / "a.txt"),), eos_id=0), seq_len=8, vocab_size=97)
    assert train.tokens_RS[0].tolist() == [65, 66] * 4


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="none is left to train on"):
        load_rows(DataConfig(files=(str(tmp_path / "a.txt"),)), seq_len=64, vocab_size=300)


def test_files_are_read_in_order_and_cut_at_the_separator(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one<sep>two<sep>\n")
    (tmp_path / "a.txt").write_text("three")
    config = DataConfig(files=(str(tmp_path / "b.txt"), str(tmp_path / "a.txt")), document_separator="<sep>")
    assert read_documents(config) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"\xff\xfe", "not UTF-8"), (b" \n", "no text")]
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_documents(DataConfig(files=(str(path),)))
    assert "x.txt" in str(caught.value)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_folder_is_read_without_special_tokens(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert tokenizer.eos_id == 1
    assert [list(ids) for ids in tokenizer.encode(["hello world", "hello there"])] == [[2, 3], [2, 0]]
    assert load_tokenizer(str(tokenizer_folder / "tokenizer.json"), eos_id=3).eos_id == 3


def test_end_of_text_id_comes_from_the_config_or_is_asked_for(tokenizer_folder: Path) -> None:
    with pytest.raises(ConfigError, match="eos_id is not set"):
        load_tokenizer(str(tokenizer_folder))
    (tokenizer_folder / "config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert load_tokenizer(str(tokenizer_folder)).eos_id == 1


def test_stored_truncation_and_padding_do_not_touch_the_text(tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer

    file = str(tokenizer_folder / "tokenizer.json")
    stored = Tokenizer.from_file(file)
    stored.enable_truncation(2)
    stored.enable_padding(length=2)
    stored.save(file)
    tokenizer = load_tokenizer(file, eos_id=1)
    assert [list(ids) for ids in tokenizer.encode(["hello world hello", "world"])] == [[2, 3, 2], [3]]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_broken_files_beside_a_tokenizer_are_named(tokenizer_folder: Path, name: str, content: bytes) -> None:
    (tokenizer_folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}'"):
        load_tokenizer(str(tokenizer_folder))


def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


def flat(lists: list[list[int]]) -> list[int]:
    return [item for items in lists for item in items]


def test_batches_depend_on_the_step_alone_and_cover_each_epoch_once() -> None:
    rows = pack([[i] for i in range(12)], seq_len=2, eos_id=99)
    batches, again = training_batches(rows, 4, seed=1), training_batches(rows, 4, seed=1)
    read = [batches[step]["tokens"][:, 0].tolist() for step in range(6)]
    assert [again[step]["tokens"][:, 0].tolist() for step in (5, 0, 3)] == [read[5], read[0], read[3]]
    first, second = flat(read[:3]), flat(read[3:])
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != list(range(12))
    other = training_batches(rows, 4, seed=2)
    assert flat([other[step]["tokens"][:, 0].tolist() for step in range(3)]) != first
    assert batches[0]["tokens"].dtype == batches[0]["segment_ids"].dtype == np.int32


def test_batch_may_be_larger_than_the_data() -> None:
    rows = pack([[1], [2]], seq_len=2, eos_id=0)
    assert training_batches(rows, 5, seed=0)[7]["tokens"].shape == (5, 2)


def test_eval_batches_have_one_shape_and_filler_rows_are_padding() -> None:
    rows = pack([[i] for i in range(5)], seq_len=2, eos_id=9)
    batches = eval_batches(rows, 4)
    assert [batch["tokens"].shape for batch in batches] == [(4, 2), (4, 2)]
    assert np.concatenate([batch["tokens"][:, 0] for batch in batches]).tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert (batches[1]["segment_ids"][1:] == 0).all()
