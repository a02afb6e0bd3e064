"""Logits, routing and gradients against transformers (float32, eager) on the same weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import put_batch, start, values_of
from numpy_hf import read_folder
from reference import relative_norm
from tiny_hf import VARIANTS, make_checkpoint, make_model

import moe_jax

pytestmark = pytest.mark.torch

LOGITS = 1e-5  # float32, another order of summation, three layers
UPDATE = 2e-5  # one SGD update; sums over 128 tokens in another order
LENGTH = 300  # beyond 256, where a wrong rotary base shows


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Transformers and torch warn about their own matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def reference_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def reference_logits(model: Any, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    import torch

    with torch.no_grad():
        mask = None if mask is None else torch.tensor(mask)
        return model(torch.tensor(ids), attention_mask=mask).logits.numpy()


def logits(model: Any, ids: np.ndarray, segment_ids: np.ndarray | None = None) -> np.ndarray:
    segments = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return np.asarray(jax.jit(lambda m, t, s: m(t, s).logits)(model, jnp.asarray(ids, jnp.int32), segments))


def big_mesh(variant: str) -> str:
    return "EP2xFSDP4" if VARIANTS[variant].get("num_local_experts") == 6 else "EP4xFSDP2"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_from_folder_and_from_torch_model(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant, dtype="float32", shards=2)
    reference = reference_model(tmp_path)
    ids = np.random.default_rng(0).integers(0, 96, (2, LENGTH))
    expected = reference_logits(reference, ids)
    for mesh in ("1 device", big_mesh(variant)):
        start(mesh)
        from_torch, from_folder = moe_jax.transform(reference), moe_jax.transform(tmp_path)
        folder_values = values_of(from_folder)
        for name, value in values_of(from_torch).items():  # so one of the two needs to be run
            np.testing.assert_array_equal(folder_values[name], value, err_msg=name)
        assert relative_norm(logits(from_folder, ids), expected) < LOGITS


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("mixtral", {"sliding_window": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
        (
            "mixtral",
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                }
            },
        ),
        (
            "olmoe",
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
        ),
        ("mixtral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("olmoe", {"clip_qkv": 0.05}),
        ("mixtral", {"hidden_act": "gelu", "head_dim": None, "vocab_size": 97}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    ],
    ids=[
        "linear rope", "llama3 rope", "dynamic rope", "C01 base 5e5", "C12 clip 0.05", "C08, C11 gelu, head_dim null",
        "qwen window", "every second layer dense",
    ],
)  # fmt: skip
def test_options_equal_transformers(variant: str, overrides: dict, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant, dtype="float32", **overrides)
    ids = np.random.default_rng(1).integers(0, 96, (2, LENGTH))
    start("FSDP2")
    assert (
        relative_norm(logits(moe_jax.transform(tmp_path), ids), reference_logits(reference_model(tmp_path), ids))
        < LOGITS
    )


def test_fewer_kv_heads_than_shards(tmp_path: Path) -> None:
    """C27: two kv heads on eight ranks; the hidden dimension is cut, never the heads."""
    make_checkpoint(tmp_path, "qwen3_moe_yarn", dtype="float32", num_key_value_heads=2)
    ids = np.random.default_rng(6).integers(0, 96, (8, 21))
    expected = reference_logits(reference_model(tmp_path), ids)
    for mesh in ("EP8", "FSDP4"):
        start(mesh)
        assert relative_norm(logits(moe_jax.transform(tmp_path), ids), expected) < LOGITS


def test_a_generation_config_that_fails_validation_is_passed_through(tmp_path: Path) -> None:
    """C34, for a torch model."""
    model = make_model("mixtral_tied")
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.9
    start("1 device")
    moe_jax.save_pretrained(moe_jax.transform(model), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["do_sample"], written["temperature"]) == (False, 0.9)


def test_a_config_object_starts_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, dtype="float32",
    )  # fmt: skip
    start("EP4xFSDP2")
    model = moe_jax.transform(config)
    moe_jax.save_pretrained(model, tmp_path / "out")
    ids = np.random.default_rng(7).integers(0, 96, (2, 9))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert relative_norm(logits(model, ids), reference_logits(reloaded, ids)) < LOGITS


@pytest.mark.parametrize("length", [1, 37, 127, 129])
def test_odd_lengths_and_padding_do_not_change_real_positions(length: int, tmp_path: Path) -> None:
    """C71, C87: right padding with the end-of-text id, three rows on eight devices."""
    make_checkpoint(tmp_path, "qwen3_moe", dtype="float32")
    ids = np.random.default_rng(2).integers(0, 96, (3, length))
    expected = reference_logits(reference_model(tmp_path), ids)
    start("EP4xFSDP2")
    model = moe_jax.transform(tmp_path)
    padded = np.pad(ids, ((0, 0), (0, 5)), constant_values=2)
    segments = np.pad(np.ones_like(ids), ((0, 0), (0, 5)))
    assert relative_norm(logits(model, padded, segments)[:, :length], expected) < LOGITS


def test_left_padding_equals_transformers_with_an_attention_mask(tmp_path: Path) -> None:
    """Rotary scores depend on distances only, so that our positions (from 0 at the first token) give the same logits."""
    make_checkpoint(tmp_path, "mixtral_tied", dtype="float32")
    ids = np.random.default_rng(3).integers(0, 96, (2, 40))
    mask = np.ones_like(ids)
    mask[0, :11] = 0
    expected = reference_logits(reference_model(tmp_path), ids, mask)
    start("EP4xFSDP2")
    actual = logits(moe_jax.transform(tmp_path), ids, mask)
    assert relative_norm(actual[mask == 1], expected[mask == 1]) < LOGITS


@pytest.mark.parametrize("variant", ["mixtral_tied", "qwen3_moe", "olmoe"])
def test_one_sgd_step_equals_torch(variant: str, tmp_path: Path) -> None:
    """Every exported tensor's change after one plain SGD step; SGD shows a wrong gradient scale, which Adam hides."""
    import torch

    make_checkpoint(tmp_path / "hf", variant, dtype="float32")
    reference = reference_model(tmp_path / "hf")
    ids = np.random.default_rng(4).integers(0, 96, (8, 17))
    segments = np.ones_like(ids)
    segments[:, 12:] = 0
    labels = np.where(segments == 1, ids, -100)
    loss = reference(torch.tensor(ids), attention_mask=torch.tensor(segments), labels=torch.tensor(labels)).loss
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    reference.save_pretrained(tmp_path / "torch")

    start("EP4xFSDP2")
    model = moe_jax.transform(
        tmp_path / "hf", config=moe_jax.MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0)
    )
    batch = {"tokens": put_batch(ids.astype(np.int32)), "segment_ids": put_batch(segments.astype(np.int32))}

    @jax.jit
    def step(model, batch):
        (loss, _), grads = jax.value_and_grad(moe_jax.training_loss, has_aux=True)(model, batch, None)
        return loss, jax.tree.map(lambda p, g: p - 0.5 * g, model, grads)

    our_loss, model = step(model, batch)
    assert float(our_loss) == pytest.approx(float(loss), rel=1e-6)
    moe_jax.save_pretrained(model, tmp_path / "ours")
    before, theirs, ours = (read_folder(tmp_path / name) for name in ("hf", "torch", "ours"))
    assert ours.keys() == theirs.keys()
    for name, start_value in before.items():
        change = theirs[name] - start_value
        assert np.linalg.norm(ours[name] - theirs[name]) <= UPDATE * max(np.linalg.norm(change), 1e-4), name


def test_exported_model_reloads_cleanly_and_gives_the_same_logits_after_training(tmp_path: Path) -> None:
    """C38, C14: five tied training steps, then transformers loads the export."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path / "hf", "qwen3_moe_nonorm", dtype="float32", shards=3, tokenizer=True)
    start("EP4xFSDP2")
    model = moe_jax.transform(tmp_path / "hf")
    ids = np.random.default_rng(5).integers(0, 96, (8, 33)).astype(np.int32)
    batch = {"tokens": put_batch(ids), "segment_ids": put_batch(np.ones_like(ids))}

    @jax.jit
    def step(model, batch):
        grads = jax.grad(lambda m: moe_jax.training_loss(m, batch, None)[0])(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)

    for _ in range(5):
        model = step(model, batch)
    moe_jax.save_pretrained(model, tmp_path / "out")
    reloaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert relative_norm(logits(model, ids), reference_logits(reloaded, ids)) < LOGITS


def test_torch_model_in_bf16_is_carried_over_exactly(tmp_path: Path) -> None:
    model = make_model("olmoe_norm", dtype="bfloat16")
    model.save_pretrained(tmp_path / "torch")
    start("EP2xFSDP2")
    moe_jax.save_pretrained(moe_jax.transform(model), tmp_path / "ours")
    theirs, ours = read_folder(tmp_path / "torch"), read_folder(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "olmoe"])
def test_the_hf_balancing_loss_is_transformers_value(variant: str, tmp_path: Path) -> None:
    """Pooled over layers, k at balance, padding left out (C49); so a run begun in transformers goes on under the same loss."""
    import torch

    make_checkpoint(tmp_path, variant, dtype="float32")
    ids = np.random.default_rng(0).integers(3, 96, (4, 40))
    mask = np.ones_like(ids)
    mask[0, :7], mask[2, 30:] = 0, 0
    with torch.no_grad():
        output = reference_model(tmp_path)(
            torch.tensor(ids), attention_mask=torch.tensor(mask), output_router_logits=True
        )
    moe = moe_jax.MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_form="hf")
    start("EP2xFSDP2")
    model = moe_jax.transform(tmp_path, moe)
    run = jax.jit(lambda m, t, s: m(t, s, train=True).aux_loss)
    ours = run(model, put_batch(ids.astype(np.int32)), put_batch(mask.astype(np.int32)))
    assert float(ours) == pytest.approx(float(output.aux_loss), rel=1e-6)
    assert float(ours) > model.config.num_experts_per_tok  # not the value at balance
