"""The device mesh: made here, once, by `init`; everything else reads `state`."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from moe_jax.config import ParallelConfig
from moe_jax.errors import ConfigError

AXES = ("replica", "fsdp", "expert")

logger = logging.getLogger("moe_jax")


class State:
    """What `init` set up: the mesh, its sizes, and which ranks of each axis this process holds.

    Every attribute raises `ConfigError` before the first `init`.
    """

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        self._config = ParallelConfig()

    @property
    def mesh(self) -> Mesh:
        """The mesh with axes ("replica", "fsdp", "expert")."""
        if self._mesh is None:
            raise ConfigError("moe_jax is not initialized: call moe_jax.init(...) first")
        return self._mesh

    @property
    def config(self) -> ParallelConfig:
        """The settings `init` was called with."""
        self.mesh  # noqa: B018  raises before the first init
        return self._config

    @property
    def world_size(self) -> int:
        """Number of devices, over all processes."""
        return self.mesh.size

    @property
    def expert_size(self) -> int:
        """Size of the `expert` axis: each rank holds a contiguous block of num_experts / expert_size experts."""
        return self.mesh.shape["expert"]

    @property
    def fsdp_size(self) -> int:
        """Size of the `fsdp` axis."""
        return self.mesh.shape["fsdp"]

    @property
    def replica_size(self) -> int:
        """Size of the `replica` axis: copies of the whole sharded model."""
        return self.mesh.shape["replica"]

    def _ranks(self, axis: str) -> tuple[int, ...]:
        dim = AXES.index(axis)
        mine = {i for i, device in np.ndenumerate(self.mesh.devices) if device.process_index == jax.process_index()}
        return tuple(sorted({index[dim] for index in mine}))

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """The ranks on the `expert` axis of this process's devices."""
        return self._ranks("expert")

    @property
    def fsdp_ranks(self) -> tuple[int, ...]:
        """The ranks on the `fsdp` axis of this process's devices."""
        return self._ranks("fsdp")

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks on the `replica` axis of this process's devices."""
        return self._ranks("replica")


state = State()


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return state._mesh is not None


def axis_sizes(config: ParallelConfig, num_devices: int) -> tuple[int, int, int]:
    """(replica, fsdp, expert) sizes for `num_devices` devices; raises `ConfigError` for degrees that do not divide."""
    expert = config.expert_parallel_degree
    if num_devices % expert:
        raise ConfigError(
            f"expert_parallel_degree is {expert}, but must divide the number of devices, which is {num_devices}"
        )
    rest = num_devices // expert
    fsdp = config.hybrid_shard_degree or rest
    if rest % fsdp:
        raise ConfigError(
            f"hybrid_shard_degree is {fsdp}, but must divide devices / expert_parallel_degree = "
            f"{num_devices} / {expert} = {rest}"
        )
    return rest // fsdp, fsdp, expert


def init(
    config: "Mapping[str, Any] | str | Path | ParallelConfig | None" = None,
    *,
    devices: Sequence[Any] | None = None,
) -> State:
    """Builds the mesh, makes it JAX's current mesh, and returns `state`.

    config: a dict of SMP v2 keys (`ParallelConfig`), the path of a JSON file with such a dict, or None for the defaults.
    devices: the `jax.devices()` to use; None takes all of them, over all processes.
    Calling it again replaces the mesh; models made under the earlier one stay where they are and must not be mixed in.
    """
    parallel = ParallelConfig.load(config)
    devices = jax.devices() if devices is None else list(devices)
    sizes = axis_sizes(parallel, len(devices))
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)
    jax.set_mesh(mesh)
    state._mesh, state._config = mesh, parallel
    logger.info("mesh on %d %s device(s): replica %d x fsdp %d x expert %d", mesh.size, jax.default_backend(), *sizes)
    return state
