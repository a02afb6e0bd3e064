"""`moe-jax doctor`: what it gathers, its words, and its exit status."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from numpy_hf import Q3

from moe_jax import doctor
from moe_jax.cli import main
from moe_jax.doctor import DEFAULT_MODELS, Probe, examine, find_model, report_lines, run_probe
from moe_jax.errors import ConfigError
from moe_jax.kernels import choice
from moe_jax.kernels.tiles import Tiles
from moe_jax.kernels.tuning import KNOWN_MODELS, MoEShape, add_entries

MODEL = {"mine": MoEShape(1024, 2, 8, 256, 128)}


def works(implementation: str) -> Probe:
    return Probe(implementation, 1e-3)


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.delenv(choice.TILES_VARIABLE, raising=False)


def text_of(report: Any) -> str:
    return "\n".join(report_lines(report))


def test_on_a_cpu_all_is_portable_and_that_is_no_fault(capsys: Any) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "jax 0.",
        "jaxlib 0.",
        "8 x cpu",
        "the products take the portable implementation",
        "No faults found",
        *DEFAULT_MODELS,
    ):
        assert expected in text
    assert "portable    ok" in text
    assert "mosaic_gpu" not in text
    assert "WARNING" not in text


def test_on_a_hopper_gpu_every_leg_names_its_tiles(on_h200: None, tmp_path: Path, monkeypatch: Any) -> None:
    shape = next(leg.shape for leg in examine(MODEL, probe=works).legs if leg.shape.leg == "weight_gradient")
    add_entries(tmp_path / "tiles.json", {choice.table_key(shape, "NVIDIA H200"): Tiles(width=3)})
    monkeypatch.setenv(choice.TILES_VARIABLE, str(tmp_path / "tiles.json"))
    report = examine(MODEL, probe=works)
    assert [leg.is_tuned for leg in report.legs] == [leg.shape == shape for leg in report.legs]
    assert len(report.legs) == 6
    assert [probe.implementation for probe in report.probes] == ["mosaic_gpu", "portable"]
    assert report.faults == []
    text = text_of(report)
    assert "mosaic_gpu  tuned: rows=64 columns=256 stages=4 cluster=1 width=3" in text
    assert "mosaic_gpu  default: rows=64" in text
    assert str(tmp_path / "tiles.json") in text


@pytest.mark.parametrize(("model", "dtype", "legs", "reason"), [
    (MODEL, jnp.float32, 6, "dtype is float32"),
    ({"mine": MoEShape(1024, 2, 8, 256, 96)}, jnp.bfloat16, 3, "the inner width is 96"),
])  # fmt: skip
def test_a_leg_without_the_fast_kernel_is_a_fault(
    model: Any, dtype: Any, legs: int, reason: str, on_h200: None, caplog: Any
) -> None:
    report = examine(model, dtype, probe=works)
    assert len(report.faults) == legs
    assert text_of(report).count(f"the fast kernel is not used: {reason}") == legs
    assert caplog.messages == []  # said once, by the report


def test_a_fault_is_exit_status_1(on_h200: None, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("moe_jax.doctor.run_probe", works)
    assert main(["doctor", "--model", "large", "--tokens", "512"]) == 0
    assert "large: 512 tokens" in capsys.readouterr().out
    assert main(["doctor", "--model", "large", "--dtype", "float32"]) == 1
    assert "WARNING: large, down, weight_gradient: the fast kernel is not used" in capsys.readouterr().out


@pytest.mark.parametrize(
    "probe", [Probe("portable", 0.5), Probe("portable", float("nan")), Probe("portable", 0, "boom")]
)
def test_a_product_that_is_wrong_or_raises_is_a_fault(probe: Probe) -> None:
    report = examine(MODEL, probe=lambda _: probe)
    (fault,) = report.faults
    assert fault.startswith("portable does not work: " + (probe.message or "WRONG"))


def test_the_portable_product_is_run_and_right(monkeypatch: Any) -> None:
    probe = run_probe("portable")
    assert probe.is_ok
    assert 1e-5 < probe.error < 4e-3  # rounding to bfloat16
    right = doctor._portable_legs
    monkeypatch.setattr(doctor, "_portable_legs", lambda *arrays: (*right(*arrays)[:2], jnp.ones((4, 256, 256))))
    assert run_probe("portable").error > 0.5


def test_a_kernel_that_cannot_run_gives_its_message() -> None:
    """Here there is no GPU at all."""
    probe = run_probe("mosaic_gpu")
    assert not probe.is_ok
    assert probe.message
    assert "\n" not in probe.message


def test_a_model_is_found_by_name_folder_or_config(tmp_path: Path) -> None:
    assert find_model("large") == ("large", KNOWN_MODELS["large"])
    assert find_model("large", 64)[1] == KNOWN_MODELS["large"]._replace(tokens=64)
    (tmp_path / "config.json").write_text(json.dumps(Q3))
    expected = (tmp_path.name, MoEShape(64, 2, 8, 64, 48))
    assert find_model(str(tmp_path), 64) == expected
    assert find_model(str(tmp_path / "config.json"), 64) == expected


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_what_is_no_model_is_refused(content: str | None, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError):
        find_model(str(path))
    assert main(["doctor", "--model", str(path)]) == 2
    assert capsys.readouterr().err.startswith("moe-jax: ")
