"""The MoE layer: parameters, and the one `shard_map` in which the four parts meet.

B rows, S positions, T = B S / devices tokens of a device, H hidden size, E experts, K experts per token, I expert width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moe_jax.collectives import gather_whole, vary_like
from moe_jax.config import ModelConfig, MoEConfig
from moe_jax.layers.init import fold_keys, normal
from moe_jax.layers.mlp import ACTIVATION_FUNCTIONS
from moe_jax.moe.balance import RouterStatistics, router_statistics, sinkhorn_log_scale
from moe_jax.moe.dispatch import get_dispatcher
from moe_jax.moe.experts import expert_mlp
from moe_jax.moe.router import Routing, router_logits, select_experts, softmax_routing
from moe_jax.sharding import BATCH, P, param_spec

# Values that rematerialisation may keep: the routing always (so that a recomputed layer routes alike), the received
# rows on demand.
ROUTING_NAME = "moe_routing"
DISPATCHED_NAME = "moe_dispatched"


class MoE(nnx.Module):
    """Router and experts of one layer, born with keys of the global expert index."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, *, key: jax.Array) -> None:
        hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        stddev = config.initializer_range
        router_key, expert_key = jax.random.split(key)
        keys_E = fold_keys(expert_key, jnp.arange(experts))

        def expert(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            key_in, key_out = jax.random.split(key)
            return normal(key_in, (hidden, 2, width), stddev), normal(key_out, (width, hidden), stddev)

        gate_up, down = jax.vmap(expert)(keys_E)
        self.router = nnx.Param(normal(router_key, (hidden, experts), stddev), dims=("hidden", "experts_out"))
        self.gate_up = nnx.Param(gate_up, dims=("expert", "expert_hidden", "gate_up", "expert_width"))
        self.down = nnx.Param(down, dims=("expert", "expert_width", "expert_hidden"))
        self.config, self.moe = config, moe

    def __call__(
        self, x_BSH: jax.Array, mask_BS: jax.Array, dtype: Any, *, train: bool
    ) -> tuple[jax.Array, RouterStatistics, jax.Array]:
        """(output [B, S, H] in `dtype`, statistics over all real tokens, expert ids int32 [B, S, K] (E for padding))."""
        mesh = jax.sharding.get_abstract_mesh()
        gate_up, down = self.gate_up[...].astype(dtype), self.down[...].astype(dtype)
        router = jax.sharding.reshard(self.router[...], P(None, None))
        specs = (P(BATCH), P(BATCH), P(), param_spec(self.gate_up, mesh), param_spec(self.down, mesh))

        def block(x_BSH, mask_BS, router_HE, gate_up_EHGI, down_EIH):
            return self._block(x_BSH, mask_BS, router_HE, gate_up_EHGI, down_EIH, specs[3], specs[4], train=train)

        out_specs = (P(BATCH), P(), P(BATCH))
        return jax.shard_map(block, in_specs=specs, out_specs=out_specs)(x_BSH, mask_BS, router, gate_up, down)

    def _block(self, x_BSH, mask_BS, router_HE, gate_up_EHGI, down_EIH, gate_up_spec, down_spec, *, train: bool):
        """The manual region: everything in it is this device's part."""
        x_TH, mask_T = x_BSH.reshape(-1, x_BSH.shape[-1]), mask_BS.reshape(-1)
        with jax.named_scope("router"):
            logits_TE = router_logits(x_TH, router_HE)
            routing = self._route(logits_TE, mask_T, train=train)
            statistics = router_statistics(logits_TE, routing.expert_ids_TK, mask_T, BATCH)
        with jax.named_scope("gather_experts"):
            # Typed as varying before the gather, so that the gradient is scattered before it is summed over the replicas.
            gate_up_EHGI = gather_whole(vary_like(gate_up_EHGI, x_TH), gate_up_spec, ("fsdp",))
            down_EIH = gather_whole(vary_like(down_EIH, x_TH), down_spec, ("fsdp",))
        dispatcher = get_dispatcher(self._dispatcher_name())
        with jax.named_scope("dispatch"):
            received, plan = dispatcher.dispatch(x_TH, routing, self.config.num_experts)
            rows_MH, ids_MK, weights_MK = (
                checkpoint_name(a, DISPATCHED_NAME)
                for a in (received.rows_MH, received.expert_ids_MK, received.weights_MK)
            )
        with jax.named_scope("experts"):
            activation = ACTIVATION_FUNCTIONS[self.config.hidden_act]
            y_MH = expert_mlp(rows_MH, ids_MK, weights_MK, gate_up_EHGI, down_EIH, activation)
        with jax.named_scope("combine"):
            y_TH = dispatcher.combine(y_MH, plan).astype(x_TH.dtype)
        ids_BSK = routing.expert_ids_TK.reshape(*mask_BS.shape, -1)
        return y_TH.reshape(x_BSH.shape), statistics, ids_BSK

    def _route(self, logits_TE: jax.Array, mask_T: jax.Array, *, train: bool) -> Routing:
        scores_TE = logits_TE
        if train and self.moe.moe_load_balancing == "sinkhorn":
            log_scale_E = sinkhorn_log_scale(
                logits_TE, mask_T, BATCH,
                max_iterations=self.moe.sinkhorn_max_iterations, tolerance=self.moe.sinkhorn_tolerance,
            )  # fmt: skip
            scores_TE = logits_TE + log_scale_E[None, :]
        ids_TK = checkpoint_name(select_experts(scores_TE, self.config.num_experts_per_tok), ROUTING_NAME)
        return softmax_routing(logits_TE, ids_TK, mask_T, norm_topk_prob=self.config.norm_topk_prob)

    def _dispatcher_name(self) -> str:
        if lax.axis_size("expert") == 1:
            return "local"
        return "all_to_all" if self.moe.moe_all_to_all_dispatcher else "all_gather"
