"""Peak resident memory of loading, initialising and exporting a checkpoint: `python benchmarks/host_memory.py [--gigabytes 0.7]`.

Eight simulated CPU devices of one process (expert degree 4 x fsdp 2) hold the parameters once, as float32; each measurement is
the largest rise of the resident memory (Linux: /proc/self/statm) over its start, in a process of its own. Mapped pages of the
files that are read count. The checkpoint is bf16, written here with random weights.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

DEVICES = 8
SHARD_SIZE = "50MB"
PARALLEL = {"expert_parallel_degree": 4, "hybrid_shard_degree": 2}


def hf_config(gigabytes: float) -> dict:
    """A Mixtral whose bf16 tensors take about that much: 16.0 MB of experts and attention a layer at width 512."""
    per_layer = 2 * (8 * 3 * 512 * 1024 + 4 * 512 * 512)
    layers = max(1, round((gigabytes * 1e9 - 2 * 2 * 16000 * 512) / per_layer))
    return {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 16000, "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip


def resident() -> int:
    """Bytes of resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class LargestRise(threading.Thread):
    """Samples the resident memory every few milliseconds until `stop` returns the largest rise."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.largest = resident()
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.done.wait(0.004):
            self.largest = max(self.largest, resident())

    def stop(self) -> int:
        self.done.set()
        self.join()
        return max(self.largest, resident()) - self.before


def measure(what: str, folder: Path, config: dict) -> dict[str, int]:
    """{parameters in bytes, rise of the peak} of one action, in this process."""
    import jax

    import moe_jax
    from moe_jax.model import named_parameters

    moe_jax.init(PARALLEL)
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(DEVICES))())
    watch = LargestRise()
    model = moe_jax.transform(config if what == "init" else folder / "hf")
    jax.block_until_ready(jax.tree.leaves(model))
    rise = watch.stop()
    if what == "export":
        watch = LargestRise()
        moe_jax.save_pretrained(model, folder / "export", max_shard_size=SHARD_SIZE)
        rise = watch.stop()
    return {"parameters": sum(p[...].nbytes for p in named_parameters(model).values()), "rise": rise}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.7)
    parser.add_argument("--measure", choices=["write", "load", "init", "export"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = hf_config(args.gigabytes)
    if args.measure == "write":
        import moe_jax

        moe_jax.init(PARALLEL)
        moe_jax.save_pretrained(moe_jax.transform(config), args.folder / "hf", max_shard_size=SHARD_SIZE)
        return
    if args.measure:
        print(json.dumps(measure(args.measure, args.folder, config)))
        return
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--gigabytes", str(args.gigabytes), "--folder", folder, "--measure"]
        subprocess.run([*command, "write"], check=True, env=env)
        size = sum(f.stat().st_size for f in Path(folder, "hf").glob("*.safetensors"))
        print(
            f"{time.strftime('%Y-%m-%d')}: a bf16 checkpoint of {size / 1e6:,.0f} MB, {DEVICES} simulated CPU devices"
        )
        for what in ("load", "init", "export"):
            done = subprocess.run([*command, what], check=True, env=env, capture_output=True, text=True)
            figures = json.loads(done.stdout)
            rise, held = figures["rise"] / 1e6, figures["parameters"] / 1e6
            print(f"{what:>7}: peak rises by {rise:6,.0f} MB; the float32 parameters are {held:,.0f} MB")


if __name__ == "__main__":
    main()
