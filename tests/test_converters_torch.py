"""The bridge against transformers: configs, byte-exact exports of its checkpoints, and clean reloads of ours."""

import contextlib
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_hf import CONFIGS, MIX, export_again, read_all
from tiny_hf import DTYPES, VARIANTS, make_checkpoint, make_model

import converters
from converters.families import FAMILIES, family_of
from converters.io import read_config
from moe_jax.config import ModelConfig

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Transformers and torch warn about their own matters while a checkpoint is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def translate(hf: dict[str, Any]) -> ModelConfig:
    return family_of(hf).model_config(hf)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_keys_get_the_defaults_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    full = AutoConfig.for_model(model_type).to_dict()
    assert translate({"model_type": model_type}) == translate(full)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_means_the_same_after_transformers_rewrote_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    hf = {key: value for key, value in CONFIGS[name].items() if key not in ("model_type", "architectures")}
    AutoConfig.for_model(name, **hf).save_pretrained(tmp_path)
    rewritten = read_config(tmp_path)
    assert "rope_parameters" in rewritten
    assert translate(rewritten) == translate(CONFIGS[name])


@pytest.mark.parametrize("legacy", [False, True], ids=["new config", "legacy config"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exports_are_the_same_bytes(tmp_path: Path, variant: str, dtype: str, legacy: bool) -> None:
    shards = 3 if legacy else 1
    source = make_checkpoint(
        tmp_path / "in",
        variant,
        dtype=dtype,
        shards=shards,
        legacy_config=legacy,
        tokenizer=legacy,
        fused=dtype == "float16",
    )
    out = export_again(converters.open_folder(source), tmp_path / "out")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_config_spellings_give_the_same_model(tmp_path: Path, variant: str) -> None:
    new, old = (
        converters.open_folder(make_checkpoint(tmp_path / str(legacy), variant, legacy_config=legacy))
        for legacy in (False, True)
    )
    assert new.model_config == old.model_config


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_loads_an_export_cleanly_with_equal_weights(tmp_path: Path, variant: str) -> None:
    from transformers import AutoModelForCausalLM

    source = make_checkpoint(tmp_path / "in", variant, dtype="float32", fused=True)
    state = {name: p.numpy() for name, p in make_model(variant).state_dict().items()}
    loaded = converters.open_state_dict(read_config(source), state, {})
    out = export_again(loaded, tmp_path / "out", 10**5)
    again, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(info.values())
    assert again.state_dict().keys() == state.keys()
    assert all(np.array_equal(tensor.numpy(), state[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe_yarn", "olmoe"])
def test_transformers_loads_an_export_without_a_warning(tmp_path: Path, variant: str) -> None:
    """C29."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_checkpoint(tmp_path / "in", variant, shards=2, tokenizer=True)
    out = export_again(converters.open_folder(source), tmp_path / "out")
    with transformers_log() as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_pretrained(out)
        AutoTokenizer.from_pretrained(out)
        assert log.getvalue() == ""
        config = json.loads((out / "config.json").read_text()) | {"num_hidden_layers": 2}
        (out / "config.json").write_text(json.dumps(config))
        AutoModelForCausalLM.from_pretrained(out)
        assert log.getvalue() != ""  # it would show: here, tensors of a third layer


@contextlib.contextmanager
def transformers_log() -> Iterator[io.StringIO]:
    """What transformers' logger writes from warnings up."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_state_dict_and_its_folder_are_the_same_model(tmp_path: Path, variant: str) -> None:
    source = make_checkpoint(tmp_path / "in", variant, dtype="float32")
    folder = converters.open_folder(source)
    state = {name: p.numpy() for name, p in make_model(variant).state_dict().items()}
    memory = converters.open_state_dict(folder.source.config, state, folder.source.files)
    assert memory.model_config == folder.model_config
    a, b = read_all(folder), read_all(memory)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    strip = lambda loaded: {dataclasses.replace(t, file="") for t in loaded.source.tensors}  # noqa: E731
    assert strip(folder) == strip(memory)


def test_another_activation_reaches_the_config() -> None:
    config = make_model("mixtral", hidden_act="gelu").config.to_dict()
    assert translate(config).hidden_act == "gelu"
    assert translate(MIX).hidden_act == "silu"
