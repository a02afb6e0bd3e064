"""transform and save_pretrained without torch: exact round trips on meshes, initial weights, memory, refusals."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from meshes import MESHES, put_batch, start
from numpy_hf import CONFIGS, MIX, Q3, random_tensors, read_folder, write_folder

import moe_jax
from converters.parity import compare_folders
from moe_jax.hf import _warn_once, abstract_model, fetch, model_config_of
from moe_jax.model import named_parameters


def same_bytes(a: Path, b: Path) -> None:
    left, right = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (a, b))
    assert left.keys() == right.keys()
    tensors = (read_folder(a), read_folder(b))
    assert {n: (t.dtype, t.tobytes()) for n, t in tensors[0].items()} == {
        n: (t.dtype, t.tobytes()) for n, t in tensors[1].items()
    }
    for name in left:
        if name != "model.safetensors.index.json":  # its metadata is made anew
            assert left[name] == right[name], name


@pytest.mark.parametrize("mesh", ["1 device", "EP4xFSDP2", "replica2xEP2xFSDP2"])
@pytest.mark.parametrize("family", CONFIGS)
def test_load_and_export_on_a_mesh_changes_no_byte(family: str, mesh: str, tmp_path: Path) -> None:
    files = {
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": b"{{ x }}",
        "generation_config.json": b'{"temperature": 0.9}',
    }
    folder = write_folder(tmp_path / "in", CONFIGS[family], random_tensors(CONFIGS[family]), shards=3, files=files)
    start(mesh)
    moe_jax.save_pretrained(moe_jax.transform(folder), tmp_path / "out")
    same_bytes(folder, tmp_path / "out")


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "1 device" and not name.startswith("EP8")])
def test_initial_weights_from_a_config_are_the_same_on_every_mesh(mesh: str) -> None:
    start("1 device")
    expected = {n: np.asarray(p[...]) for n, p in named_parameters(moe_jax.transform(MIX)).items()}
    start(mesh)
    for name, param in named_parameters(moe_jax.transform(MIX)).items():
        np.testing.assert_array_equal(param[...], expected[name], err_msg=name)


def test_initial_weights_depend_on_both_seeds_and_the_global_index() -> None:
    def weights(seed: int = 12345, moe_seed: int = 12345, layers: int = 2) -> dict[str, np.ndarray]:
        moe_jax.init({"random_seed": seed}, devices=jax.devices()[:1])
        model = moe_jax.transform(MIX | {"num_hidden_layers": layers}, config=moe_jax.MoEConfig(random_seed=moe_seed))
        return {n: np.asarray(p[...]) for n, p in named_parameters(model).items()}

    base, other_dense, other_moe, deeper = weights(), weights(seed=1), weights(moe_seed=1), weights(layers=3)
    assert not np.array_equal(base["runs.0.0.attn.q"], other_dense["runs.0.0.attn.q"])
    np.testing.assert_array_equal(base["runs.0.0.mlp.down"], other_dense["runs.0.0.mlp.down"])
    assert not np.array_equal(base["runs.0.0.mlp.down"], other_moe["runs.0.0.mlp.down"])
    np.testing.assert_array_equal(base["runs.0.0.mlp.down"], deeper["runs.0.0.mlp.down"][:2])
    assert not np.array_equal(base["runs.0.0.mlp.down"][0, 0], base["runs.0.0.mlp.down"][0, 1])
    assert float(np.std(base["runs.0.0.mlp.gate_up"])) == pytest.approx(0.02, rel=0.02)


def test_parameters_are_born_in_their_shards() -> None:
    start("EP4xFSDP2")
    model = moe_jax.transform(MIX)
    params = named_parameters(model)
    shard = lambda name: params[name][...].addressable_shards[0].data.shape  # noqa: E731
    assert shard("runs.0.0.mlp.gate_up") == (2, 1, 64, 2, 48)
    assert shard("runs.0.0.mlp.down") == (2, 1, 48, 64)
    assert shard("runs.0.0.attn.q") == (2, 8, 4, 16)
    assert shard("embed.weight") == (97, 8)  # a prime vocabulary: the hidden dimension is cut
    assert all(p[...].dtype == np.float32 for p in params.values())


@pytest.mark.parametrize("mesh", ["1 device", "replica2xEP2xFSDP2"])
def test_fetch_reads_any_block_of_any_layout(mesh: str) -> None:
    start(mesh)
    params = named_parameters(moe_jax.transform(Q3))
    for name in ("runs.0.0.mlp.gate_up", "runs.0.0.attn.q", "embed.weight", "final_norm.weight"):
        array = params[name][...]
        whole = np.asarray(array)
        np.testing.assert_array_equal(fetch(array, ()), whole)
        for prefix in np.ndindex(*whole.shape[:2]):
            np.testing.assert_array_equal(fetch(array, prefix), whole[prefix])


@pytest.mark.parametrize(
    ("settings", "moe", "message"),
    [
        ({"expert_parallel_degree": 8}, {}, "expert_parallel_degree is 8, but must divide the model's 4 experts"),
        (
            {"expert_parallel_degree": 2},
            {"smp_moe": False, "moe_load_balancing": "none"},
            "smp_moe is False, but expert_parallel_degree is 2",
        ),
    ],
)
def test_what_the_mesh_cannot_hold_is_refused_before_any_weight_is_read(settings, moe, message, tmp_path: Path) -> None:
    """C69, C100."""
    moe_jax.init(settings)
    folder = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    for source in (folder, MIX):
        with pytest.raises(moe_jax.ConfigError, match=message):
            moe_jax.transform(source, config=moe_jax.MoEConfig(**moe))


def test_wrong_arguments_are_named() -> None:
    start("1 device")
    with pytest.raises(moe_jax.ConfigError, match="dtype is 'int8', but must be one of"):
        moe_jax.transform(MIX, dtype="int8")
    with pytest.raises(moe_jax.ConfigError, match="remat is 'some', but must be one of"):
        moe_jax.transform(MIX, remat="some")
    with pytest.raises(moe_jax.ConfigError, match=r"dtype is 3.5, but must be one of"):
        moe_jax.transform(MIX, dtype=3.5)
    with pytest.raises(moe_jax.ConfigError, match="transform got a int"):
        moe_jax.transform(3)
    with pytest.raises(moe_jax.ConfigError, match="config is a dict"):
        moe_jax.transform(MIX, config={"smp_moe": True})  # type: ignore[arg-type]


def test_settings_without_effect_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """C06, C100: as warnings, which a script without any logging set up shows."""
    _warn_once.cache_clear()
    start("1 device")
    config = model_config_of(MIX | {"num_experts_per_tok": 1})
    for _ in range(2):
        abstract_model(config, moe_jax.MoEConfig(), np.float32, None)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2
    assert "moe_aux_loss_coeff 0.001 has no effect with moe_load_balancing='sinkhorn'" in messages[0]
    assert "gives the router no gradient" in messages[1]


def test_router_noise_of_the_checkpoint_is_said_not_to_apply(caplog: pytest.LogCaptureFixture) -> None:
    """C62: MoEConfig decides."""
    _warn_once.cache_clear()
    start("1 device")
    noisy = MIX | {"router_jitter_noise": 0.1}
    moe_jax.transform(noisy, moe_jax.MoEConfig(moe_aux_loss_coeff=0.0, moe_input_jitter_eps=0.1))
    assert not any("jitter" in message for message in caplog.messages)
    moe_jax.transform(noisy, moe_jax.MoEConfig(moe_aux_loss_coeff=0.0))
    message = "router_jitter_noise 0.1 of the model's config is not applied: set moe_input_jitter_eps"
    assert any(message in said for said in caplog.messages)


def test_selection_biases_start_at_zero_and_are_not_exported(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    start("EP2xFSDP2")
    model = moe_jax.transform(folder, moe_jax.MoEConfig(moe_load_balancing="expert_bias", moe_aux_loss_coeff=0.0))
    biases = {name: p for name, p in named_parameters(model).items() if name.endswith("expert_bias")}
    assert biases
    assert not any(np.any(p[...]) for p in biases.values())
    counts = jax.numpy.arange(8).reshape(2, 4)
    moe_jax.save_pretrained(moe_jax.update_expert_bias(model, counts), tmp_path / "out")
    assert not compare_folders(folder, tmp_path / "out").differences


def test_one_expert_per_token_renormalised_gives_the_gate_no_gradient() -> None:
    """C06, in the whole model; without renormalising the gate learns."""
    start("EP2xFSDP2")
    tokens = put_batch(np.arange(64, dtype=np.int32).reshape(4, 16) % 97)
    batch = {"tokens": tokens, "segment_ids": put_batch(np.ones((4, 16), np.int32))}
    for norm in (True, False):
        moe = moe_jax.MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0)
        model = moe_jax.transform(Q3 | {"num_experts_per_tok": 1, "norm_topk_prob": norm}, config=moe, dtype="float32")
        grads = jax.jit(jax.grad(lambda m: moe_jax.training_loss(m, batch, None)[0]))(model)
        assert bool(np.any(named_parameters(grads)["runs.0.0.mlp.router"][...])) != norm


def test_two_models_of_one_checkpoint_have_one_structure(tmp_path: Path) -> None:
    """An exponential average or a reference model can be combined with the trained one."""
    folder = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    other = write_folder(tmp_path / "other", MIX, random_tensors(MIX), files={"tokenizer.json": b"{}"})
    start("EP2xFSDP2")
    one, two = moe_jax.transform(folder), moe_jax.transform(folder)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, one, two)
    assert jax.tree.structure(mean) == jax.tree.structure(one)
    assert one.source == two.source != moe_jax.transform(other).source


def test_the_compute_dtype_does_not_decide_what_is_written(tmp_path: Path) -> None:
    """A float32 config computed in bf16 is exported as float32, by a config.json that says so (C33)."""
    start("EP2xFSDP2")
    config = {key: value for key, value in MIX.items() if key not in ("torch_dtype", "architectures")} | {
        "dtype": "float32"
    }
    model = moe_jax.transform(config, dtype="bfloat16")
    assert model.dtype == "bfloat16"
    moe_jax.save_pretrained(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == "float32"
    assert written["architectures"] == ["MixtralForCausalLM"]
    assert {str(t.dtype) for t in read_folder(tmp_path / "out").values()} == {"float32"}


def test_memory_of_loading_and_initialising_stays_near_the_parameters_and_of_export_near_a_shard(
    tmp_path: Path,
) -> None:
    """C35, on the eight devices of one process, which together hold the model once, as float32."""
    script = Path(__file__).parent.parent / "benchmarks" / "host_memory.py"
    command = [sys.executable, str(script), "--gigabytes", "0.35", "--folder", str(tmp_path), "--measure"]
    subprocess.run([*command, "write"], check=True, capture_output=True)
    megabytes = {}
    for what in ("load", "init", "export"):
        figures = json.loads(subprocess.run([*command, what], check=True, capture_output=True, text=True).stdout)
        megabytes[what], parameters = figures["rise"] / 1e6, figures["parameters"] / 1e6
    # Fixed costs in MB, measured: 110 to load, 400 for XLA to compile the initialisation.
    assert megabytes["load"] < (1 + 0.5) * parameters + 200  # the mapped bf16 file is half as large
    assert megabytes["init"] < 1.2 * parameters + 450
    assert megabytes["export"] < 6 * 50  # a shard of 50 MB, its float32 source, and what it is serialised into


def test_the_library_and_the_file_bridge_never_import_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "in", MIX, random_tensors(MIX))
    code = (
        "import sys, moe_jax; moe_jax.init(); m = moe_jax.transform(sys.argv[1]); moe_jax.save_pretrained(m, sys.argv[2]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(tmp_path / "out")], check=True)
    same_bytes(folder, tmp_path / "out")
