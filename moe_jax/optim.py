"""AdamW as optax gives it, with the warm-up and cosine schedule, clipping, and a decay mask by parameter name.

Parameters are float32 masters and stay so: the model casts to its compute dtype in the forward pass, so updates far
below the compute dtype's resolution still add up. Gradients and moments are float32 as well.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from moe_jax.errors import ConfigError
from moe_jax.run_config import OptimizerConfig

# Last component of the names that weight decay leaves alone, besides every norm's `weight`.
BIASES = ("bias", "q_bias", "k_bias", "v_bias", "o_bias", "expert_bias")


def leaf_names(tree: Any) -> list[str]:
    """Returns the dotted path of every leaf in flattening order; a parameter's is its name (`runs.0.0.attn.q`)."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path in paths]


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to the parameter: all but norm weights and biases.

    Projections, experts, the router, the embedding and the output head are decayed. Only the name decides: a norm's
    weight of stacked layers has two dimensions and is still one.
    """
    *parents, leaf = name.split(".")
    is_norm = bool(parents) and parents[-1].endswith("norm")
    return not is_norm and leaf not in BIASES


def decay_mask(params: Any) -> Any:
    """Returns a pytree of bools like `params`: whether each leaf is decayed."""
    return jax.tree.unflatten(jax.tree.structure(params), [is_decayed(name) for name in leaf_names(params)])


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of steps done.

    The k-th of `warmup_steps` steps takes k / (warmup_steps + 1) of the peak, the step after them the peak itself; a
    cosine then reaches `min_ratio` * peak at the last of `steps` steps.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1), peak_value=peak, warmup_steps=warmup, decay_steps=max(steps - 1, warmup + 1),
        end_value=peak * config.min_ratio,
    )  # fmt: skip


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns clip (where asked for) -> AdamW with the schedule over `steps` steps and the decay mask."""
    adamw = optax.adamw(
        make_schedule(config, steps), b1=config.beta1, b2=config.beta2, eps=config.eps,
        weight_decay=config.weight_decay, mask=decay_mask,
    )  # fmt: skip
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, adamw)


def check_masters(params: Any) -> None:
    """Raises `ConfigError` naming the first parameter that is not float32."""
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        if leaf.dtype != jnp.float32:
            raise ConfigError(
                f"parameter {name} is {leaf.dtype}, but must be float32: the optimizer updates float32 masters"
            )
