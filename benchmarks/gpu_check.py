"""What can differ on a GPU, checked there in one command: `python benchmarks/gpu_check.py [--out FOLDER]`.

1. The MoE layer and `grouped_matmul` against float64 on the CPU, float32 and bfloat16.
2. A small Mixtral trained through `moe-jax train` on the GPU: falling loss, resume, one compilation, export.
3. Activation offloading: the same gradients, layer inputs in host memory.
4. The training step compiled ahead of time for eight GPUs of one host: its collectives against the formula.

Prints one line a check and exits with 1 if one failed.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax.config import LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.hf import abstract_model
from moe_jax.kernels.choice import Shape, choose
from moe_jax.kernels.grouped_matmul import grouped_matmul
from moe_jax.mesh import AXES
from moe_jax.model import named_parameters
from moe_jax.moe.layer import MoE
from moe_jax.plan import read_collectives, step_collectives
from moe_jax.sharding import batch_spec, parameter_shardings

FLOAT32, BF16 = 2e-6, 1e-2  # relative norms; bf16 rounds rows, hidden values and outputs
OFFLOADED = 1e-5  # float32; another fusion of the same sums
SMALL_BYTES = 20_000  # below: norm gradients and statistics


def relative_norm(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def check_grouped_matmul() -> str:
    """Odd group sizes (an empty one too), NaN in the rows of no group, against one float64 product a group."""
    sizes = [1, 7, 9, 255, 257, 0, 64, 3]
    num_rows, used = 603, sum(sizes)
    rng = np.random.default_rng(0)
    figures = []
    for inner, outer in ((96, 160), (128, 192)):  # the Hopper kernels take multiples of 64
        x, w, dy = (rng.normal(size=s).astype(np.float32)
                    for s in ((num_rows, inner), (len(sizes), inner, outer), (num_rows, outer)))  # fmt: skip
        x[used:], dy[used:] = np.nan, np.nan
        for dtype, limit in ((jnp.float32, FLOAT32), (jnp.bfloat16, BF16), (jnp.float16, BF16)):
            args = [jnp.asarray(a, dtype) for a in (x, w)]
            with jax.default_matmul_precision("highest"):
                out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.array(sizes, jnp.int32)), *args)
                dx, dw = pull(jnp.asarray(dy, dtype))
            expected = {"out": np.zeros(dy.shape), "dx": np.zeros(x.shape), "dw": np.zeros(w.shape)}
            start = 0
            for e, size in enumerate(sizes):
                rows = slice(start, start + size)
                expected["out"][rows] = x[rows].astype(np.float64) @ w[e]
                expected["dx"][rows] = dy[rows].astype(np.float64) @ w[e].T
                expected["dw"][e] = x[rows].astype(np.float64).T @ dy[rows]
                start += size
            errors = {
                n: relative_norm(a.astype(jnp.float32), expected[n]) for n, a in (("out", out), ("dx", dx), ("dw", dw))
            }
            assert max(errors.values()) < limit, errors
            kind = choose(Shape("forward", dtype, num_rows, len(sizes), inner, outer)).implementation
            figures.append(f"{kind} {jnp.dtype(dtype).name} {max(errors.values()):.1e}")
    return ", ".join(figures)


def layer_config(num_experts: int = 8) -> ModelConfig:
    return ModelConfig(
        family="mixtral", vocab_size=8, hidden_size=128, intermediate_size=192, moe_intermediate_size=192,
        num_experts=num_experts, num_experts_per_tok=2, num_heads=2, num_kv_heads=2, head_dim=64,
        layers=(LayerConfig(),), rope=RopeConfig(), initializer_range=0.1,
    )  # fmt: skip


def check_moe_layer() -> str:
    """The layer's output against every expert computed for every token in float64."""
    moe_jax.init(devices=jax.devices()[:1])
    layer = jax.jit(lambda: MoE(layer_config(), MoEConfig(moe_load_balancing="none"), key=jax.random.key(0)))()
    layer = jax.device_put(layer, parameter_shardings(layer))
    x = np.random.default_rng(0).normal(size=(4, 33, 128)).astype(np.float32)
    mask = np.ones((4, 33), bool)
    mask[1, 20:] = False
    router, gate_up, down = (np.asarray(p[...], np.float64) for p in (layer.router, layer.gate_up, layer.down))
    logits = x.reshape(-1, 128) @ router
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    scores = np.exp(np.take_along_axis(logits, chosen, 1))
    weights = scores / scores.sum(1, keepdims=True) * mask.reshape(-1, 1)
    expected = np.zeros((x.shape[0] * x.shape[1], 128))
    for slot in range(2):
        gate, up = (np.einsum("th,thi->ti", x.reshape(-1, 128), gate_up[chosen[:, slot], :, i]) for i in range(2))
        y = np.einsum("ti,tih->th", gate / (1 + np.exp(-gate)) * up, down[chosen[:, slot]])
        expected += weights[:, slot : slot + 1] * y
    figures = []
    put = lambda a: jax.device_put(a, jax.NamedSharding(moe_jax.state.mesh, batch_spec(a.ndim)))  # noqa: E731
    for dtype, limit in ((jnp.float32, FLOAT32), (jnp.bfloat16, BF16)):
        with jax.default_matmul_precision("highest"):
            y = jax.jit(lambda m, x, mask, dtype=dtype: m(x, mask, dtype, train=False)[0])(
                layer, put(x.astype(dtype)), put(mask)
            )
        error = relative_norm(y.astype(jnp.float32).reshape(-1, 128), expected)
        assert error < limit, (jnp.dtype(dtype).name, error)
        figures.append(f"{jnp.dtype(dtype).name} {error:.1e}")
    return ", ".join(figures)


def check_balancing() -> str:
    """The choices of every plan on the GPU against the CPU's, and the cost of the statistics beside the layer's."""
    from functools import partial

    from moe_jax.config import BALANCING_MODES
    from moe_jax.moe.balancing import choose_experts
    from moe_jax.moe.capacity import within_capacity
    from moe_jax.moe.router import jitter
    from moe_jax.moe.statistics import router_statistics

    moe_jax.init(devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    num_tokens, num_experts, top_k = 16384, 128, 8
    logits = (rng.normal(size=(num_tokens, num_experts)) + np.linspace(1, -1, num_experts)).astype(np.float32)
    mask, token = rng.random(num_tokens) < 0.9, np.arange(num_tokens, dtype=np.int32)
    bias = np.linspace(0, 0.01, num_experts).astype(np.float32)
    differing, milliseconds = {}, {}

    def run_on(device, function, *args):
        with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("one",))):
            put = [jax.device_put(a, device) for a in args]
            jitted = jax.jit(function)
            jax.block_until_ready(jitted(*put))
            times = []
            for _ in range(5):
                start = time.perf_counter()
                out = jax.block_until_ready(jitted(*put))
                times.append(time.perf_counter() - start)
            return jax.device_get(out), 1e3 * float(np.median(times))

    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    for mode in BALANCING_MODES:
        scope = "local" if mode in ("sinkhorn", "balanced") else "global"
        config = MoEConfig(moe_load_balancing=mode, balance_scope=scope)
        choose = lambda logits, m, t, b, config=config: choose_experts(logits, m, t, b, config, top_k, train=True)[0]  # noqa: E731
        ours, milliseconds[mode] = run_on(gpu, choose, logits, mask, token, bias)
        theirs, _ = run_on(cpu, choose, logits, mask, token, bias)
        differing[mode] = int(np.sum(np.any(np.sort(ours) != np.sort(theirs), axis=1) & mask))
        if mode == "balanced":
            counts = np.bincount(ours[mask].ravel(), minlength=num_experts)
            assert counts.max() - counts.min() <= 1, counts
    ids = np.where(mask[:, None], np.argsort(-logits, axis=1, kind="stable")[:, :top_k], num_experts).astype(np.int32)
    fits = partial(within_capacity, axes=(), factor=1.0, policy="probs")
    kept, milliseconds["capacity"] = run_on(gpu, fits, logits, ids, mask, token)
    differing["capacity"] = int(np.sum(np.any(kept != run_on(cpu, fits, logits, ids, mask, token)[0], axis=1)))
    noisy = lambda x, t: jitter(x, jnp.stack([t // 512, t % 512], axis=1), jax.random.key(0), 0.1)  # noqa: E731
    x = rng.normal(size=(num_tokens, 64)).astype(np.float32)
    # The random bits are the same; a fused multiply-add may round the last digit otherwise.
    np.testing.assert_allclose(*(run_on(device, noisy, x, token)[0] for device in (gpu, cpu)), rtol=1e-6)
    statistics = lambda logits, i, m: router_statistics(logits, i, m, ())  # noqa: E731
    _, milliseconds["statistics"] = run_on(gpu, statistics, logits, ids, mask)
    assert differing["balanced"] == differing["none"] == 0, differing
    assert max(differing.values()) <= num_tokens // 1000, differing  # near-ties of float32 sums in another order
    times = ", ".join(f"{name} {value:.2f}" for name, value in milliseconds.items())
    return f"tokens of {num_tokens} that choose otherwise than on the CPU: {differing}; ms at E=128, k=8: {times}"


def check_training() -> str:
    """100 steps, the last 40 of them after a resume, in bf16; then the exported folder loads again."""
    from moe_jax.run_config import DataConfig, ModelSettings, OptimizerConfig, RunConfig, TrainSettings
    from moe_jax.train import train

    hf = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 320, "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config_path = Path(folder) / "config.json"
        config_path.write_text(json.dumps(hf))

        def run(steps: int, *, resume: bool):
            return train(
                RunConfig(
                    model=ModelSettings(path=str(config_path), init="random"), output=f"{folder}/run", data=DataConfig(),
                    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10), export=steps == 100,
                    train=TrainSettings(
                        steps=steps, global_batch_size=16, seq_len=256, dtype="bfloat16", device="gpu", resume=resume,
                        checkpoint_every=60, eval_every=0,
                    ),
                )
            )  # fmt: skip

        first = run(60, resume=False)
        second = run(100, resume=True)
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        assert first.num_compilations == second.num_compilations == 1
        losses = [record["loss"] for record in records]
        assert len(losses) == 100, len(losses)
        assert losses[-1] < losses[0] - 1.5, (losses[0], losses[-1])
        moe_jax.transform(Path(folder) / "run" / "hf")
        speed = float(np.median([record["tokens_per_second"] for record in records[20:60]]))
        return f"loss {losses[0]:.2f} -> {losses[-1]:.2f} over a resume, compiled once, {speed:,.0f} tokens/s"


def check_offloading() -> str:
    """Gradients with layer inputs in host memory equal those without; the compiled program copies to the host."""
    hf = {
        "model_type": "mixtral", "vocab_size": 320, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
        "dtype": "bfloat16",
    }  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 320, (16, 512)).astype(np.int32)
    results, memory, text = [], [], ""
    jax.config.update("jax_default_matmul_precision", "highest")
    for offload in (False, True):
        moe_jax.init({"sm_activation_offloading": offload})
        model = moe_jax.transform(hf, dtype="float32")
        f = jax.jit(jax.grad(lambda m: jnp.mean(m(tokens, train=True).logits ** 2))).lower(model).compile()
        memory.append(getattr(f.memory_analysis(), "temp_size_in_bytes", 0))
        text = f.as_text() or ""
        results.append({n: np.asarray(p[...]) for n, p in named_parameters(f(model)).items()})
    worst = max(relative_norm(results[1][n], results[0][n]) for n in results[0])
    jax.config.update("jax_default_matmul_precision", None)
    assert worst < OFFLOADED, worst
    assert "S(5)" in text, "no buffer of the compiled step lies in host memory"
    return f"gradients differ by {worst:.1e}; temporary memory {memory[0]:,} -> {memory[1]:,} bytes"


def check_collectives_of_eight_gpus() -> str:
    """Compiles the step for EP4 x FSDP2 without the GPUs and compares what it sends with the formula."""
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    topology = topologies.get_topology_desc(topology_name="", platform="cuda", topology="1x1x8")
    mesh = Mesh(np.array(topology.devices).reshape(1, 2, 4), AXES, axis_types=(AxisType.Explicit,) * 3)
    moe_jax.init(devices=jax.devices()[:1])
    config = ModelConfig(
        family="mixtral", vocab_size=4096, hidden_size=1024, intermediate_size=1536, moe_intermediate_size=1408,
        num_experts=8, num_experts_per_tok=2, num_heads=12, num_kv_heads=4, head_dim=64, layers=(LayerConfig(),) * 4,
        rope=RopeConfig(),
    )  # fmt: skip
    moe_jax.state._mesh = mesh  # a mesh of devices that are not there: init cannot make it
    rows, length = 16, 1024
    with jax.set_mesh(mesh):
        model = abstract_model(config, MoEConfig(), jnp.bfloat16, None)
        sharding = jax.NamedSharding(mesh, batch_spec(2))
        batch = {
            n: jax.ShapeDtypeStruct((rows, length), np.int32, sharding=sharding) for n in ("tokens", "segment_ids")
        }

        def step(model, batch):
            grads = jax.grad(lambda m: moe_jax.training_loss(m, batch, None)[0])(model)
            return jax.tree.map(lambda p, g: p - g, model, grads)

        hlo = jax.jit(step, donate_argnums=0).lower(model, batch).compile().as_text() or ""
    if OUT:
        (OUT / "step_8gpu.hlo").write_text(hlo)
    found = read_collectives(hlo, SMALL_BYTES)
    expected = {
        c: n
        for c, n in step_collectives(
            config, mesh.shape, rows=rows, length=length, item_bytes=2, moe=MoEConfig()
        ).items()
        if c.num_bytes >= SMALL_BYTES
    }  # fmt: skip
    lines = [f"    {c.kind:>15} {c.num_bytes:>12,} bytes: found {found.get(c, 0)}, formula {expected.get(c, 0)}"
             for c in sorted(found.keys() | expected.keys())]  # fmt: skip
    print("\n".join(lines))
    assert found == expected, "the table above differs"
    return f"{sum(found.values())} collectives a step, as by formula"


OUT: Path | None = None
CHECKS = (
    check_grouped_matmul,
    check_moe_layer,
    check_balancing,
    check_training,
    check_offloading,
    check_collectives_of_eight_gpus,
)


def main() -> int:
    global OUT
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the compiled program's text")
    OUT = parser.parse_args().out
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {time.strftime('%Y-%m-%d')}")
    failed = 0
    for check in CHECKS:
        started = time.perf_counter()
        try:
            result = f"ok   {check()}"
        except Exception:
            traceback.print_exc()
            result, failed = "FAIL", failed + 1
        print(f"{check.__name__:<34} {time.perf_counter() - started:6.1f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
