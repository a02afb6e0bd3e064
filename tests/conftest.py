"""The whole suite runs on eight simulated CPU devices; jaxtyping checks the shapes of annotated functions while tracing."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is XLA compiling for the CPU; without LLVM's optimisations that takes two thirds of it.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jaxtyping

_shape_checks = jaxtyping.install_import_hook(["moe_jax.kernels", "moe_jax.layers", "moe_jax.moe"], "beartype.beartype")

from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AxisType

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def one_device() -> Iterator[None]:
    """For tests of single arrays: not under a mesh of eight devices that an earlier test left."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])):
        yield
