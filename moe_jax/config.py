"""Frozen configuration: the mesh switches (`ParallelConfig`), the MoE switches (`MoEConfig`) and the model (`ModelConfig`).

The names of the first two are those of SageMaker's model parallel library v2 (SMP v2). No arrays and no mesh live here, so
every config is hashable and can be a static part of a pytree.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from moe_jax.errors import ConfigError, refuse_unknown, require

BALANCING_MODES = ("sinkhorn", "balanced", "aux_loss", "expert_bias", "none")
HF_MODES = ("aux_loss", "none")  # those whose training routes as the Hugging Face block does
BALANCE_SCOPES = ("global", "local")
AUX_LOSS_FORMS = ("megatron", "hf", "sequence")
EXPERT_BIAS_UPDATES = ("sign", "proportional")
TOKEN_DROP_POLICIES = ("probs", "position")
ROUTER_DTYPES = ("float32", "compute")
EXCHANGES = ("all_to_all", "all_gather", "ragged", "auto")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
REMAT_POLICIES = ("full", "dispatched", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
QK_NORMS = ("none", "per_head", "full_width")
# SMP's default; XLA decides itself how early an offloaded activation is fetched, so no other value could take effect.
ACTIVATION_LOADING_HORIZON = 2


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The keys of `moe_jax.init`: sizes of the mesh axes and settings of the whole run.

    expert_parallel_degree: size of the `expert` axis; divides the number of devices and of experts.
    hybrid_shard_degree: size of the `fsdp` axis; 0 takes all devices / expert_parallel_degree; what is left over is the
        `replica` axis.
    tensor_parallel_degree, context_parallel_degree: only 1.
    sm_activation_offloading: keep the inputs of rematerialised layers in host memory between forward and backward.
    activation_loading_horizon: only 2 (SMP's default); XLA schedules the loads.
    random_seed: seed of every parameter outside the MoE layers.
    """

    expert_parallel_degree: int = 1
    hybrid_shard_degree: int = 0
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    sm_activation_offloading: bool = False
    activation_loading_horizon: int = ACTIVATION_LOADING_HORIZON
    random_seed: int = 12345

    def __post_init__(self) -> None:
        ep, fsdp = self.expert_parallel_degree, self.hybrid_shard_degree
        require(_is_int(ep) and ep >= 1, "expert_parallel_degree", ep, "a positive integer")
        require(_is_int(fsdp) and fsdp >= 0, "hybrid_shard_degree", fsdp, "0 (all devices) or a positive integer")
        for name in ("tensor_parallel_degree", "context_parallel_degree"):
            require(getattr(self, name) == 1, name, getattr(self, name), "1 (this parallelism is not built)")
        require(isinstance(self.sm_activation_offloading, bool), "sm_activation_offloading",
                self.sm_activation_offloading, "true or false")  # fmt: skip
        require(self.activation_loading_horizon == ACTIVATION_LOADING_HORIZON, "activation_loading_horizon",
                self.activation_loading_horizon, f"{ACTIVATION_LOADING_HORIZON} (XLA schedules the loads)")  # fmt: skip
        require(_is_int(self.random_seed) and self.random_seed >= 0, "random_seed", self.random_seed, "an integer >= 0")

    @classmethod
    def load(cls, config: "Mapping[str, Any] | str | Path | ParallelConfig | None") -> "ParallelConfig":
        """Reads a dict, the path of a JSON file, or None for the defaults; refuses unknown keys."""
        if isinstance(config, ParallelConfig):
            return config
        if isinstance(config, str | Path):
            path = Path(config)
            try:
                config = json.loads(path.read_text())
            except OSError as error:
                raise ConfigError(f"init config {str(path)!r} cannot be read: {error.strerror}") from None
            except json.JSONDecodeError as error:
                raise ConfigError(f"init config {str(path)!r} is not JSON: {error}") from None
        if config is None:
            return cls()
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"init config is a {type(config).__name__}, but must be a dict, a JSON file's path or None"
            )
        refuse_unknown("init config", config, (f.name for f in dataclasses.fields(cls)))
        return cls(**config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The switches of the MoE layers; names as in SMP v2, and beyond it as in Megatron-LM where that has one.

    smp_moe: False runs the Hugging Face block: no token exchange (`expert_parallel_degree` must be 1) and its own routing
        (`moe_load_balancing` "aux_loss" or "none").
    random_seed: seed of the router's and the experts' initial parameters, and of the router's noise and the shuffle.
    moe_load_balancing: how training routes; evaluation always uses the model's own routing.
        "sinkhorn": top-k of the logits scaled by a balanced transport plan, without gradient through the iteration.
        "balanced": an assignment that gives every expert floor or ceil of N k / E tokens, close to the best total logit.
        "aux_loss": the Hugging Face routing, with `moe_aux_loss_coeff` times the load-balancing loss.
        "expert_bias": top-k of probability + a bias per expert, which is moved against the load error after every step.
        "none": the Hugging Face routing.
    balance_scope: the tokens that a plan (sinkhorn, balanced), the "megatron" loss and a capacity are taken over: "global",
        all of the micro-batch, or "local", each device's own, as SMP does.
    global_token_shuffle: in training, permutes the tokens over the ranks of an expert group before they are routed, and back
        afterwards; outputs stay the same up to rounding, except for plans of local scope. Needs `key`.
    moe_all_to_all_dispatcher: True exchanges tokens by all-to-all, False by all-gather and reduce-scatter.
    moe_exchange: None follows that switch; "auto" takes whichever sends fewer bytes, and says so once; "ragged" is an all-to-all
        that sends only rows in use (XLA has it on GPU only; elsewhere whole blocks travel, with the same result).
    moe_buffer_factor: the exchange's first round holds so many times the balanced load, at least 1, and room for its random
        fluctuation; a routing that needs more takes further rounds of a quarter of that, which are counted.
    moe_num_chunks: a device's tokens are exchanged and computed in so many parts, so that the exchange of one can run beside the
        experts of another.
    moe_combine_dtype: what a rank's results travel back in: "float32", or "compute" for the compute dtype, half the bytes in bf16.
        Either way they are summed in float32.
    moe_aux_loss_coeff: weight of the load-balancing loss; applies under "aux_loss", and under "expert_bias" with form "sequence".
    moe_aux_loss_form: "megatron": per layer, 1 at balance for any k, summed over layers. "hf": pooled over the layers, k at
        balance, as in transformers. "sequence": per row of the batch and layer, 1 at balance (DeepSeek-V3, arXiv:2412.19437,
        eq. 17 to 20); beside "expert_bias" it is that paper's complementary loss.
    moe_z_loss_coeff: weight of mean(logsumexp(router logits)^2), under every mode.
    moe_router_dtype: "float32" takes the router's product in float32, "compute" in the model's compute dtype, as transformers
        does; softmax, plans and losses are float32 either way.
    moe_input_jitter_eps: in training, the router's input is multiplied by uniform noise from [1 - eps, 1 + eps] (Switch
        Transformer, arXiv:2101.03961), seeded per row and position of the global batch; the experts see the clean input.
        Needs `key`.
    moe_expert_capacity_factor: in training, an expert computes at most ceil(factor N k / E) tokens; the others pass through the
        residual connection only and are counted as dropped. None drops nothing.
    moe_token_drop_policy: whom an overfull expert keeps: "probs", the most probable tokens, or "position", the first ones.
    expert_bias_update, expert_bias_update_rate: after each step the bias moves by rate * sign(mean load - load), or by
        rate * (mean load - load) / mean load (arXiv:2408.15664).
    sinkhorn_max_iterations, sinkhorn_tolerance: the iteration stops when the column sums are within
        `sinkhorn_tolerance` (relative) of their target, at the latest after `sinkhorn_max_iterations`.
    benchmark_only_uniform_routing: token t goes to the experts t k, ..., t k + k - 1 (mod E), whatever the router says, in
        evaluation too, so that a benchmark has a fixed load; a model trained with it is spoilt, and `moe-jax train` refuses it.
    """

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: Literal["sinkhorn", "balanced", "aux_loss", "expert_bias", "none"] = "sinkhorn"
    balance_scope: Literal["global", "local"] = "global"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_exchange: Literal["all_to_all", "all_gather", "ragged", "auto"] | None = None
    moe_buffer_factor: float = 1.0
    moe_num_chunks: int = 1
    moe_combine_dtype: Literal["float32", "compute"] = "float32"
    moe_aux_loss_coeff: float = 0.001
    moe_aux_loss_form: Literal["megatron", "hf", "sequence"] = "megatron"
    moe_z_loss_coeff: float = 0.001
    moe_router_dtype: Literal["float32", "compute"] = "float32"
    moe_input_jitter_eps: float = 0.0
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    expert_bias_update: Literal["sign", "proportional"] = "sign"
    expert_bias_update_rate: float = 0.001
    sinkhorn_max_iterations: int = 64
    sinkhorn_tolerance: float = 1e-3
    benchmark_only_uniform_routing: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("moe_load_balancing", BALANCING_MODES),
            ("balance_scope", BALANCE_SCOPES),
            ("moe_aux_loss_form", AUX_LOSS_FORMS),
            ("moe_router_dtype", ROUTER_DTYPES),
            ("moe_combine_dtype", ROUTER_DTYPES),
            ("moe_exchange", (*EXCHANGES, None)),
            ("moe_token_drop_policy", TOKEN_DROP_POLICIES),
            ("expert_bias_update", EXPERT_BIAS_UPDATES),
        ):
            require(
                getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(map(repr, allowed))}"
            )
        for name in ("smp_moe", "global_token_shuffle", "moe_all_to_all_dispatcher", "benchmark_only_uniform_routing"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require(_is_int(self.random_seed) and self.random_seed >= 0, "random_seed", self.random_seed, "an integer >= 0")
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            value = getattr(self, name)
            require(_is_number(value) and 0 <= value < float("inf"), name, value, "a finite number >= 0")
        eps, factor, rate = self.moe_input_jitter_eps, self.moe_expert_capacity_factor, self.expert_bias_update_rate
        require(_is_number(eps) and 0 <= eps < 1, "moe_input_jitter_eps", eps, "a number from 0 to below 1")
        require(factor is None or (_is_number(factor) and 0 < factor < float("inf")), "moe_expert_capacity_factor", factor,
                "a positive number, or None to drop nothing")  # fmt: skip
        require(_is_number(rate) and 0 < rate < float("inf"), "expert_bias_update_rate", rate, "a positive number")
        buffer, chunks = self.moe_buffer_factor, self.moe_num_chunks
        require(_is_number(buffer) and 1 <= buffer < float("inf"), "moe_buffer_factor", buffer, "a number >= 1")
        require(_is_int(chunks) and chunks >= 1, "moe_num_chunks", chunks, "a positive integer")
        cap, tol = self.sinkhorn_max_iterations, self.sinkhorn_tolerance
        require(_is_int(cap) and cap >= 1, "sinkhorn_max_iterations", cap, "a positive integer")
        require(_is_number(tol) and 0 < tol < 1, "sinkhorn_tolerance", tol, "a number between 0 and 1")
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        mode, form = self.moe_load_balancing, self.moe_aux_loss_form
        if not self.smp_moe:
            require(mode in HF_MODES, "moe_load_balancing", mode,
                    "'aux_loss' or 'none' with smp_moe=False: the Hugging Face block routes by its own rule")  # fmt: skip
            for name in ("global_token_shuffle", "moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_exchange",
                         "benchmark_only_uniform_routing"):  # fmt: skip
                require(not getattr(self, name), name, getattr(self, name), "left out with smp_moe=False")
            for name in ("moe_all_to_all_dispatcher", "moe_buffer_factor", "moe_combine_dtype"):
                default = MoEConfig.__dataclass_fields__[name].default
                require(getattr(self, name) == default, name, getattr(self, name),
                        f"left at {default!r} with smp_moe=False, which exchanges nothing")  # fmt: skip
        require(self.moe_all_to_all_dispatcher or self.moe_exchange in (None, "all_gather"), "moe_exchange", self.moe_exchange,
                "None or 'all_gather' with moe_all_to_all_dispatcher=False")  # fmt: skip
        require(form == "megatron" or mode == "aux_loss" or (form == "sequence" and mode == "expert_bias"),
                "moe_aux_loss_form", form, "'megatron' unless moe_load_balancing is 'aux_loss' (or 'expert_bias', which takes "
                f"'sequence'), but that is {mode!r}")  # fmt: skip
        has_scope = mode in ("sinkhorn", "balanced") or (mode == "aux_loss" and form == "megatron")
        require(self.balance_scope == "global" or has_scope or self.moe_expert_capacity_factor is not None,
                "balance_scope", self.balance_scope, "'global' unless moe_load_balancing is 'sinkhorn', 'balanced' or 'aux_loss' "
                f"(form 'megatron') or there is a capacity, but that is {mode!r} (form {form!r})")  # fmt: skip
        require(self.moe_token_drop_policy == "probs" or self.moe_expert_capacity_factor is not None,
                "moe_token_drop_policy", self.moe_token_drop_policy, "'probs' without moe_expert_capacity_factor")  # fmt: skip
        owners = {"expert_bias_update": "expert_bias", "expert_bias_update_rate": "expert_bias",
                  "sinkhorn_max_iterations": "sinkhorn", "sinkhorn_tolerance": "sinkhorn"}  # fmt: skip
        for name, owner in owners.items():
            default = MoEConfig.__dataclass_fields__[name].default
            require(getattr(self, name) == default or mode == owner, name, getattr(self, name),
                    f"left at {default!r} unless moe_load_balancing is {owner!r}, but that is {mode!r}")  # fmt: skip
        require(not self.benchmark_only_uniform_routing or mode == "none", "moe_load_balancing", mode,
                "'none' with benchmark_only_uniform_routing")  # fmt: skip

    @property
    def draws_random_numbers(self) -> bool:
        """Whether training needs a PRNG key."""
        return self.global_token_shuffle or self.moe_input_jitter_eps > 0

    @property
    def uses_aux_loss(self) -> bool:
        """Whether `moe_aux_loss_coeff` times the load-balancing loss is part of the training loss."""
        mode = self.moe_load_balancing
        return mode == "aux_loss" or (mode == "expert_bias" and self.moe_aux_loss_form == "sequence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, of the default or a scaled type.

    `original_max_positions` is the length that the scaling refers to. `attention_factor` 0 means "by the type's formula".
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        require(self.rope_type in ROPE_TYPES, "rope_type", self.rope_type, f"one of {', '.join(map(repr, ROPE_TYPES))}")
        require(self.theta > 0, "rope_theta", self.theta, "positive")
        if self.rope_type in ("linear", "dynamic", "yarn", "llama3"):
            require(self.factor >= 1, f"factor of rope_type {self.rope_type!r}", self.factor, "at least 1")
        if self.rope_type in ("dynamic", "yarn", "llama3"):
            require(self.original_max_positions > 0, "original_max_position_embeddings", self.original_max_positions,
                    "positive")  # fmt: skip
        if self.rope_type == "llama3":
            require(self.low_freq_factor < self.high_freq_factor, "low_freq_factor", self.low_freq_factor,
                    f"below high_freq_factor ({self.high_freq_factor})")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What one layer is: equal neighbours (or equal repeats of a short pattern) are stacked and scanned."""

    is_moe: bool = True
    sliding_window: int = 0  # a query sees itself and the sliding_window - 1 positions before it; 0: all before it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer; every family is a choice of these fields (`converters/` translates the HF configs).

    family: the HF `model_type`; only the bridge reads it.
    layers: one `LayerConfig` a layer.
    intermediate_size: width of the dense MLP layers; moe_intermediate_size: width of an expert.
    norm_topk_prob: divide the chosen experts' softmax probabilities by their sum.
    qk_norm: RMS norm of queries and keys before the rotary embedding, over each head or over all heads together.
    clip_qkv: clamp of q, k and v to +-clip_qkv after that norm; 0 means none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig
    norm_topk_prob: bool = True
    hidden_act: str = "silu"
    attention_bias: bool = False
    qk_norm: Literal["none", "per_head", "full_width"] = "none"
    clip_qkv: float = 0.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_experts",
                     "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings"):  # fmt: skip
            require(_is_int(getattr(self, name)) and getattr(self, name) >= 1, name, getattr(self, name), "positive")
        require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads,
                f"a divisor of num_heads ({self.num_heads})")  # fmt: skip
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (rotary pairs)")
        require(self.num_experts_per_tok <= self.num_experts, "num_experts_per_tok", self.num_experts_per_tok,
                f"at most num_experts ({self.num_experts})")  # fmt: skip
        require(len(self.layers) >= 1, "layers", self.layers, "at least one layer")
        require(self.hidden_act in ACTIVATIONS, "hidden_act", self.hidden_act, f"one of {', '.join(ACTIVATIONS)}")
        require(self.qk_norm in QK_NORMS, "qk_norm", self.qk_norm, f"one of {', '.join(QK_NORMS)}")
        require(self.clip_qkv >= 0, "clip_qkv", self.clip_qkv, "positive, or 0 for none")
        if any(not layer.is_moe for layer in self.layers):
            require(self.intermediate_size >= 1, "intermediate_size", self.intermediate_size, "positive")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        return sum(layer.is_moe for layer in self.layers)
