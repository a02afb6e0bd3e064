"""Round trips (same mesh, another mesh, moved folders) and every refusal, with real tiny models."""

import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from numpy_hf import TINY

import moe_jax
from moe_jax import checkpoint
from moe_jax.checkpoint import (
    TrainCheckpointer,
    TrainState,
    changed_settings,
    complete_steps,
    latest_step,
    load_model,
    named_arrays,
    read_model_info,
    replicated,
    restore,
    save_model,
)
from moe_jax.config import MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.hf import abstract_model
from moe_jax.model import named_parameters
from moe_jax.optim import make_optimizer
from moe_jax.run_config import OptimizerConfig
from moe_jax.sharding import parameter_shardings

HF = TINY | {"vocab_size": 37}
MOE = MoEConfig(moe_load_balancing="aux_loss", moe_z_loss_coeff=0.5)
OPTIMIZER = make_optimizer(OptimizerConfig(), 10)
RUN = {"optimizer": {"learning_rate": 1e-4}, "moe": {"moe_load_balancing": "sinkhorn"}}


def make_state(step: int = 3) -> TrainState:
    moe_jax.init({"expert_parallel_degree": 2})
    model = moe_jax.transform(HF, MOE)
    opt_state = jax.tree.map(lambda a: a + jnp.ones((), a.dtype), jax.jit(OPTIMIZER.init)(model))
    return TrainState(model, opt_state, replicated(np.int32(step)))


@pytest.fixture(scope="module")
def state() -> TrainState:
    return make_state()


@pytest.fixture(scope="module")
def saved(state: TrainState, tmp_path_factory: Any) -> Path:
    """A run's checkpoints folder with one complete step; tests that change it take a copy."""
    return write(tmp_path_factory.mktemp("run") / "checkpoints", state)


@pytest.fixture(autouse=True)
def _mesh() -> None:
    moe_jax.init({"expert_parallel_degree": 2})


def write(folder: Path, *states: TrainState, keep: int = 2) -> Path:
    with TrainCheckpointer(folder, keep) as checkpointer:
        for state in states:
            if hasattr(state.model, "config"):
                checkpointer.write_model_info(state.model, keep_source=False)
            checkpointer.save(int(state.step), state, RUN)
    return folder


def abstract(like: TrainState, **changes: Any) -> TrainState:
    model = abstract_model(dataclasses.replace(like.model.config, **changes), like.model.moe, jnp.float32, None)
    return TrainState(model, jax.eval_shape(OPTIMIZER.init, model), jax.ShapeDtypeStruct((), jnp.int32))


def assert_equal(a: Any, b: Any) -> None:
    a, b = named_arrays(a), named_arrays(b)
    assert list(a) == list(b)
    for name, x in a.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(b[name]), err_msg=name)


def test_names_are_the_parameters_names(state: TrainState) -> None:
    assert list(named_arrays(state.model)) == list(named_parameters(state.model))


def test_model_comes_back_with_its_configs_and_source(state: TrainState, tmp_path: Path) -> None:
    save_model(tmp_path / "model", state.model)
    loaded = load_model(tmp_path / "model")
    assert_equal(loaded, state.model)
    assert (loaded.config, loaded.moe, loaded.dtype) == (state.model.config, MOE, jnp.float32)
    assert loaded.source.config == state.model.source.config
    assert loaded.source.tensors == state.model.source.tensors
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("degrees", [{"expert_parallel_degree": 4, "hybrid_shard_degree": 1}, {}])
def test_model_is_born_in_the_shardings_of_another_mesh(state: TrainState, tmp_path: Path, degrees: Any) -> None:
    save_model(tmp_path / "model", state.model)
    mesh = moe_jax.init(degrees).mesh
    loaded = load_model(tmp_path / "model", config=MoEConfig(moe_load_balancing="none"), dtype=jnp.bfloat16)
    assert_equal(loaded, state.model)
    assert loaded.moe.moe_load_balancing == "none"
    assert loaded.dtype == jnp.bfloat16
    for leaf, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(parameter_shardings(loaded)), strict=True):
        assert leaf.sharding.mesh == mesh
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_model_is_not_written_over_anything(state: TrainState, tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        save_model(tmp_path, state.model)
    with pytest.raises(ConfigError, match="not an empty folder"):
        save_model(tmp_path / "keep.txt", state.model)


def test_model_folder_appears_only_when_complete(state: TrainState, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.StandardCheckpointer, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            save_model(tmp_path / "model", state.model)
    assert not (tmp_path / "model").exists()
    save_model(tmp_path / "model", state.model)
    assert_equal(load_model(tmp_path / "model"), state.model)


def test_model_fills_an_empty_folder_that_is_a_link_or_kept(
    state: TrainState, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with monkeypatch.context() as patch:  # an attempt that dies does not block the next one
        patch.setattr(checkpoint, "_move_up", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_model(tmp_path / "link", state.model)
    inode = (tmp_path / "real").stat().st_ino
    save_model(tmp_path / "link", state.model)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_ino == inode  # as a mount point needs it
    assert {path.name for path in (tmp_path / "real").iterdir()} == {"params", "hf", "model_config.json"}
    assert_equal(load_model(tmp_path / "real"), state.model)


def test_state_comes_back_on_this_and_another_mesh(state: TrainState, saved: Path) -> None:
    for degrees in ({"expert_parallel_degree": 2}, {"expert_parallel_degree": 1, "hybrid_shard_degree": 4}):
        mesh = moe_jax.init(degrees).mesh
        restored = restore(saved, abstract(state), RUN)
        assert_equal(restored, state)
        assert int(restored.step) == 3
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(restored))
        moments, params = named_arrays(restored.opt_state), named_arrays(restored.model)
        name = next(name for name in params if name.endswith("mlp.down"))
        (moment,) = [value for key, value in moments.items() if key.endswith(f"mu.{name}")]
        assert isinstance(moment.sharding, NamedSharding)
        assert moment.sharding.spec == params[name].sharding.spec


def test_newest_checkpoints_are_kept_and_complete_on_return(state: TrainState, tmp_path: Path) -> None:  # C77
    states = [TrainState(state.model, state.opt_state, replicated(np.int32(step))) for step in (5, 10, 12)]
    write(tmp_path / "run", *states, keep=2)
    assert complete_steps(tmp_path / "run") == [10, 12]
    assert latest_step(tmp_path / "run") == 12
    assert int(restore(tmp_path / "run", abstract(state), RUN).step) == 12


def test_model_of_a_run_loads_without_the_original(state: TrainState, saved: Path) -> None:
    loaded = load_model(saved)
    assert_equal(loaded, state.model)
    assert loaded.source.config["num_local_experts"] == 4


def without(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arrays.items() if key != name}


def test_missing_and_extra_arrays_are_named(state: TrainState, tmp_path: Path) -> None:  # C80
    params, moments = named_arrays(state.model), named_arrays(state.opt_state)
    for number, (model, opt_state, message) in enumerate([
        (without(params, "embed.weight"), moments, r"params' is missing embed\.weight"),
        (params | {"extra.weight": jnp.ones(2)}, moments, r"has unexpected extra\.weight"),
        (params | {"final_norm.weight": jnp.ones(2)}, moments, r"another shape or dtype final_norm\.weight \(\(2,\)"),
        (params, without(moments, next(iter(moments))), "opt_state' is missing 1.0.count"),
    ]):  # fmt: skip
        folder = write(tmp_path / str(number), state)
        shutil.rmtree(folder / "3")
        with TrainCheckpointer(folder) as checkpointer:
            checkpointer.save(3, TrainState(model, opt_state, state.step), RUN)
        with pytest.raises(ConfigError, match=message):
            restore(folder, abstract(state), RUN)


def test_selection_biases_come_and_go_with_the_balancing_mode(state: TrainState, tmp_path: Path, caplog: Any) -> None:
    """Sinkhorn -> expert_bias -> expert_bias -> sinkhorn: fresh at zero, kept, left behind; each change is logged."""
    biased_config = dataclasses.replace(state.model.moe, moe_load_balancing="expert_bias")

    def biased_like() -> TrainState:
        model = abstract_model(state.model.config, biased_config, jnp.float32, None)
        return TrainState(model, jax.eval_shape(OPTIMIZER.init, model), jax.ShapeDtypeStruct((), jnp.int32))

    fresh = restore(write(tmp_path / "plain", state), biased_like(), RUN)
    biases = [name for name in named_arrays(fresh.model) if name.endswith("expert_bias")]
    assert biases
    assert not any(np.any(named_arrays(fresh.model)[name]) for name in biases)
    assert "params: the checkpoint has no selection biases, they start at zero" in caplog.messages
    moved = dataclasses.replace(fresh, model=jax.tree.map(lambda a: a + 1, fresh.model))
    folder = write(tmp_path / "biased", moved)
    assert_equal(restore(folder, biased_like(), RUN), moved)
    caplog.clear()
    back = restore(folder, abstract(state), RUN)
    assert_equal(back.model, jax.tree.map(lambda a: a + 1, state.model))
    assert "params: the checkpoint's selection biases are left behind" in caplog.messages


def test_missing_optimizer_state_is_refused(state: TrainState, saved: Path, tmp_path: Path) -> None:  # C80
    shutil.copytree(saved, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "3" / "opt_state")
    with pytest.raises(ConfigError, match="no 'opt_state'"):
        restore(tmp_path / "run", abstract(state), RUN)


def test_another_expert_count_is_refused_by_name(state: TrainState, saved: Path) -> None:  # C83
    other = abstract(state, num_experts=8)
    with pytest.raises(ConfigError, match="num_experts is 4 there and 8 in this run"):
        restore(saved, other, RUN)


def test_changed_settings_are_logged(state: TrainState, saved: Path, caplog: Any) -> None:  # C83
    changed = {"optimizer": {"learning_rate": 3e-4}, "moe": {"moe_load_balancing": "none"}}
    with caplog.at_level(logging.WARNING, "moe_jax"):
        restore(saved, abstract(state), changed)
    assert any("optimizer.learning_rate was 0.0001 and is now 0.0003" in message for message in caplog.messages)
    assert any("moe.moe_load_balancing was 'sinkhorn' and is now 'none'" in message for message in caplog.messages)
    assert changed_settings(RUN, RUN) == []


def test_moved_linked_and_relative_folders_restore(
    state: TrainState, saved: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    shutil.copytree(saved, tmp_path / "moved")  # C84
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    for folder in ("moved", "./moved/", f"{tmp_path}/moved/", "link", os.path.join("link", "..", "moved")):
        assert_equal(restore(folder, abstract(state), RUN), state)
        assert_equal(load_model(folder), state.model)


def test_checkpointer_writes_through_relative_paths_and_links(
    state: TrainState, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "real").mkdir()  # C84
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    write(Path("link/run/"), state)
    assert complete_steps(tmp_path / "real" / "run") == [3]


@pytest.mark.parametrize("make", [None, "", "9.orbax-checkpoint-tmp-1"])
def test_folder_without_a_complete_checkpoint_says_so(
    state: TrainState, tmp_path: Path, make: str | None
) -> None:  # C84
    folder = tmp_path / "run"
    if make is not None:
        (folder / make).mkdir(parents=True)
    for attempt in (lambda: restore(folder, abstract(state), RUN), lambda: load_model(folder)):
        with pytest.raises(ConfigError, match="no complete checkpoint here"):
            attempt()


def test_damaged_model_description_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "model_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model_config\.json"):
        load_model(tmp_path / "run")


@pytest.mark.parametrize(("change", "message"), [
    (lambda record: record["model"].update(colour=1), "model has unknown key.*'colour'"),
    (lambda record: record["model"]["layers"][1].update(is_mo=1), "layers has unknown key.*'is_mo'.*'is_moe'"),
    (lambda record: record["model"]["rope"].update(thta=1), "rope has unknown key.*'thta'.*'theta'"),
    (lambda record: record["model"]["rope"].update(theta="big"), "rope cannot be read"),
    (lambda record: record["model"].pop("num_experts"), "model cannot be read.*num_experts"),
    (lambda record: record["model"].update(layers=3), "no model description"),
    (lambda record: record.update(moe=[]), r"moe is \[\], but must be an object"),
])  # fmt: skip
def test_wrong_parts_of_a_model_description_are_named(saved: Path, tmp_path: Path, change: Any, message: str) -> None:
    record = json.loads((saved / "model_config.json").read_text())
    change(record)
    (tmp_path / "model_config.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=rf"model_config\.json.*{message}"):
        read_model_info(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"config": {}, "tensors": [{"name": 1}]}'])
def test_damaged_source_is_named(saved: Path, tmp_path: Path, content: str) -> None:
    shutil.copy(saved / "model_config.json", tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "source.json").write_text(content)
    with pytest.raises(ConfigError, match=r"hf/source\.json' or a file beside it cannot be read"):
        read_model_info(tmp_path)
