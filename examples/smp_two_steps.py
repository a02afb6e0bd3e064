"""SMP v2's two steps, `init` and `transform`, around an ordinary JAX training loop.

python examples/smp_two_steps.py --devices 8          # a tiny new Mixtral on eight simulated CPU devices
python examples/smp_two_steps.py --model FOLDER       # a Hugging Face checkpoint on the GPUs of this host
"""

import argparse
import functools
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

import moe_jax
from converters.io import check_target
from moe_jax.cli import simulate_devices
from moe_jax.data import load_rows, training_batches
from moe_jax.run_config import DataConfig
from moe_jax.sharding import BATCH, P


def hugging_face_model(folder: str | None) -> Any:
    """The torch model of a folder, or a tiny Mixtral with random weights (its vocabulary is bytes)."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    if folder:
        return AutoModelForCausalLM.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(
        MixtralConfig(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512)
    )  # fmt: skip


def train(model: Any, tokenizer: str, steps: int, batch_size: int, seq_len: int) -> Any:
    """The model after `steps` steps of AdamW on the text that moe_jax carries: nothing here is special to MoE."""
    rows, _ = load_rows(DataConfig(tokenizer=tokenizer), seq_len, model.config.vocab_size)
    batches = training_batches(rows, batch_size, seed=0)
    layout = NamedSharding(moe_jax.state.mesh, P(BATCH))
    optimizer = optax.adamw(1e-3)
    opt_state = jax.jit(optimizer.init)(model)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, opt_state, batch):
        (loss, parts), grads = jax.value_and_grad(moe_jax.training_loss, has_aux=True)(model, batch, None)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss, parts.router.counts

    for i in range(steps):
        model, opt_state, loss, counts_LE = step(model, opt_state, jax.device_put(batches[i], layout))
        print(f"step {i + 1}/{steps}  loss {loss:.4f}  tokens of each expert of layer 0: {counts_LE[0].tolist()}")
    return model


def main() -> None:
    """Makes or reads the model, trains it, and writes a Hugging Face folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: a tiny Mixtral made here")
    parser.add_argument("--out", default="runs/smp_two_steps", help="new folder for the trained checkpoint")
    parser.add_argument("--devices", type=int, default=0, help="run on that many simulated CPU devices")
    parser.add_argument("--expert-parallel-degree", type=int, default=4)
    parser.add_argument("--hybrid-shard-degree", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step, a multiple of the devices")
    parser.add_argument("--seq-len", type=int, default=128)
    args = parser.parse_args()
    try:
        check_target(args.out)  # before any work: an export is never written over anything
    except moe_jax.ConfigError as error:
        parser.error(str(error))
    if args.devices:
        simulate_devices(args.devices)

    # Step 1: the mesh, from a dict or the path of a JSON file with SMP's keys.
    moe_jax.init(
        {"expert_parallel_degree": args.expert_parallel_degree, "hybrid_shard_degree": args.hybrid_shard_degree}
    )
    # Step 2: the Hugging Face model becomes one whose experts exchange tokens.
    config = moe_jax.MoEConfig(
        smp_moe=True,
        random_seed=12345,
        moe_load_balancing="sinkhorn",
        global_token_shuffle=False,
        moe_all_to_all_dispatcher=True,
        moe_aux_loss_coeff=0.001,
        moe_z_loss_coeff=0.001,
    )
    model = moe_jax.transform(hugging_face_model(args.model), config=config)

    model = train(model, args.model or "bytes", args.steps, args.batch_size, args.seq_len)
    moe_jax.save_pretrained(model, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
