"""The transformer: one decoder whose features are fields of `ModelConfig`, its layers stacked and scanned.

B rows, S positions, H hidden size, V vocabulary, L MoE layers, E experts, K experts per token.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from moe_jax.config import REMAT_POLICIES, LayerConfig, ModelConfig, MoEConfig
from moe_jax.errors import ConfigError
from moe_jax.layers.attention import Attention, AttentionInputs
from moe_jax.layers.embedding import Embedding, LMHead
from moe_jax.layers.init import fold_keys
from moe_jax.layers.mlp import MLP
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.rope import rope_tables, segment_positions
from moe_jax.moe.layer import ROUTING_NAME, MoE
from moe_jax.moe.routed import DISPATCHED_NAME
from moe_jax.moe.statistics import RouterStatistics, pooled_aux_loss
from moe_jax.sharding import batch_spec, is_param
from moe_jax.source import HFSource

MAX_PATTERN = 8  # longest repeating pattern of layers that is looked for
BLOCK_INPUT_NAME = "block_input"


class LayerSlot(NamedTuple):
    """Where a global layer lives: `runs[run][position]`, at index `repeat` of its stacked parameters."""

    run: int
    position: int
    repeat: int


class LayerRun(NamedTuple):
    """`repeats` repeats of a `pattern` of layers, the first at global index `start`."""

    start: int
    pattern: tuple[LayerConfig, ...]
    repeats: int


@functools.cache
def layer_runs(layers: tuple[LayerConfig, ...]) -> tuple[LayerRun, ...]:
    """Cuts the layers into runs of a repeated pattern, from the front, each as long as it gets with the shortest pattern."""
    runs, start = [], 0
    while start < len(layers):
        best = LayerRun(start, layers[start : start + 1], 1)
        for period in range(1, min(MAX_PATTERN, len(layers) - start) + 1):
            pattern, repeats = layers[start : start + period], 1
            while layers[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * len(best.pattern):
                best = LayerRun(start, pattern, repeats)
        runs.append(best)
        start += best.repeats * len(best.pattern)
    return tuple(runs)


def layer_slots(config: ModelConfig) -> tuple[LayerSlot, ...]:
    """The slot of every global layer."""
    return tuple(
        LayerSlot(i, position, repeat)
        for i, run in enumerate(layer_runs(config.layers))
        for repeat in range(run.repeats)
        for position in range(len(run.pattern))
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns.

    logits: float32 [B, S, V].
    aux_loss, z_loss: float32 scalars, unweighted sums over the MoE layers ("hf" aux_loss: pooled over them).
    router: `RouterStatistics`, each field stacked over the L MoE layers.
    routing_ids: int32 [L, B, S, K], E for padding, if asked for.
    """

    logits: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    router: RouterStatistics
    routing_ids: jax.Array | None = None


class Block(nnx.Module):
    """One layer: attention and an MLP or MoE, each behind a norm and a residual connection."""

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, layer: LayerConfig, keys: tuple[jax.Array, jax.Array]
    ) -> None:
        dense_key, moe_key = keys
        attention_key, mlp_key = jax.random.split(dense_key)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer.sliding_window, key=attention_key)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer.is_moe:
            self.mlp = MoE(config, moe, key=moe_key)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, key=mlp_key,
                           stddev=config.initializer_range)  # fmt: skip

    def __call__(
        self, x_BSH: jax.Array, inputs: AttentionInputs, dtype: Any, **routing: Any
    ) -> tuple[jax.Array, tuple[RouterStatistics, jax.Array] | None]:
        """(output, (statistics, expert ids) of an MoE layer). routing: the keyword arguments of `MoE`."""
        x_BSH = x_BSH + self.attn(self.attn_norm(x_BSH), inputs, dtype)
        normed = self.mlp_norm(x_BSH)
        if isinstance(self.mlp, MLP):
            return x_BSH + self.mlp(normed, dtype), None
        y_BSH, statistics, ids_BSK = self.mlp(normed, inputs.segment_ids_BS != 0, dtype, **routing)
        return x_BSH + y_BSH, (statistics, ids_BSK)


class CausalLM(nnx.Module):
    """A Mixture-of-Experts language model; a pytree of float32 parameters whose configs are static.

    Call it inside `jax.jit`, and pass it through `jax.grad`, `optax` and `jax.tree.map` like any pytree.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        *,
        dtype: Any,
        source: HFSource | None = None,
        seed: int = 0,
        remat: str = "full",
        offload: bool = False,
    ) -> None:
        if remat not in REMAT_POLICIES:
            raise ConfigError(f"remat is {remat!r}, but must be one of {', '.join(map(repr, REMAT_POLICIES))}")
        if offload and remat == "none":
            raise ConfigError("sm_activation_offloading needs rematerialised layers, but remat is 'none'")
        dense_root, moe_root = jax.random.key(seed), jax.random.key(moe.random_seed)
        embed_key, head_key, layer_key = jax.random.split(dense_root, 3)
        stddev = config.initializer_range
        self.embed = Embedding(config.vocab_size, config.hidden_size, key=embed_key, stddev=stddev)
        self.runs = nnx.List(
            [self._make_run(run, config, moe, layer_key, moe_root) for run in layer_runs(config.layers)]
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, key=head_key, stddev=stddev)
        self.config, self.moe, self.dtype, self.source = config, moe, jnp.dtype(dtype), source
        self.remat, self.offload = remat, offload

    @staticmethod
    def _make_run(run: LayerRun, config: ModelConfig, moe: MoEConfig, dense_key, moe_key) -> nnx.List:
        """The run's blocks, one for each position of the pattern, their parameters stacked over the repeats."""
        blocks = []
        for position, layer in enumerate(run.pattern):
            keys = (_layer_keys(dense_key, run)[position], _layer_keys(moe_key, run)[position])
            blocks.append(jax.lax.map(lambda keys, layer=layer: Block(config, moe, layer, keys), keys))
        return nnx.List(blocks)

    def __call__(
        self,
        tokens_BS: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        first_row: jax.Array | int = 0,
        return_routing: bool = False,
    ) -> ModelOutput:
        """Logits and router statistics of a batch.

        tokens_BS: int [B, S]. Any B: rows are padded to a multiple of the number of devices inside.
        segment_ids: int [B, S]; 0 is padding, other numbers are documents, which do not see each other. None: no padding.
        positions: int [B, S]; by default they count from 0 in every segment.
        train: route by `moe_load_balancing`; False: by the model's own rule.
        key: a PRNG key for the router's noise and the token shuffle, another one in every step; None where the config has neither.
        first_row: the number of this batch's first row within the global batch of a step that is cut into micro-batches: a
            token's noise depends on `key`, the layer and its own number.
        """
        draws = train and self.moe.draws_random_numbers
        if draws and key is None:
            raise ConfigError(
                "key is None, but training with moe_input_jitter_eps or global_token_shuffle needs a PRNG key"
            )
        if tokens_BS.ndim != 2:
            raise ConfigError(f"tokens have shape {tokens_BS.shape}, but must be [batch, sequence]")
        num_rows = tokens_BS.shape[0]
        tokens_BS, inputs = self._prepare(tokens_BS, segment_ids, positions)
        x_BSH = self.embed(tokens_BS, self.dtype)
        collected = []
        for run, layers in zip(self.runs, layer_runs(self.config.layers), strict=True):
            keys = _layer_keys(key, layers) if draws and key is not None else None
            x_BSH, outputs = self._run_layers(
                run, x_BSH, inputs, keys, train=train, first_row=first_row, keep_ids=return_routing
            )
            collected.append(outputs)
        x_BSH = self.final_norm(x_BSH)
        head = self.embed.head if self.config.tie_word_embeddings else self.lm_head
        logits = _keep_rows(head(x_BSH, self.dtype), num_rows)
        statistics, ids = _in_layer_order(collected, self.config)
        routing_ids = jax.vmap(lambda a: _keep_rows(a, num_rows))(ids) if return_routing else None
        aux_loss = jnp.sum(statistics.aux_loss)
        if self.moe.moe_aux_loss_form == "hf":
            aux_loss = pooled_aux_loss(statistics, self.config.num_experts_per_tok)
        return ModelOutput(logits, aux_loss, jnp.sum(statistics.z_loss), statistics, routing_ids)

    def _prepare(self, tokens_BS, segment_ids, positions) -> tuple[jax.Array, AttentionInputs]:
        """Tokens padded to whole rows per device, with segments, positions and rotary tables, in the batch layout."""
        for name, array in (("segment_ids", segment_ids), ("positions", positions)):
            if array is not None and array.shape != tokens_BS.shape:
                raise ConfigError(f"{name} has shape {array.shape}, but must have the tokens' {tokens_BS.shape}")
        segment_ids = jnp.ones_like(tokens_BS) if segment_ids is None else segment_ids
        tokens_BS, segments_BS = (_whole_rows(a) for a in (tokens_BS, segment_ids))
        positions_BS = segment_positions(segments_BS) if positions is None else _whole_rows(positions)
        cos_BSF, sin_BSF = rope_tables(self.config.rope, self.config.head_dim, positions_BS)
        return tokens_BS, AttentionInputs(cos_BSF, sin_BSF, segments_BS)

    def _run_layers(
        self, run: nnx.List, x_BSH: jax.Array, inputs: AttentionInputs, keys: tuple[jax.Array, ...] | None, *, train: bool,
        first_row: jax.Array | int, keep_ids: bool,
    ):  # fmt: skip
        """The run's layers, scanned; per position of the pattern the MoE outputs stacked over the repeats, or None."""

        def body(x_BSH, scanned):
            blocks, keys = scanned
            outputs = []
            x_BSH = checkpoint_name(x_BSH, BLOCK_INPUT_NAME)
            for position, block in enumerate(blocks):
                key = None if keys is None else keys[position]
                x_BSH, moe_output = block(x_BSH, inputs, self.dtype, train=train, key=key, first_row=first_row)
                if moe_output is not None and not keep_ids:
                    moe_output = (moe_output[0], None)
                outputs.append(moe_output)
            return x_BSH, tuple(outputs)

        return jax.lax.scan(self._rematerialised(body), x_BSH, (tuple(run), keys))

    def _rematerialised(self, body):
        if self.remat == "none":
            return body
        kept = [ROUTING_NAME, *([DISPATCHED_NAME] if self.remat == "dispatched" else [])]
        if self.offload:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=kept, names_which_can_be_offloaded=[BLOCK_INPUT_NAME],
                offload_src="device", offload_dst="pinned_host",
            )  # fmt: skip
        else:
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _layer_keys(key: jax.Array, run: LayerRun) -> tuple[jax.Array, ...]:
    """The keys of a run's layers: one array over the repeats for each position of the pattern."""
    period = len(run.pattern)
    return tuple(fold_keys(key, run.start + position + period * jnp.arange(run.repeats)) for position in range(period))


def _whole_rows(array_BS: jax.Array) -> jax.Array:
    """Padded with rows of zeros to a multiple of the number of devices, in the batch layout."""
    missing = -array_BS.shape[0] % jax.sharding.get_abstract_mesh().size
    if missing:
        array_BS = jax.sharding.reshard(array_BS, jax.P(None, None))
        array_BS = jnp.pad(array_BS, ((0, missing), (0, 0)))
    return jax.sharding.reshard(array_BS, batch_spec(2))


def _keep_rows(array: jax.Array, num_rows: int) -> jax.Array:
    """The first `num_rows` rows; replicated where they do not divide over the devices."""
    if array.shape[0] == num_rows:
        return array
    return jax.sharding.reshard(array, jax.P(*([None] * array.ndim)))[:num_rows]


def _in_layer_order(collected: list, config: ModelConfig) -> tuple[RouterStatistics, jax.Array | None]:
    """Statistics and ids of all MoE layers, stacked in the order of the layers."""
    outputs = [
        jax.tree.map(lambda a, slot=slot: a[slot.repeat], collected[slot.run][slot.position])
        for slot, layer in zip(layer_slots(config), config.layers, strict=True)
        if layer.is_moe
    ]
    if not outputs:
        nothing, per_expert = jnp.zeros((0,), jnp.float32), jnp.zeros((0, config.num_experts), jnp.float32)
        return RouterStatistics(
            counts=per_expert.astype(jnp.int32), dropped=nothing.astype(jnp.int32), mean_probs=per_expert, entropy=nothing,
            aux_loss=nothing, z_loss=nothing, mean_logit=nothing, max_logit=nothing,
            plan_iterations=nothing.astype(jnp.int32), further_rounds=nothing.astype(jnp.int32),
            further_blocks=nothing.astype(jnp.int32),
        ), None  # fmt: skip
    return jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)


def named_parameters(model: Any) -> dict[str, nnx.Param]:
    """Dotted name -> parameter, in a fixed order."""
    leaves = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_param)[0]
    return {".".join(_key_name(key) for key in path): param for path, param in leaves}


def _key_name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown pytree key {key!r}")


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape (stacked over the repeats), without making any array."""
    model = jax.eval_shape(lambda: CausalLM(config, MoEConfig(), dtype=jnp.float32))
    return {name: jax.tree.leaves(param)[0].shape for name, param in named_parameters(model).items()}
