"""init and MoEConfig: what is accepted, and the one sentence for what is not."""

import json

import jax
import pytest
from meshes import start

import moe_jax
from moe_jax.config import RopeConfig
from moe_jax.mesh import State, axis_sizes
from moe_jax.sharding import P, ShardingRules, parameter_spec


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"expert_parallel_degree": 3},
            "expert_parallel_degree is 3, but must divide the number of devices, which is 8",
        ),
        ({"expert_parallel_degree": 16}, "expert_parallel_degree is 16, but must divide the number of devices"),
        ({"expert_parallel_degree": 0}, "expert_parallel_degree is 0, but must be a positive integer"),
        ({"expert_parallel_degree": -1}, "expert_parallel_degree is -1, but must be a positive integer"),
        ({"expert_parallel_degree": True}, "expert_parallel_degree is True, but must be a positive integer"),
        ({"expert_parallel_degree": 2, "hybrid_shard_degree": 3}, "hybrid_shard_degree is 3, but must divide"),
        ({"hybrid_shard_degree": 16}, "hybrid_shard_degree is 16, but must divide"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2, but must be 1"),
        ({"context_parallel_degree": 2}, "context_parallel_degree is 2, but must be 1"),
        ({"activation_loading_horizon": 4}, "activation_loading_horizon is 4, but must be 2"),
        ({"random_seed": -1}, "random_seed is -1, but must be an integer >= 0"),
        ({"expert_parallel_degre": 2}, "unknown key.*'expert_parallel_degre' .did you mean 'expert_parallel_degree'"),
        ([1], "init config is a list, but must be a dict"),
    ],
)
def test_impossible_settings_are_refused_in_one_sentence(config, message) -> None:
    """C69."""
    with pytest.raises(moe_jax.ConfigError, match=message) as error:
        moe_jax.init(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"moe_load_balancing": "Sinkhorn"},
            "moe_load_balancing is 'Sinkhorn', but must be one of 'sinkhorn', 'balanced', 'aux_loss', 'expert_bias', 'none'",
        ),
        ({"moe_load_balancing": None}, "moe_load_balancing is None, but must be one of"),
        ({"moe_load_balancing": "foo"}, "moe_load_balancing is 'foo'"),
        ({"moe_z_loss_coeff": -1e-3}, "moe_z_loss_coeff is -0.001, but must be a finite number >= 0"),
        ({"moe_aux_loss_coeff": float("nan")}, "moe_aux_loss_coeff is nan"),
        ({"global_token_shuffle": 1}, "global_token_shuffle is 1, but must be True or False"),
        ({"balance_scope": "rank"}, "balance_scope is 'rank', but must be one of 'global', 'local'"),
        ({"moe_input_jitter_eps": 1.0}, "moe_input_jitter_eps is 1.0, but must be a number from 0 to below 1"),
        ({"moe_expert_capacity_factor": 0}, "moe_expert_capacity_factor is 0, but must be a positive number, or None"),
        ({"expert_bias_update_rate": -1}, "expert_bias_update_rate is -1, but must be a positive number"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16', but must be one of 'float32', 'compute'"),
        ({"smp_moe": "yes"}, "smp_moe is 'yes', but must be True or False"),
        ({"random_seed": 1.5}, "random_seed is 1.5"),
        ({"smp_moe": False}, "moe_load_balancing is 'sinkhorn', but must be 'aux_loss' or 'none' with smp_moe=False"),
        ({"moe_buffer_factor": 0.9}, "moe_buffer_factor is 0.9, but must be a number >= 1"),
        ({"moe_num_chunks": 0}, "moe_num_chunks is 0, but must be a positive integer"),
        (
            {"moe_exchange": "nccl"},
            "moe_exchange is 'nccl', but must be one of 'all_to_all', 'all_gather', 'ragged', 'auto'",
        ),
        ({"sinkhorn_max_iterations": 0}, "sinkhorn_max_iterations is 0, but must be a positive integer"),
    ],
)
def test_impossible_moe_settings_are_refused_in_one_sentence(settings, message) -> None:
    """C100."""
    with pytest.raises(moe_jax.ConfigError, match=message):
        moe_jax.MoEConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_aux_loss_form": "hf"}, "moe_aux_loss_form is 'hf', but must be 'megatron' unless moe_load_balancing"),
        ({"moe_load_balancing": "expert_bias", "moe_aux_loss_form": "hf"}, "moe_aux_loss_form is 'hf'"),
        ({"moe_load_balancing": "none", "balance_scope": "local"}, "balance_scope is 'local', but must be 'global'"),
        (
            {"moe_load_balancing": "aux_loss", "moe_aux_loss_form": "sequence", "balance_scope": "local"},
            "balance_scope is 'local'",
        ),
        (
            {"moe_token_drop_policy": "position"},
            "moe_token_drop_policy is 'position'.*without moe_expert_capacity_factor",
        ),
        ({"expert_bias_update_rate": 0.1}, "expert_bias_update_rate is 0.1, but must be left at 0.001"),
        ({"expert_bias_update": "proportional"}, "expert_bias_update is 'proportional'"),
        (
            {"moe_load_balancing": "none", "sinkhorn_tolerance": 0.1},
            "sinkhorn_tolerance is 0.1, but must be left at 0.001",
        ),
        ({"moe_all_to_all_dispatcher": False, "moe_exchange": "auto"}, "moe_exchange is 'auto', but must be None or"),
        (
            {"benchmark_only_uniform_routing": True},
            "moe_load_balancing is 'sinkhorn', but must be 'none' with benchmark",
        ),
        (
            {"smp_moe": False, "moe_load_balancing": "none", "moe_input_jitter_eps": 0.1},
            "moe_input_jitter_eps is 0.1, but must be left out with smp_moe=False",
        ),
        (
            {"smp_moe": False, "moe_load_balancing": "none", "moe_buffer_factor": 2.0},
            "moe_buffer_factor is 2.0, but must be left at 1.0 with smp_moe=False",
        ),
        ({"smp_moe": False, "moe_load_balancing": "balanced"}, "moe_load_balancing is 'balanced'"),
    ],
)
def test_settings_that_could_have_no_effect_are_refused(settings, message) -> None:
    with pytest.raises(moe_jax.ConfigError, match=message):
        moe_jax.MoEConfig(**settings)


def test_unknown_moe_field_is_refused() -> None:
    with pytest.raises(TypeError, match="moe_load_balance"):
        moe_jax.MoEConfig(moe_load_balance="none")  # type: ignore[call-arg]


@pytest.mark.parametrize(("rope_type", "message"), [("banana", "one of 'default', 'linear'"), ("longrope", "one of")])
def test_unknown_rope_is_refused_with_the_list(rope_type, message) -> None:
    with pytest.raises(moe_jax.ConfigError, match=message):
        RopeConfig(rope_type=rope_type)


def test_degrees_become_axis_sizes() -> None:
    parallel = lambda **keys: moe_jax.ParallelConfig(**keys)  # noqa: E731
    assert axis_sizes(parallel(), 8) == (1, 8, 1)
    assert axis_sizes(parallel(expert_parallel_degree=4), 8) == (1, 2, 4)
    assert axis_sizes(parallel(expert_parallel_degree=2, hybrid_shard_degree=2), 8) == (2, 2, 2)
    assert axis_sizes(parallel(hybrid_shard_degree=1), 8) == (8, 1, 1)
    with pytest.raises(moe_jax.ConfigError, match=r"expert_parallel_degree is 4.*which is 6"):
        axis_sizes(parallel(expert_parallel_degree=4), 6)


def test_init_reads_dict_json_file_and_nothing_and_replaces_the_mesh(tmp_path) -> None:
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({"expert_parallel_degree": 4, "hybrid_shard_degree": 2}))
    moe_jax.init(path)
    assert (moe_jax.state.expert_size, moe_jax.state.fsdp_size, moe_jax.state.replica_size) == (4, 2, 1)
    moe_jax.init({"expert_parallel_degree": 2, "hybrid_shard_degree": 1})
    assert dict(moe_jax.state.mesh.shape) == {"replica": 4, "fsdp": 1, "expert": 2}
    moe_jax.init()
    assert moe_jax.is_initialized()
    assert moe_jax.state.world_size == 8
    assert moe_jax.state.fsdp_size == 8
    assert jax.sharding.get_mesh() == moe_jax.state.mesh


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "is a list, but must be a dict")]
)
def test_unreadable_config_files_are_named(text, message, tmp_path) -> None:
    path = tmp_path / "smp.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(moe_jax.ConfigError, match=message):
        moe_jax.init(str(path))


def test_state_tells_the_ranks_of_this_process() -> None:
    start("replica2xEP2xFSDP2")
    assert moe_jax.state.expert_ranks == moe_jax.state.fsdp_ranks == moe_jax.state.replica_ranks == (0, 1)


def test_state_before_init_says_what_to_do() -> None:
    with pytest.raises(moe_jax.ConfigError, match=r"call moe_jax.init\(...\) first"):
        _ = State().mesh


def test_dimensions_that_do_not_divide_hand_their_axes_on(caplog) -> None:
    start("EP4xFSDP2")
    caplog.clear()
    mesh = moe_jax.state.mesh
    assert parameter_spec(("hidden", "heads", "head_dim"), (64, 4, 16), mesh) == P(("fsdp", "expert"), None, None)
    assert parameter_spec(("hidden", "vocab"), (3, 64, 97), mesh) == P(None, ("fsdp", "expert"), None)
    assert parameter_spec(("hidden", "width"), (60, 96), mesh) == P(None, ("fsdp", "expert"))
    assert parameter_spec(("expert", "expert_width", "expert_hidden"), (8, 51, 64), mesh) == P("expert", None, "fsdp")
    assert not caplog.text
    for _ in range(2):
        assert parameter_spec(("hidden", "vocab"), (60, 97), mesh) == P(None, None)
    assert caplog.text.count("replicated over ('fsdp', 'expert')") == 1


def test_no_mesh_axis_is_used_twice() -> None:
    start("EP4xFSDP2")
    with pytest.raises(ValueError, match="twice"):
        parameter_spec(("hidden", "expert"), (64, 8), moe_jax.state.mesh, ShardingRules())
