"""Checkpoints through Orbax: a model on its own, and a training run's state that continues exactly.

A model folder:     params/  model_config.json  hf/
A run's folder:     <step>/{params, opt_state, run}/ ...  model_config.json  hf/
`params` is a flat dict parameter name -> float32 array, `opt_state` the same for the optimizer; both are written and
read shard by shard, so another mesh may restore them. `hf/` is the model's `HFSource`: an export needs no original.
"""

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
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError

from moe_jax.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.errors import ConfigError, refuse_unknown
from moe_jax.expert_bias import is_expert_bias
from moe_jax.mesh import state as mesh_state
from moe_jax.model import CausalLM
from moe_jax.optim import leaf_names
from moe_jax.source import HFSource

PARAMS, OPT_STATE, RUN = "params", "opt_state", "run"
UNFINISHED = ".unfinished"
MODEL_FILE, SOURCE_FOLDER = "model_config.json", "hf"
# Settings that may differ between a run and its continuation without a word.
NOT_COMPARED = ("output", "train.resume", "train.collapse_load", "train.collapse_steps")
NAMES_SHOWN = 12  # of a list of missing or unexpected arrays

logger = logging.getLogger("moe_jax")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a training step changes. step: int32 scalar, the number of steps done."""

    model: Any
    opt_state: Any
    step: Any


def named_arrays(tree: Any) -> dict[str, Any]:
    """Returns dotted leaf name -> leaf; a model's names are its parameters' names."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def with_arrays(tree: Any, arrays: dict[str, Any]) -> Any:
    """Returns `tree` with the leaves that `named_arrays` names replaced by `arrays`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in leaf_names(tree)])


# ---- the model's description ----


def write_model_info(folder: Path, model: Any, *, keep_source: bool = False) -> None:
    """Writes model_config.json and hf/ into `folder`, each complete or not at all.

    keep_source: leave an hf/ that is there already as it is.
    """
    record = {
        "model": dataclasses.asdict(model.config),
        "moe": dataclasses.asdict(model.moe),
        "dtype": jnp.dtype(model.dtype).name,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if model.source is not None and not (keep_source and (folder / SOURCE_FOLDER).is_dir()):
        with replacing(folder / SOURCE_FOLDER) as unfinished:
            model.source.save(unfinished)
    with replacing(folder / MODEL_FILE) as unfinished:
        unfinished.write_text(json.dumps(record, indent=2) + "\n")


class replacing:
    """Gives a path to write to, and puts it in the place of `target` when the block ends without an error."""

    def __init__(self, target: Path) -> None:
        self.target, self.unfinished = target, target.with_name(target.name + UNFINISHED)

    def __enter__(self) -> Path:
        _remove(self.unfinished)
        return self.unfinished

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self.target.is_dir():
                shutil.rmtree(self.target)
            self.unfinished.replace(self.target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_model_info(folder: Path) -> tuple[ModelConfig, MoEConfig, str, HFSource | None]:
    """Returns what `write_model_info` wrote: model config, MoE config, compute dtype, source."""
    path = folder / MODEL_FILE
    try:
        record = json.loads(path.read_text())
        model, moe, dtype = record["model"], record["moe"], record["dtype"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a model description: {error!r}") from None
    if not isinstance(model, dict) or not isinstance(model.get("layers"), list) or not isinstance(dtype, str):
        raise ConfigError(
            f"{str(path)!r} is no model description: it needs objects model (with layers) and moe, and dtype"
        )
    layers = tuple(_built(LayerConfig, layer, f"{path}: layers") for layer in model["layers"])
    rope = _built(RopeConfig, model.get("rope"), f"{path}: rope")
    config = _built(ModelConfig, {**model, "layers": layers, "rope": rope}, f"{path}: model")
    return config, _built(MoEConfig, moe, f"{path}: moe"), dtype, _read_source(folder / SOURCE_FOLDER)


def _built(cls: Any, given: Any, where: str) -> Any:
    """`cls(**given)`; `ConfigError` naming `where` for anything that does not fit."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {given!r}, but must be an object")
    refuse_unknown(where, given, (field.name for field in dataclasses.fields(cls)))
    try:
        return cls(**given)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None


def _read_source(folder: Path) -> HFSource | None:
    """The source that a checkpoint carries, if any."""
    if not folder.is_dir():
        return None
    try:
        return HFSource.load(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{str(folder / 'source.json')!r} or a file beside it cannot be read: {error!r}") from None


def check_same_model(stored: ModelConfig, wanted: ModelConfig, where: Path) -> None:
    """Raises `ConfigError` naming every field in which the checkpoint's model is another one."""
    differing = [
        f"{field.name} is {getattr(stored, field.name)!r} there and {getattr(wanted, field.name)!r} in this run"
        for field in dataclasses.fields(ModelConfig)
        if getattr(stored, field.name) != getattr(wanted, field.name)
    ]
    if differing:
        raise ConfigError(f"the checkpoint in {str(where)!r} is of another model: {'; '.join(differing)}")


# ---- arrays ----


def abstract_arrays(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns name -> shape, dtype and the sharding on the current mesh, for a pytree of arrays or of their types."""
    mesh = mesh_state.mesh

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return {name: describe(leaf) for name, leaf in named_arrays(tree).items()}


def read_arrays(folder: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns the arrays of a saved flat dict, each born in the sharding of `wanted`.

    Raises `ConfigError` with the names where the folder holds fewer, more, or other-shaped arrays than wanted. Only the experts'
    selection biases may come and go with the balancing mode: they start at zero or are left behind, with a log line.
    """
    if not folder.is_dir():
        raise ConfigError(f"the checkpoint has no {folder.name!r}: {str(folder)!r} does not exist")
    handler = ocp.StandardCheckpointHandler()
    path: Any = folder  # annotated as another path class, which takes this one
    stored = handler.metadata(path).tree
    fresh = {name for name in set(wanted) - set(stored) if is_expert_bias(name)}
    surplus = {name for name in set(stored) - set(wanted) if is_expert_bias(name)}
    problems = [
        _listing("is missing", set(wanted) - set(stored) - fresh),
        _listing("has unexpected", set(stored) - set(wanted) - surplus),
        _listing("has in another shape or dtype", [
            f"{name} ({tuple(stored[name].shape)} {stored[name].dtype}, wanted {want.shape} {want.dtype})"
            for name, want in wanted.items()
            if name in stored and (tuple(stored[name].shape), stored[name].dtype) != (want.shape, want.dtype)
        ]),
    ]  # fmt: skip
    if any(problems):
        raise ConfigError(f"the checkpoint {str(folder)!r} {'; it '.join(filter(None, problems))}")
    asked = {name: want for name, want in wanted.items() if name not in fresh}
    asked |= {name: _replicated_like(stored[name]) for name in surplus}
    with ocp.Checkpointer(handler) as checkpointer:
        arrays = checkpointer.restore(folder, args=ocp.args.StandardRestore(asked))
    if fresh:
        logger.warning("%s: the checkpoint has no selection biases, they start at zero", folder.name)
    if surplus:
        logger.warning("%s: the checkpoint's selection biases are left behind", folder.name)
    zeros = {
        name: jax.device_put(np.zeros(wanted[name].shape, wanted[name].dtype), wanted[name].sharding) for name in fresh
    }
    return {name: arrays[name] for name in wanted if name not in fresh} | zeros


def _replicated_like(stored: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh_state.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(tuple(stored.shape), stored.dtype, sharding=sharding)


def _listing(verb: str, names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{verb} {', '.join(names[:NAMES_SHOWN])}{more}" if names else ""


# ---- a model on its own ----


def save_model(folder: str | Path, model: Any) -> None:
    """Writes the model as a folder for `load_model`; refuses a folder that is not empty.

    The folder appears when everything is in it; one that is there already (it may be a link or a mount point) is filled
    at the end, the description without which nothing loads last. Every process calls this.
    """
    target = Path(os.path.realpath(folder))
    exists = target.exists()
    if exists and (not target.is_dir() or any(path.name != UNFINISHED for path in target.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not an empty folder; a model is written to a new one")
    unfinished = target / UNFINISHED if exists else target.with_name(target.name + UNFINISHED)
    _barrier("save_model: checked")
    if jax.process_index() == 0:
        _remove(unfinished)
        write_model_info(unfinished, model)
    _barrier("save_model: start")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(unfinished / PARAMS, named_arrays(model))
    _barrier("save_model: written")
    if jax.process_index() == 0:
        _move_up(unfinished) if exists else unfinished.rename(target)
    _barrier("save_model: done")


def _move_up(unfinished: Path) -> None:
    """Moves what is in the folder into its parent, `MODEL_FILE` last."""
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == MODEL_FILE):
        path.rename(unfinished.parent / path.name)
    unfinished.rmdir()


def load_model(folder: str | Path, *, config: MoEConfig | None = None, dtype: Any = None) -> CausalLM:
    """Returns the model of a folder by `save_model`, or of the newest step in a run's checkpoints folder.

    Every parameter is read straight into its sharding on the current mesh.
    config, dtype: other MoE switches or another compute dtype than the saved ones.
    """
    root = _absolute(folder)
    params = root / PARAMS
    if not params.is_dir():
        params = root / str(latest_step(root)) / PARAMS
    model_config, moe, saved_dtype, source = read_model_info(root)
    model = _abstract_model(model_config, config or moe, dtype or saved_dtype, source)
    return with_arrays(model, read_arrays(params, abstract_arrays(model)))


def _abstract_model(config: ModelConfig, moe: MoEConfig, dtype: Any, source: HFSource | None) -> Any:
    from moe_jax.hf import abstract_model

    return abstract_model(config, moe, dtype, source)


def _absolute(folder: str | Path) -> Path:
    return Path(os.path.abspath(folder))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


# ---- a training run ----


def complete_steps(folder: str | Path) -> list[int]:
    """Returns the steps of which the folder holds a complete checkpoint, in order; unfinished ones don't count."""
    root = _absolute(folder)
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and path.name.isdigit()]
    return sorted(int(path.name) for path in found if ocp.utils.is_checkpoint_finalized(path))


def latest_step(folder: str | Path) -> int:
    """Returns the newest complete step; raises `ConfigError` when there is none."""
    steps = complete_steps(folder)
    if not steps:
        raise ConfigError(f"no complete checkpoint here: {str(folder)!r}")
    return steps[-1]


class TrainCheckpointer:
    """Writes a run's checkpoints in the background, keeping the newest `keep`; a context manager that waits at its end.

    A checkpoint appears under its step's number only when complete: a killed process leaves the ones before it intact.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder = _absolute(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "TrainCheckpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits until every checkpoint is on disk."""
        self._manager.close()

    def write_model_info(self, model: Any, *, keep_source: bool) -> None:
        """Writes what every step of the run shares, before the first `save`."""
        if jax.process_index() == 0:
            write_model_info(self.folder, model, keep_source=keep_source)

    def save(self, step: int, state: TrainState, run: dict[str, Any]) -> None:
        """Starts writing `state` and the run's settings; returns once the arrays are copied and may be donated."""
        self._manager.save(step, args=ocp.args.Composite(**{
            PARAMS: ocp.args.StandardSave(named_arrays(state.model)),
            OPT_STATE: ocp.args.StandardSave(named_arrays(state.opt_state)),
            RUN: ocp.args.JsonSave(run),
        }))  # fmt: skip


def restore(folder: str | Path, abstract: TrainState, run: dict[str, Any]) -> TrainState:
    """Returns the newest complete state in the shardings of `abstract` on the current mesh.

    abstract: a state whose leaves have shape, dtype and sharding; its model's config must be the checkpoint's.
    run: this run's settings; those that differ from the ones the checkpoint was made with are logged.
    """
    root = _absolute(folder)
    step = latest_step(root)
    check_same_model(read_model_info(root)[0], abstract.model.config, root)
    params = read_arrays(root / str(step) / PARAMS, abstract_arrays(abstract.model))
    opt_state = read_arrays(root / str(step) / OPT_STATE, abstract_arrays(abstract.opt_state))
    for change in changed_settings(read_run(root, step), run):
        logger.warning("resuming at step %d with a changed setting: %s", step, change)
    return TrainState(
        model=with_arrays(abstract.model, params),
        opt_state=with_arrays(abstract.opt_state, opt_state),
        step=replicated(np.int32(step)),
    )


def read_run(folder: Path, step: int) -> dict[str, Any]:
    """Returns the run settings that the checkpoint was made with."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder / str(step) / RUN)


def replicated(value: Any) -> jax.Array:
    """Returns the host value as an array that every device of the mesh holds."""
    return jax.device_put(value, NamedSharding(mesh_state.mesh, PartitionSpec()))


def changed_settings(before: Any, after: Any, name: str = "") -> list[str]:
    """Returns one sentence for each leaf of two nested dicts that differs and matters."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [
            line
            for key in keys
            for line in changed_settings(before.get(key), after.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if before == after or name in NOT_COMPARED else [f"{name} was {before!r} and is now {after!r}"]
