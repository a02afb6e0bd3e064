"""Which experts each token goes to, by `moe_load_balancing`.

T tokens of this device, E experts, K experts per token. In evaluation every mode is the model's own rule, the K largest logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.config import MoEConfig
from moe_jax.moe.balanced import balanced_assignment
from moe_jax.moe.router import select_experts
from moe_jax.moe.sinkhorn import sinkhorn_log_scale
from moe_jax.sharding import BATCH


class Choice(NamedTuple):
    """expert_ids_TK: int32, distinct within a token; anything in range for padding. iterations: int32, of the plan; 0 without."""

    expert_ids_TK: jax.Array
    iterations: jax.Array | int


def scope_axes(config: MoEConfig) -> tuple[str, ...]:
    """The mesh axes that plans and capacities are summed over: those of the batch, or none for each device by itself."""
    return BATCH if config.balance_scope == "global" else ()


def choose_experts(
    logits_TE: jax.Array,
    mask_T: jax.Array,
    token_T: jax.Array,
    bias_E: jax.Array | None,
    config: MoEConfig,
    num_experts_per_tok: int,
    *,
    train: bool,
) -> Choice:
    """The choice of every token; no gradient flows through it.

    mask_T: real tokens. token_T: int32, each token's index in the global batch. bias_E: the bias of "expert_bias".
    """
    logits_TE = lax.stop_gradient(logits_TE)
    if config.benchmark_only_uniform_routing:
        slot_K = jnp.arange(num_experts_per_tok, dtype=jnp.int32)
        num_experts = logits_TE.shape[1]
        first_T = token_T % num_experts * num_experts_per_tok
        return Choice((first_T[:, None] + slot_K[None, :]) % num_experts, 0)
    mode = config.moe_load_balancing if train else "none"
    if mode == "balanced":
        ids_TK, found = balanced_assignment(logits_TE, mask_T, token_T, num_experts_per_tok, scope_axes(config))
        return Choice(ids_TK, found.iterations + found.repair_rounds)
    iterations: jax.Array | int = 0
    if mode == "sinkhorn":
        log_scale_E, iterations = sinkhorn_log_scale(
            logits_TE, mask_T, scope_axes(config),
            max_iterations=config.sinkhorn_max_iterations, tolerance=config.sinkhorn_tolerance,
        )  # fmt: skip
        logits_TE = logits_TE + log_scale_E[None, :]
    elif mode == "expert_bias":
        assert bias_E is not None
        logits_TE = jax.nn.softmax(logits_TE, axis=-1) + bias_E[None, :]
    return Choice(select_experts(logits_TE, num_experts_per_tok), iterations)
