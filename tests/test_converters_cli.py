"""`python -m converters`: what it prints, its exit codes, and its comparisons."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy_hf import CONFIGS, MIX, Q3, random_tensors, write_folder

from converters.__main__ import main
from converters.parity import compare_folders, compare_outputs, differing_experts
from converters.report import count_parameters, describe

REPO = Path(__file__).parent.parent


@pytest.fixture
def no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process must not replace its mesh."""
    monkeypatch.setattr("converters.__main__._initialise", lambda args: None)


def run(*args: str | Path, torch: bool = False) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where torch cannot be imported unless `torch`."""
    code = "import sys; from converters.__main__ import main; sys.exit(main())"
    code = code if torch else code.replace("sys;", "sys; sys.modules['torch'] = None;", 1)
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_inspect_tells_family_sizes_and_files_without_torch(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", Q3, random_tensors(Q3), shards=2)
    result = run("inspect", source)
    assert result.returncode == 0, result.stderr
    for text in ("qwen3_moe", "8 a layer, 2 per token", "BF16", "2 file(s)", "default, theta 1e+06"):
        assert text in result.stdout


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_parameter_counts_are_those_of_the_file(tmp_path: Path, config: dict) -> None:
    import converters

    model_config, source = converters.new_source(config, {}, "bfloat16")
    count = count_parameters(model_config)
    assert count.total == sum(int(np.prod(t.shape)) for t in source.tensors)
    experts = sum(int(np.prod(t.shape)) for t in source.tensors if ".experts." in t.name)
    share = model_config.num_experts_per_tok / model_config.num_experts
    assert count.active == count.total - experts * (1 - share)
    assert count.one_expert * model_config.num_experts * model_config.num_moe_layers == experts


def test_describe_shows_scaled_rope_and_windows(tmp_path: Path) -> None:
    config = MIX | {"sliding_window": 7, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    text = describe(write_folder(tmp_path / "in", config, random_tensors(config)))
    assert text["rope"] == "yarn, theta 1e+06, factor 4"
    assert text["attention"].endswith("sliding window 7")


@pytest.mark.parametrize("command", ["inspect", "from-hf", "roundtrip", "verify"])
def test_input_that_cannot_work_is_one_line_and_exit_code_2(tmp_path: Path, command: str, capsys, no_mesh) -> None:
    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX), shards=2)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1024])
    out = [str(tmp_path / "out")] if command == "from-hf" else []
    assert main([command, str(source), *out]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert shard.name in captured.err
    assert not (tmp_path / "out").exists()


def test_a_file_system_error_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, no_mesh) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    monkeypatch.setattr("converters.parity.round_trip", full)
    assert main(["roundtrip", str(source)]) == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(("number", "message"), [
    ("-1", "devices is -1, but must be 0 .* or a positive integer"),
    ("1000", "devices is 1000, but must be at most 8, the devices that XLA_FLAGS allows"),
])  # fmt: skip
def test_impossible_numbers_of_devices_are_refused(tmp_path: Path, capsys, number: str, message: str) -> None:
    assert main(["roundtrip", str(tmp_path), "--devices", number]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_outputs_that_are_not_empty_are_refused_before_any_work(tmp_path: Path, capsys) -> None:
    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    for command in ("from-hf", "to-hf"):
        assert main([command, str(tmp_path / "absent"), str(source)]) == 2
        assert "not empty" in capsys.readouterr().err
    assert main(["to-hf", str(source), str(tmp_path / "out"), "--max-shard-size", "huge"]) == 2
    assert "size is 'huge'" in capsys.readouterr().err


def test_roundtrip_on_a_mesh_of_simulated_devices_finds_no_difference(tmp_path: Path) -> None:
    config = Q3 | {"mlp_only_layers": [1]}
    files = {"generation_config.json": b"{ }"}
    source = write_folder(tmp_path / "in", config, random_tensors(config), shards=3, files=files)
    result = run("roundtrip", source, "--expert-parallel-degree", "2", "--hybrid-shard-degree", "2")
    assert result.returncode == 0, result.stderr
    assert "and 2 other files: 0 difference(s)" in result.stdout


def test_a_checkpoint_of_the_library_goes_back_to_the_same_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX), shards=2)
    first = run("from-hf", source, tmp_path / "library")
    assert first.returncode == 0, first.stderr
    second = run("to-hf", tmp_path / "library", tmp_path / "out", "--expert-parallel-degree", "4")
    assert second.returncode == 0, second.stderr
    result = compare_folders(source, tmp_path / "out")
    assert (result.num_tensors, result.num_files, result.differences) == (len(random_tensors(MIX)), 1, ())


def test_every_kind_of_difference_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(MIX)
    old = write_folder(tmp_path / "old", MIX, tensors | {"x.rotary_emb.inv_freq": np.ones(2)}, files={"a.txt": b"1"})
    changed = dict(tensors)
    name = "model.norm.weight"
    flipped = changed[name].copy()
    flipped.view(np.uint16)[3] ^= 1
    changed[name] = flipped
    changed["lm_head.weight"] = changed["lm_head.weight"].astype(np.float16)
    del changed["model.embed_tokens.weight"]
    changed["new"] = np.ones(1)
    result = compare_folders(old, write_folder(tmp_path / "new", MIX, changed, files={"a.txt": b"2", "b.txt": b""}))
    text = "\n".join(result.differences)
    assert len(result.differences) == 6
    for part in (f"{name} has other bytes", "lm_head.weight is", "embed_tokens.weight is not in",
                 "new is in the export only", "file a.txt", "file b.txt"):  # fmt: skip
        assert part in text
    assert result.left_out == ("x.rotary_emb.inv_freq",)


def test_roundtrip_exits_with_1_when_something_differs(tmp_path: Path, monkeypatch, capsys, no_mesh) -> None:
    import converters.parity

    source = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    other = write_folder(tmp_path / "other", MIX, random_tensors(MIX, seed=1))
    monkeypatch.setattr(converters.parity, "round_trip", lambda folder, **_: compare_folders(folder, other))
    assert main(["roundtrip", str(source), "--devices", "1"]) == 1
    assert "DIFFERENT: tensor model.norm.weight has other bytes" in capsys.readouterr().out


def test_differing_expert_sets_are_counted_by_token() -> None:
    router = np.array(
        [[[3.0, 2.0, 1.0], [1.0, 1.1, 0.0], [0.0, 5.0, 4.0]], [[9.0, 0.0, 8.0], [3.0, 2.5, 2.0], [1, 2, 3]]]
    )
    same = np.array([[[1, 0], [0, 1], [2, 1]], [[0, 2], [1, 0], [1, 2]]])  # order does not matter
    logits = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    equal = compare_outputs(logits, same, logits, router, length=3)
    assert (equal.relative_norm, equal.max_abs, equal.top1, equal.num_differing) == (0, 0, 1, 0)
    assert equal.logits_match
    assert equal.only_near_ties
    other = same.copy()
    other[1, 1] = [0, 2]  # the second token, in the second layer, at a gap of 0.5
    differing = compare_outputs(logits[[1, 1, 2]], other, logits, router, length=3)
    assert (differing.num_differing, differing.num_tokens, differing.logits_match) == (1, 3, False)
    np.testing.assert_allclose(differing.gaps, [0.5 / router[1].std()])
    assert not differing.only_near_ties
    assert differing.top1 == 2 / 3
    assert differing.max_abs == 1


def test_a_token_that_sees_another_one_differ_is_no_start() -> None:
    """Only tokens before it in its row, in a layer before, can have changed a token."""
    router = np.tile(np.array([2.0, 1.0, 0.0]), (2, 4, 1))
    ids = np.zeros((2, 4, 1), int)
    ids[0, 1] = ids[1, 0] = ids[1, 1] = ids[1, 2] = 1  # layer 0: token 1; layer 1: tokens 0, 1 and 2
    for length, starts in ((4, 2), (2, 3)):  # in rows of two, token 2 sees nothing of token 1
        num_differing, gaps = differing_experts(ids, router, length)
        assert (num_differing, len(gaps)) == (3, starts)


@pytest.mark.torch
def test_verify_finds_the_same_logits_as_transformers(tmp_path: Path) -> None:
    import warnings

    from tiny_hf import make_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = make_checkpoint(tmp_path / "in", "qwen3_moe_yarn")
    result = run("verify", source, "--tokens", "300", torch=True)
    assert result.returncode == 0, result.stderr
    assert "logits of 300 tokens" in result.stdout
    assert "differs in any layer: 0" in result.stdout


@pytest.mark.torch
def test_verify_in_bfloat16_passes_with_near_ties_only(tmp_path: Path, monkeypatch, capsys, no_mesh) -> None:
    """C28: 512 tokens; with another rotary base than the file's the differences are no near-ties."""
    import warnings

    from tiny_hf import make_checkpoint

    import converters.parity
    import moe_jax

    moe_jax.init()
    reference = converters.parity._reference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = make_checkpoint(tmp_path / "in", "qwen3_moe")
        command = ["verify", str(source), "--dtype", "bfloat16", "--length", "256"]
        assert main(command) == 0
        printed = capsys.readouterr().out
        assert "logits of 512 tokens" in printed
        assert re.search(r"experts differs in any layer: [1-9]\d*; it starts at [1-9]\d* of them", printed)
        config = json.loads((source / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] *= 1.3
        other = make_checkpoint(tmp_path / "other", "qwen3_moe", rope_parameters=config["rope_parameters"])
        monkeypatch.setattr(converters.parity, "_reference", lambda folder, *a, **k: reference(other, *a, **k))
        assert main(command) == 1
        assert "NO MATCH: the experts may differ only where" in capsys.readouterr().out


@pytest.mark.torch
def test_verify_takes_a_model_without_moe_layers(tmp_path: Path, capsys, no_mesh) -> None:
    import warnings

    from tiny_hf import make_checkpoint

    import moe_jax

    moe_jax.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = make_checkpoint(tmp_path / "in", "qwen3_moe", mlp_only_layers=[0, 1, 2])
        assert main(["verify", str(source), "--tokens", "16", "--length", "8"]) == 0
    assert "differs in any layer: 0\nmatch" in capsys.readouterr().out


@pytest.mark.torch
def test_verify_exits_with_1_for_other_logits(tmp_path: Path, monkeypatch, capsys, no_mesh) -> None:
    import converters.parity

    bad = compare_outputs(np.ones((2, 3)), np.zeros((1, 2, 1), int), np.eye(2, 3), np.eye(2)[None], length=2)
    monkeypatch.setattr(converters.parity, "verify", lambda folder, **_: bad)
    assert main(["verify", str(tmp_path), "--devices", "1"]) == 1
    assert "NO MATCH" in capsys.readouterr().out
