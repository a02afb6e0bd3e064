"""Whole checkpoints through the bridge, without torch: layouts, tied heads, refusals and exact exports."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_hf import CONFIGS, MIX, OLM, Q3, export_again, fuse, random_tensors, read_all, read_folder, write_folder
from safetensors import safe_open

import converters
from converters.io import DTYPES, INDEX_NAME, CheckpointReader
from moe_jax.errors import ConfigError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = MIX | {"tie_word_embeddings": True}
FILES = {
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"chat_template": "{{ x }}"}',
    "chat_template.jinja": "{{ messages }} \u00e9".encode(),
    "special_tokens_map.json": b"{ }",
    "generation_config.json": b'{"do_sample": false,   "temperature": 0.9}',
    "README.md": b"# model\r\n",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}


def mixed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gates and norms in float32, one projection in float16, the rest as it is."""
    kinds = {"gate.weight": "F32", "norm.weight": "F32", "v_proj.weight": "F16"}
    cast = lambda name: next((DTYPES[kind] for end, kind in kinds.items() if name.endswith(end)), None)  # noqa: E731
    return {name: t.astype(cast(name) or t.dtype) for name, t in tensors.items()}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "mixed"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_export_gives_the_same_folder(
    tmp_path: Path, config: dict[str, Any], dtype: str, shards: int, stacked: bool
) -> None:
    """C32: the layout, names and files of the source."""
    tensors = random_tensors(config, "BF16" if dtype == "mixed" else dtype)
    tensors = mixed(tensors) if dtype == "mixed" else tensors
    tensors = fuse(tensors) if stacked else tensors
    source = write_folder(tmp_path / "in", config, tensors, shards=shards, files=FILES)
    out = export_again(converters.open_folder(source), tmp_path / "out")
    for path in source.rglob("*"):
        if path.is_file() and path.name != INDEX_NAME:
            assert (out / path.relative_to(source)).read_bytes() == path.read_bytes(), path.name
    assert {p.name for p in source.rglob("*")} == {p.name for p in out.rglob("*")}


def test_three_spellings_of_mixtral_give_the_same_parameters(tmp_path: Path) -> None:
    """C15."""
    tensors = random_tensors(MIX)
    spellings = [tensors, {n.replace(".block_sparse_moe.", ".mlp."): t for n, t in tensors.items()}, fuse(tensors)]
    first, *others = [
        read_all(converters.open_folder(write_folder(tmp_path / str(i), MIX, spelling)))
        for i, spelling in enumerate(spellings)
    ]
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in first)


def test_parameters_are_the_values_of_the_file(tmp_path: Path) -> None:
    tensors = random_tensors(Q3)
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.float16)
    tensors[EMBEDDING][0, :2] = 65504, 6e-8
    parameters = read_all(converters.open_folder(write_folder(tmp_path / "in", Q3, tensors)))
    np.testing.assert_array_equal(parameters["embed.weight"], tensors[EMBEDDING].astype(np.float32))
    assert parameters["embed.weight"][0, 0] == 65504
    router = tensors["model.layers.2.mlp.gate.weight"].astype(np.float32)
    np.testing.assert_array_equal(parameters["runs.0.0.mlp.router"][2], router.T)


# C14: tied and missing heads


def test_a_tied_model_needs_no_head(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", TIED, random_tensors(TIED))
    loaded = converters.open_folder(source)
    assert "lm_head.weight" not in read_all(loaded)
    assert HEAD not in read_folder(export_again(loaded, tmp_path / "out"))


def test_an_equal_head_in_a_tied_file_is_written_again(tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    tensors[HEAD] = tensors[EMBEDDING].astype(np.float32)
    loaded = converters.open_folder(write_folder(tmp_path / "in", TIED, tensors))
    written = read_folder(export_again(loaded, tmp_path / "out"))
    assert written[HEAD].dtype == np.float32
    np.testing.assert_array_equal(written[HEAD], tensors[HEAD])
    assert written[EMBEDDING].tobytes() == tensors[EMBEDDING].tobytes()


def test_another_head_in_a_tied_file_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 1
    with pytest.raises(ConfigError, match=r"tie_word_embeddings true, but lm_head\.weight differs"):
        converters.open_folder(write_folder(tmp_path / "in", TIED, tensors))


def test_an_untied_model_needs_a_head(tmp_path: Path) -> None:
    tensors = random_tensors(MIX)
    del tensors[HEAD]
    with pytest.raises(ConfigError, match=r"1 tensor\(s\) missing: lm_head\.weight"):
        converters.open_folder(write_folder(tmp_path / "in", MIX, tensors))


# C11, C13, C19, C20, C24: lists that do not fit


def test_missing_expert_tensors_are_listed_exactly(tmp_path: Path) -> None:
    tensors = random_tensors(MIX)
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[gone]
    with pytest.raises(ConfigError) as error:
        converters.open_folder(write_folder(tmp_path / "one", MIX, tensors))
    assert str(error.value).endswith(f"1 tensor(s) missing: {gone}")
    all_gone = [name for name in tensors if ".layers.1.block_sparse_moe.experts." in name]
    rest = {name: tensor for name, tensor in tensors.items() if name not in all_gone}
    with pytest.raises(ConfigError, match=r"12 tensor\(s\) missing") as error:
        converters.open_folder(write_folder(tmp_path / "layer", MIX, rest))
    assert all(name in str(error.value) for name in [*all_gone, gone])


def test_a_missing_layer_and_other_faults_come_in_one_message(tmp_path: Path) -> None:
    tensors = random_tensors(Q3)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(128, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(128, np.float32)
    with pytest.raises(ConfigError) as error:
        converters.open_folder(write_folder(tmp_path / "in", Q3, tensors))
    for text in ("missing: model.norm.weight", "q_norm.weight has shape [128], but the config asks for [32]",
                 "q_proj.bias", "--carry-unknown"):  # fmt: skip
        assert text in str(error.value)


def test_the_full_width_norm_of_olmoe_is_told_from_a_per_head_one(tmp_path: Path) -> None:
    tensors = random_tensors(OLM)
    tensors["model.layers.1.self_attn.k_norm.weight"] = np.ones(16, np.float32)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_norm\.weight has shape \[16\].*\[64\]"):
        converters.open_folder(write_folder(tmp_path / "in", OLM, tensors))


def test_biases_of_the_config_must_be_in_the_file(tmp_path: Path) -> None:
    biased = Q3 | {"attention_bias": True}
    with pytest.raises(ConfigError, match=r"16 tensor\(s\) missing: .*q_proj\.bias"):
        converters.open_folder(write_folder(tmp_path / "in", biased, random_tensors(Q3)))


def test_leftover_buffers_are_accepted_once_said_and_not_written(tmp_path: Path, caplog: Any) -> None:
    tensors = random_tensors(MIX)
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for n in range(2)}
    source = write_folder(tmp_path / "in", MIX, tensors | extra, shards=2)
    with caplog.at_level(logging.INFO, "moe_jax"):
        loaded = converters.open_folder(source)
    assert len([r for r in caplog.records if "inv_freq" in r.message]) == 1
    out = export_again(loaded, tmp_path / "out")
    assert read_folder(out).keys() == tensors.keys()
    assert json.loads((out / INDEX_NAME).read_text())["weight_map"].keys() == tensors.keys()


def test_unknown_tensors_are_refused_or_carried_by_request(tmp_path: Path) -> None:
    foo = {"model.foo.weight": np.arange(5, dtype=np.int32)}
    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX) | foo)
    with pytest.raises(ConfigError, match=r"1 tensor\(s\) unknown .*model\.foo\.weight"):
        converters.open_folder(source)
    out = export_again(converters.open_folder(source, carry_unknown=True), tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (MIX | {"quantization_config": {"quant_method": "fp8"}}, {}),
        (MIX, {"model.layers.0.self_attn.q_proj.weight_scale_inv": np.ones((1, 1), np.float32)}),
        (MIX, {"model.layers.0.self_attn.q_proj.qweight": np.ones((8, 8), np.int32)}),
    ],
)
@pytest.mark.parametrize("carry", [False, True])
def test_quantised_checkpoints_are_refused_as_such(
    tmp_path: Path, config: dict[str, Any], extra: dict[str, np.ndarray], carry: bool
) -> None:
    source = write_folder(tmp_path / "in", config, random_tensors(MIX) | extra)
    with pytest.raises(ConfigError, match="quantised"):
        converters.open_folder(source, carry_unknown=carry)


def test_codes_under_a_weights_name_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(MIX)
    tensors[HEAD] = np.zeros(tensors[HEAD].shape, np.uint8)
    with pytest.raises(ConfigError, match=r"lm_head\.weight has dtype U8, allowed are F32, BF16, F16"):
        converters.open_folder(write_folder(tmp_path / "in", MIX, tensors))


# C30, C37: shards


def test_resharding_writes_what_its_index_says(tmp_path: Path) -> None:
    tensors = random_tensors(MIX)
    total = sum(t.nbytes for t in tensors.values())
    loaded = converters.open_folder(write_folder(tmp_path / "in", MIX, tensors, shards=5))
    two = export_again(loaded, tmp_path / "two", total * 6 // 10)
    assert sorted(p.name for p in two.glob("*.safetensors")) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((two / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == total
    for name, file in index["weight_map"].items():
        with safe_open(two / file, "np") as handle:
            assert name in handle.keys()  # noqa: SIM118  no mapping
            assert handle.metadata() == {"format": "pt"}
    one = export_again(converters.open_folder(two), tmp_path / "one", total)
    assert sorted(p.name for p in one.iterdir()) == ["config.json", "model.safetensors"]
    written = read_folder(one)
    assert all(written[name].tobytes() == t.tobytes() for name, t in tensors.items())


def test_export_onto_the_source_or_an_older_export_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX), shards=3)
    loaded = converters.open_folder(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    older = export_again(loaded, tmp_path / "older")
    for target in (source, older):
        with pytest.raises(ConfigError, match="not empty"):
            export_again(loaded, target, 10**5)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_export_asks_for_one_expert_at_a_time_and_each_only_once(tmp_path: Path) -> None:
    loaded = converters.open_folder(write_folder(tmp_path / "in", Q3, random_tensors(Q3)))
    parameters, asked = read_all(loaded), []

    def fetch(leaf: str, prefix: tuple[int, ...]) -> np.ndarray:
        asked.append((leaf, prefix))
        return parameters[leaf][prefix]

    converters.export(loaded.model_config, loaded.source, fetch, tmp_path / "out")
    assert len(asked) == len(set(asked))
    assert all(len(prefix) == 2 for leaf, prefix in asked if leaf.endswith(("gate_up", "down")))


# other ways in


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_a_state_dict_in_memory_layout_is_written_in_the_usual_one(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = mixed(random_tensors(config))
    loaded = converters.open_state_dict(config, fuse(tensors), {"generation_config.json": b"{}"})
    out = export_again(loaded, tmp_path / "out")
    written = read_folder(out)
    assert written.keys() == tensors.keys()
    assert all(written[name].tobytes() == t.tobytes() for name, t in tensors.items())
    assert json.loads((out / "config.json").read_text()) == {**config, "torch_dtype": "bfloat16"}
    assert (out / "generation_config.json").read_bytes() == b"{}"


def test_a_tied_state_dict_may_hold_the_head_twice(tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    loaded = converters.open_state_dict(TIED, tensors | {HEAD: tensors[EMBEDDING]}, {})
    assert read_folder(export_again(loaded, tmp_path / "out")).keys() == tensors.keys()


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    tensors = random_tensors(MIX)
    del tensors["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"state dict.*missing: model\.norm\.weight"):
        converters.open_state_dict(MIX, tensors, {})


def test_a_new_source_is_complete(tmp_path: Path) -> None:
    bare = {key: value for key, value in Q3.items() if key not in ("architectures", "torch_dtype")}
    config, source = converters.new_source(bare, {}, "float16")
    assert {t.dtype for t in source.tensors} == {"F16"}
    assert {t.file for t in source.tensors} == {""}
    converters.export(config, source, lambda leaf, prefix: np.zeros(shape_at(config, leaf, prefix)), tmp_path / "out")
    written = CheckpointReader(tmp_path / "out")
    assert written.config == {**bare, "architectures": ["Qwen3MoeForCausalLM"], "dtype": "float16"}
    assert written.config["head_dim"] == 32
    assert converters.open_folder(tmp_path / "out").model_config == config
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        converters.new_source(bare, {}, "int8")


def shape_at(config: Any, leaf: str, prefix: tuple[int, ...]) -> tuple[int, ...]:
    from moe_jax.model import parameter_shapes

    return parameter_shapes(config)[leaf][len(prefix) :]
