"""Hugging Face -> `CausalLM` and back: the one module of `moe_jax` that uses `converters`."""

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

import converters
from converters.io import carried_files
from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.expert_bias import is_expert_bias
from moe_jax.mesh import state
from moe_jax.model import CausalLM, named_parameters
from moe_jax.sharding import parameter_shardings
from moe_jax.source import HFSource

logger = logging.getLogger("moe_jax")

COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def transform(
    model: Any, config: Any = None, dtype: Any = None, *, remat: str = "full", carry_unknown: bool = False
) -> CausalLM:
    """A `CausalLM` on the current mesh, its parameters born in their shards.

    model: a torch Hugging Face model (its weights are carried over); a checkpoint folder (read slice by slice straight into
        the shards, without torch); or a Hugging Face config, as the config object or its dict (random initial weights, the
        same on every mesh).
    config: the switches, a `MoEConfig`; None for their defaults.
    dtype: the compute dtype, "float32", "bfloat16" or "float16"; None takes the model's own. Parameters are float32
        always: they are the master copy that an optimizer updates.
    remat: what the backward pass recomputes: "full" keeps only the layers' inputs and the routing, "dispatched" also the rows
        that the experts received (so that the exchange is not repeated), "none" everything.
    carry_unknown: take a folder with tensors that the model has no place for, and write them back unchanged.
    Raises `ConfigError` for anything that does not fit together, before a weight is read where that is possible.
    """
    moe = MoEConfig() if config is None else config
    if not isinstance(moe, MoEConfig):
        raise ConfigError(f"config is a {type(moe).__name__}, but must be a moe_jax.MoEConfig")
    if isinstance(model, str | Path):
        loaded = converters.open_folder(Path(model), carry_unknown=carry_unknown)
    elif hasattr(model, "state_dict") and hasattr(model, "config"):
        loaded = _open_torch_model(model)
    else:
        return from_config(*_config_and_files(model), moe, dtype, remat=remat)
    abstract = abstract_model(
        loaded.model_config, moe, _compute_dtype(dtype, loaded.source), loaded.source, remat=remat
    )
    _note_router_noise(loaded.source.config, moe)
    return fill(abstract, partial(_read_parameter, abstract, loaded.read))


def save_pretrained(model: CausalLM, folder: str | Path, max_shard_size: int | str | None = None) -> None:
    """Writes the model as a Hugging Face checkpoint: names, dtypes, shards and other files as in the source.

    folder: absent or empty; it appears complete or not at all.
    max_shard_size: bytes, or "100MB"; None keeps the source's shards (a model without source files gets 5 GB shards).
    """
    if model.source is None:
        raise ConfigError(
            "this model has no Hugging Face source (it was not made by transform), so it cannot be exported"
        )
    max_bytes = converters.parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    parameters = {name: param[...] for name, param in named_parameters(model).items()}
    converters.export(model.config, model.source, lambda name, prefix: fetch(parameters[name], prefix), Path(folder),
                      max_bytes)  # fmt: skip


def model_config_of(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model that a parsed config.json describes; `ConfigError` for one that the library does not have."""
    return converters.new_source(dict(hf_config), {}, "float32")[0]


def abstract_model(
    model_config: ModelConfig, moe: MoEConfig, dtype: Any, source: HFSource | None, *, remat: str = "full"
) -> CausalLM:
    """The model with a `jax.ShapeDtypeStruct` (its sharding set) in the place of every array."""
    _check(model_config, moe)
    model = jax.eval_shape(_constructor(model_config, moe, dtype, source, remat))
    return jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), model, parameter_shardings(model)
    )


def fill(abstract: CausalLM, read: Callable[[str, Any], np.ndarray]) -> CausalLM:
    """The model whose parameters are `read(name, slices)`, asked for only the slices of this process's shards."""
    named = zip(named_parameters(abstract), jax.tree.leaves(abstract), strict=True)
    arrays = [_read_shards(leaf, partial(read, name)) for name, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def _read_parameter(abstract: CausalLM, read: Callable[[str, Any], np.ndarray], name: str, index: Any) -> np.ndarray:
    """A slice of the checkpoint's parameter; a selection bias, which no family here stores, starts at zero."""
    if is_expert_bias(name):
        (leaf,) = jax.tree.leaves(named_parameters(abstract)[name])
        return np.zeros([len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True)], leaf.dtype)
    return read(name, index)


def _read_shards(leaf: jax.ShapeDtypeStruct, read: Callable[[Any], np.ndarray]) -> jax.Array:
    """The array, read and copied to its devices shard by shard: the host holds one shard at a time."""
    devices_of: dict[Any, list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        devices_of.setdefault(tuple((s.start, s.stop) for s in index or ()), []).append((device, index))
    shards = []
    for copies in devices_of.values():
        values = read(copies[0][1])
        if not values.flags.owndata:  # JAX on CPU may keep the buffer, which must not be a torch tensor's or a file's
            values = values.copy()
        shards += jax.block_until_ready([jax.device_put(values, device) for device, _ in copies])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def fetch(array: jax.Array, prefix: tuple[int, ...]) -> np.ndarray:
    """array[prefix] on the host, copying from each device no more than its part of that block."""
    if not array.is_fully_addressable:
        raise ConfigError("save_pretrained needs all shards in one process; this array spans several")
    result = np.empty(array.shape[len(prefix) :], array.dtype)
    seen = set()
    for shard in array.addressable_shards:
        starts = [s.start or 0 for s in shard.index]
        local = tuple(p - start for p, start in zip(prefix, starts, strict=False))
        inside = all(0 <= i < size for i, size in zip(local, shard.data.shape, strict=False))
        if not inside or tuple(starts) in seen:
            continue
        seen.add(tuple(starts))
        result[tuple(shard.index[len(prefix) :])] = _take_on_device(shard, local)
    return result


def _take_on_device(shard: jax.Shard, index: tuple[int, ...]) -> np.ndarray:
    """shard.data[index], cut out before it is copied to the host."""
    # The plain one-device layout: a shard of a one-device mesh still carries that mesh in its type.
    block = jax.device_put(shard.data, SingleDeviceSharding(shard.device))
    with jax.set_mesh(jax.sharding.Mesh(np.array([shard.device]), ("device",))):
        for i in index:
            block = jax.lax.dynamic_index_in_dim(block, i, keepdims=False)
        return np.asarray(block)


def _constructor(model_config: ModelConfig, moe: MoEConfig, dtype: Any, source: HFSource | None, remat: str):
    parallel = state.config
    return lambda: CausalLM(
        model_config, moe, dtype=dtype, source=source, seed=parallel.random_seed, remat=remat,
        offload=parallel.sm_activation_offloading,
    )  # fmt: skip


def from_config(
    hf_config: Mapping[str, Any], files: Mapping[str, bytes], moe: MoEConfig, dtype: Any = None, remat: str = "full"
) -> CausalLM:
    """A model with random weights; its export has the dtype of the config (float32 without one) and carries `files`.

    hf_config: a parsed config.json. dtype: the compute dtype; None takes the config's.
    """
    own = _dtype_name(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
    model_config, source = converters.new_source(dict(hf_config), files, own)
    _check(model_config, moe)
    _note_router_noise(hf_config, moe)
    return _init_sharded(_constructor(model_config, moe, _compute_dtype(dtype, source), source, remat))


def config_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the parsed config.json, the files without weights) of a Hugging Face folder, to start a new model of its kind from."""
    files = carried_files(Path(folder))
    return json.loads(files["config.json"]), files


def _init_sharded(create: Callable[[], CausalLM]) -> CausalLM:
    """`create()`, each device drawing only its own part of the random numbers.

    Under the mesh with automatic axes, since there XLA splits the generator; with explicit axes every value is typed as
    replicated until the end, and each device drew the whole model (measured: 24 times the memory of its shards).
    """
    shardings = parameter_shardings(jax.eval_shape(create))
    mesh = state.mesh
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with jax.set_mesh(auto):
        model = jax.jit(create, out_shardings=jax.tree.map(lambda s: NamedSharding(auto, s.spec), shardings))()
    return jax.device_put(model, shardings)


def _config_and_files(hf_config: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The dict of a config; no files, so that the export's config.json says what the export is."""
    if isinstance(hf_config, Mapping):
        return dict(hf_config), {}
    if hasattr(hf_config, "model_type") and hasattr(hf_config, "to_json_string"):
        return json.loads(hf_config.to_json_string()), {}
    raise ConfigError(
        f"transform got a {type(hf_config).__name__}, but takes a Hugging Face model, a config (object or dict) or a folder"
    )


def _open_torch_model(model: Any) -> converters.LoadedCheckpoint:
    """The torch model's tensors as NumPy views, under its in-memory names."""
    hf_config = copy.deepcopy(model.config)
    hf_config.architectures = [type(model).__name__]
    hf_config.dtype = model.dtype
    files = {"config.json": hf_config.to_json_string().encode()}
    if getattr(model, "generation_config", None) is not None:
        # Its JSON as it is: saving it would validate it, and that is no reason to lose a model.
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head shares the embedding's memory; transformers writes it once
            tensors[name] = _to_numpy(tensor)
        seen.add(tensor.data_ptr())
    return converters.open_state_dict(json.loads(files["config.json"]), tensors, files)


def _to_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a string, a NumPy, JAX or torch dtype; refuses what is none to compute in."""
    name = str(dtype).removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        with contextlib.suppress(TypeError):
            name = jnp.dtype(dtype).name
    if name not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(map(repr, COMPUTE_DTYPES))}")
    return name


def _compute_dtype(dtype: Any, source: HFSource) -> Any:
    own = source.config.get("dtype") or source.config.get("torch_dtype") or "float32"
    return COMPUTE_DTYPES[_dtype_name(own if dtype is None else dtype)]


def _check(config: ModelConfig, moe: MoEConfig) -> None:
    """Refuses a model that the mesh cannot hold; says once what has no effect or starves the router."""
    if config.num_experts % state.expert_size:
        raise ConfigError(
            f"expert_parallel_degree is {state.expert_size}, but must divide the model's {config.num_experts} experts"
        )
    if not moe.smp_moe and state.expert_size > 1:
        raise ConfigError(f"smp_moe is False, but expert_parallel_degree is {state.expert_size}; it must then be 1")
    if not moe.uses_aux_loss and moe.moe_aux_loss_coeff:
        _warn_once(
            f"moe_aux_loss_coeff {moe.moe_aux_loss_coeff:g} has no effect with moe_load_balancing="
            f"{moe.moe_load_balancing!r}: it applies under 'aux_loss' (and 'expert_bias' with moe_aux_loss_form='sequence') only"
        )
    if moe.benchmark_only_uniform_routing:
        _warn_once(
            "benchmark_only_uniform_routing: tokens go to experts in turn, whatever the router says; for benchmarks only"
        )
    if config.num_experts_per_tok == 1 and config.norm_topk_prob:
        _warn_once(
            "num_experts_per_tok is 1 with norm_topk_prob: the combine weight is always 1, so the language-model loss "
            "gives the router no gradient"
        )


def _note_router_noise(hf_config: Mapping[str, Any], moe: MoEConfig) -> None:
    """MoEConfig decides about router noise; says so where the checkpoint asks for some."""
    noise = hf_config.get("router_jitter_noise") or 0
    if noise and not moe.moe_input_jitter_eps:
        _warn_once(
            f"router_jitter_noise {noise:g} of the model's config is not applied: set moe_input_jitter_eps in MoEConfig "
            "(transformers' noise reaches the experts too, this one the router alone)"
        )


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
