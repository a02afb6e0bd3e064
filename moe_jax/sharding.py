"""Where every array lives: logical dimension names of parameters -> mesh axes, and the batch layout.

Each parameter carries its dimension names as metadata (`nnx.Param(..., dims=("hidden", "heads", "head_dim"))`); one frozen
rules table turns them into a `PartitionSpec`. A stacked parameter has one more leading dimension, which is never sharded.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from moe_jax.mesh import state

P = PartitionSpec
# The batch dimension of every activation: expert ranks read different samples.
BATCH = ("replica", "fsdp", "expert")
# Dense weights are cut over all the ranks that hold one copy of the model.
DENSE = ("fsdp", "expert")

logger = logging.getLogger("moe_jax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical dimension -> mesh axes. Names that are not fields are replicated."""

    hidden: tuple[str, ...] = DENSE
    expert: tuple[str, ...] = ("expert",)
    expert_width: tuple[str, ...] = ("fsdp",)


RULES = ShardingRules()


def parameter_spec(
    dims: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: ShardingRules = RULES
) -> P:
    """The `PartitionSpec` of a parameter with dimension names `dims` and the (possibly stacked) `shape`.

    A dimension that its axes do not divide hands them to the largest other dimension that they divide; where there is none,
    the parameter is replicated over these axes, with a warning. Raises ValueError where two dimensions ask for one mesh axis.
    """
    stacked = len(shape) - len(dims)
    entries: list[tuple[str, ...]] = [()] * stacked + [getattr(rules, name, ()) for name in dims]
    used = [axis for axes in entries for axis in axes]
    if len(used) != len(set(used)):
        raise ValueError(f"dimensions {dims} would use a mesh axis twice: {used}")
    for dim, axes in enumerate(list(entries)):
        size = _axes_size(mesh, axes)
        if shape[dim] % size == 0:
            continue
        entries[dim] = ()
        free = [d for d in range(stacked, len(shape)) if not entries[d] and shape[d] % size == 0 and d != dim]
        if free:
            entries[max(free, key=lambda d: shape[d])] = axes
        else:
            _warn_replicated(dims, shape[stacked:], axes, size)
    return P(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in entries))


@functools.cache
def _warn_replicated(dims: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str, ...], size: int) -> None:
    """Says it once for each kind of parameter."""
    logger.warning("a parameter with dimensions %s = %s is replicated over %s: none of them divides by %d",
                   ", ".join(dims), shape, axes, size)  # fmt: skip


def _axes_size(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def is_param(node: Any) -> bool:
    """Whether a pytree node is a parameter, for `is_leaf`."""
    return isinstance(node, nnx.Variable)


def param_spec(param: nnx.Variable, mesh: Mesh | AbstractMesh) -> P:
    """The `PartitionSpec` of one parameter (concrete, abstract or traced)."""
    (array,) = jax.tree.leaves(param)
    return parameter_spec(param.get_metadata()["dims"], array.shape, mesh)


def parameter_shardings(model: Any) -> Any:
    """The model's pytree with a `NamedSharding` in the place of every array."""
    params, treedef, mesh = jax.tree.leaves(model, is_leaf=is_param), jax.tree.structure(model), state.mesh
    return jax.tree.unflatten(treedef, [NamedSharding(mesh, param_spec(param, mesh)) for param in params])


def batch_spec(ndim: int) -> P:
    """The layout of an activation with `ndim` dimensions: the first one is cut over the whole mesh."""
    return P(BATCH, *([None] * (ndim - 1)))


def gather(weight: jax.Array, dtype: Any) -> jax.Array:
    """The whole weight in the compute dtype on every device (cast first, so that the narrow type travels).

    Its gradient is reduced and cut back to the parameter's own layout.
    """
    return jax.sharding.reshard(weight.astype(dtype), P(*([None] * weight.ndim)))
