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
from moe_jax.moe.balancing import choose_experts, scope_axes
from moe_jax.moe.capacity import within_capacity
from moe_jax.moe.exchange import layer_exchange
from moe_jax.moe.experts import Weights
from moe_jax.moe.routed import RoutedSettings, routed_experts
from moe_jax.moe.router import Routing, drop, jitter, router_logits, select_experts, softmax_routing
from moe_jax.moe.shuffle import make_shuffle, shuffle, unshuffle
from moe_jax.moe.statistics import RouterStatistics, router_statistics
from moe_jax.sharding import BATCH, P, param_spec

# What rematerialisation always keeps, so that a recomputed layer routes alike.
ROUTING_NAME = "moe_routing"


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
        if moe.moe_load_balancing == "expert_bias":  # without a gradient: `update_expert_bias` moves it
            self.expert_bias = nnx.Param(jnp.zeros(experts), dims=("experts_out",))
        self.config, self.moe = config, moe

    def __call__(
        self,
        x_BSH: jax.Array,
        mask_BS: jax.Array,
        dtype: Any,
        *,
        train: bool,
        key: jax.Array | None = None,
        first_row: jax.Array | int = 0,
    ) -> tuple[jax.Array, RouterStatistics, jax.Array]:
        """(output [B, S, H] in `dtype`, statistics over all real tokens, expert ids int32 [B, S, K] (E for padding)).

        key: this layer's PRNG key, where the config draws random numbers in training. first_row: the number of the first row
        within the global batch, which the randomness of a token depends on.
        """
        mesh = jax.sharding.get_abstract_mesh()
        gate_up, down = self.gate_up[...].astype(dtype), self.down[...].astype(dtype)
        arguments = {
            "x_BSH": (x_BSH, P(BATCH)),
            "mask_BS": (mask_BS, P(BATCH)),
            "first_row": (jnp.asarray(first_row, jnp.int32), P()),
            "router_HE": (jax.sharding.reshard(self.router[...], P(None, None)), P()),
            "gate_up_EHGI": (gate_up, param_spec(self.gate_up, mesh)),
            "down_EIH": (down, param_spec(self.down, mesh)),
        }
        if train and self.moe.moe_load_balancing == "expert_bias":
            arguments["bias_E"] = (lax.stop_gradient(self.expert_bias[...]), P())
        if train and self.moe.draws_random_numbers:
            arguments["key"] = (key, P())
        values = {name: value for name, (value, _) in arguments.items()}
        specs = {name: spec for name, (_, spec) in arguments.items()}

        def block(values: dict[str, Any]):
            return self._block(**values, gate_up_spec=specs["gate_up_EHGI"], down_spec=specs["down_EIH"], train=train)

        return jax.shard_map(block, in_specs=(specs,), out_specs=(P(BATCH), P(), P(BATCH)))(values)

    def _block(self, x_BSH, mask_BS, first_row, router_HE, gate_up_EHGI, down_EIH, *, gate_up_spec, down_spec, train: bool,
               bias_E=None, key=None):  # fmt: skip
        """The manual region: everything in it is this device's part."""
        rows, length, hidden = x_BSH.shape
        x_TH, mask_T = x_BSH.reshape(-1, hidden), mask_BS.reshape(-1)
        token_T = (first_row + lax.axis_index(BATCH) * rows) * length + jnp.arange(rows * length, dtype=jnp.int32)
        noise_key, shuffle_key = jax.random.split(jax.random.key(0) if key is None else key)  # unused without one
        with jax.named_scope("router"):
            seen_TH = x_TH
            if train and self.moe.moe_input_jitter_eps:
                place_T2 = jnp.stack(jnp.divmod(token_T, length), axis=1)
                seen_TH = jitter(x_TH, place_T2, noise_key, self.moe.moe_input_jitter_eps)
            logits_TE = router_logits(
                seen_TH, router_HE, x_TH.dtype if self.moe.moe_router_dtype == "compute" else None
            )
        # What is routed: the tokens of this device, or after a shuffle those of the expert group's ranks.
        routed = x_TH, logits_TE, mask_T, token_T
        order = None
        if train and self.moe.global_token_shuffle:
            order = make_shuffle(shuffle_key, x_TH.shape[0], x_TH)
            integers_TN = shuffle(order, jnp.stack([mask_T.astype(jnp.int32), token_T], axis=1))
            routed = shuffle(order, x_TH), shuffle(order, logits_TE), integers_TN[:, 0] > 0, integers_TN[:, 1]
        with jax.named_scope("balance"):
            routing, choice_TK, iterations = self._route(*routed[1:], bias_E, train=train)
        with jax.named_scope("gather_experts"):
            # Typed as varying before the gather, so that the gradient is scattered before it is summed over the replicas.
            gate_up_EHGI = gather_whole(vary_like(gate_up_EHGI, x_TH), gate_up_spec, ("fsdp",))
            down_EIH = gather_whole(vary_like(down_EIH, x_TH), down_spec, ("fsdp",))
        y_TH, *further = self._exchange_and_compute(routed[0], routing, Weights(gate_up_EHGI, down_EIH))
        ids_TK = routing.expert_ids_TK
        num_dropped = jnp.sum(choice_TK != ids_TK, dtype=jnp.int32)
        if order is not None:
            y_TH, choice_TK, ids_TK = unshuffle(order, y_TH), unshuffle(order, choice_TK), unshuffle(order, ids_TK)
        with jax.named_scope("statistics"):
            statistics = router_statistics(
                logits_TE, choice_TK, mask_T, BATCH,
                loss_ids_TK=self._unbiased_choice(logits_TE, mask_T) if bias_E is not None else None,
                num_groups=self._loss_groups(rows), dropped=num_dropped, plan_iterations=iterations,
                further_rounds=further[0], further_blocks=further[1],
            )  # fmt: skip
        return y_TH.reshape(x_BSH.shape), statistics, ids_TK.reshape(rows, length, -1)

    def _route(
        self, logits_TE: jax.Array, mask_T: jax.Array, token_T: jax.Array, bias_E: jax.Array | None, *, train: bool
    ) -> tuple[Routing, jax.Array, jax.Array | int]:
        """(routing, the choice int32 [T, K] before a capacity (E for padding), iterations of the plan)."""
        top_k, moe = self.config.num_experts_per_tok, self.moe
        ids_TK, iterations = choose_experts(logits_TE, mask_T, token_T, bias_E, moe, top_k, train=train)
        ids_TK = checkpoint_name(ids_TK, ROUTING_NAME)
        routing = softmax_routing(logits_TE, ids_TK, mask_T, norm_topk_prob=self.config.norm_topk_prob)
        choice_TK = routing.expert_ids_TK
        if train and moe.moe_expert_capacity_factor is not None:
            fits_TK = within_capacity(logits_TE, choice_TK, mask_T, token_T, scope_axes(moe),
                                      factor=moe.moe_expert_capacity_factor, policy=moe.moe_token_drop_policy)  # fmt: skip
            routing = drop(routing, checkpoint_name(fits_TK, ROUTING_NAME), self.config.num_experts)
        return routing, choice_TK, iterations

    def _exchange_and_compute(self, x_TH: jax.Array, routing: Routing, weights: Weights) -> tuple[jax.Array, ...]:
        """Tokens to their experts, through them, and back: what `routed_experts` returns."""
        moe, config = self.moe, self.config
        settings = RoutedSettings(
            shape=layer_exchange(config, moe, x_TH.shape[0], lax.axis_size("expert")), num_chunks=moe.moe_num_chunks,
            activation=config.hidden_act, combine_dtype=x_TH.dtype if moe.moe_combine_dtype == "compute" else None,
        )  # fmt: skip
        with jax.named_scope("experts"):
            return routed_experts(settings, x_TH, routing.weights_TK, routing.expert_ids_TK, weights)

    def _unbiased_choice(self, logits_TE: jax.Array, mask_T: jax.Array) -> jax.Array:
        """What the router would choose without its bias, E for padding: what DeepSeek-V3's sequence loss counts (eq. 18)."""
        ids_TK = select_experts(logits_TE, self.config.num_experts_per_tok)
        return jnp.where(mask_T[:, None], ids_TK, self.config.num_experts)

    def _loss_groups(self, rows: int) -> int | None:
        """Over how many groups of this device's tokens the balancing loss is taken; None: over the whole batch."""
        if self.moe.moe_aux_loss_form == "sequence":
            return rows
        is_local = self.moe.balance_scope == "local" and self.moe.moe_load_balancing == "aux_loss"
        return 1 if is_local else None
