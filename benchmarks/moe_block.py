"""The MoE block, forward and backward, beside transformers' on one GPU: `python benchmarks/moe_block.py [--out FOLDER]`.

Ours is the model's layer (`moe_jax.moe.layer.MoE`, mesh of one device, the family's own routing), jitted; theirs is the family's
block with experts_implementation="grouped_mm" under torch.compile. Both in one process, measured in turn, with the same weights, x
and dy, bf16. "both" is y and the gradients of sum(y dy) by x and all weights; TFLOP/s count the products of the experts, that is
3 x 2 T k 3 d f ("forward": a third), whatever the load:

- random: normal router weights, nearly balanced. zipf: x[..., 0] is 1 everywhere, and row 0 of the router holds a bias
  ln(1 / (e + 1)) in units of the logits' noise.

GiB are those of "both", with weights, x, dy, y and all gradients, bf16: ours by the compiled program's memory_analysis (arguments +
outputs + temporary - aliased), theirs by torch.cuda.max_memory_allocated. Errors are relative norms of all of y, dx and d weights
against float64 on the same values, an expert at a time, given the choice of experts that each side made; "differ" is the part of
the tokens that the sides send to other experts (ours takes the router's product in float32, transformers in bf16;
--router-dtype compute: ours too). SonicMoE's figures were measured earlier on the same kind of machine, not in this run.
"""

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers  # first: it sets how jax takes memory  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from exchange import table
from peers import GIB, as_torch, block_errors, first_line, interleaved, jax_seconds, rate, torch_seconds

import moe_jax
from moe_jax.config import MoEConfig
from moe_jax.hf import model_config_of
from moe_jax.moe.layer import MoE
from moe_jax.sharding import batch_spec, parameter_shardings

SONIC = "SonicMoE 0.1.2"
LOADS, LENGTH, SECONDS = ("random", "zipf"), 4096, 0.15
LIMIT = 2e-2  # of an error: bf16 rounds inputs, hidden values and results
COMMON = {"vocab_size": 320, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
          "eos_token_id": 2}  # fmt: skip
# model_type -> (transformers' block, the names of width and number of experts, the rest)
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralSparseMoeBlock", "intermediate_size", "num_local_experts", {}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", "moe_intermediate_size", "num_experts", {"norm_topk_prob": True, "head_dim": 16}),
    "olmoe": ("OlmoeSparseMoeBlock", "intermediate_size", "num_experts", {"norm_topk_prob": False}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """sonic: SonicMoE's TFLOP/s of both, of forward, and GiB."""

    family: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    sonic: tuple[float, float, float] | None = None

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.tokens * self.top_k * 3 * self.hidden * self.width

    @property
    def hf(self) -> dict[str, Any]:
        """The config.json that both sides are built from."""
        _, width, experts, rest = FAMILIES[self.family]
        return {**COMMON, **rest, "model_type": self.family, "hidden_size": self.hidden, width: self.width,
                experts: self.experts, "num_experts_per_tok": self.top_k}  # fmt: skip


# Smallest memory first: JAX's own peak (in the JSON file) only grows, and holds the drawing of the weights too.
BLOCKS = {
    "OLMoE-1B-7B": Case("olmoe", 16384, 2048, 1024, 64, 8, (509, 421, 3.1)),
    "Qwen3-30B-A3B": Case("qwen3_moe", 16384, 2048, 768, 128, 8, (493, 423, 3.8)),
    "Mixtral-8x7B": Case("mixtral", 8192, 4096, 14336, 8, 2, (593, 601, 6.9)),
    "large": Case("qwen3_moe", 32768, 4096, 1024, 128, 8, (565, 534, 10.6)),
}
TINY = {f"tiny {family}": Case(family, 256, 64, 96, 8, 2) for family in FAMILIES}


class Ours:
    """The library's layer, compiled: `forward()` is y, `both()` is (y, expert ids, d layer, dx)."""

    def __init__(self, case: Case, moe: MoEConfig) -> None:
        config, bf16 = model_config_of(case.hf), jnp.bfloat16
        self.norm_topk_prob = config.norm_topk_prob

        def make() -> MoE:
            layer = MoE(config, moe, key=jax.random.key(0))
            layer = jax.tree.map(lambda a: a.astype(bf16), layer)
            # The router stays in float32, as masters are, but holds what bf16 holds, so that it is torch's.
            layer.router.set_value(layer.router[...].astype(jnp.float32))
            return layer

        self.layer = jax.device_put(jax.jit(make)(), parameter_shardings(jax.eval_shape(make)))
        shape = (case.tokens // min(case.tokens, LENGTH), min(case.tokens, LENGTH), case.hidden)
        x, dy = (jax.random.normal(jax.random.key(n), shape, bf16) for n in (1, 2))
        x = jnp.where(jnp.arange(case.hidden) == 0, jnp.ones((), bf16), x)
        batch = jax.NamedSharding(moe_jax.state.mesh, batch_spec(1))
        self.x, self.dy, self.mask = jax.device_put((x, dy, jnp.ones(shape[:2], bool)), batch)

        def forward(layer: MoE, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _, ids = layer(x, mask, bf16, train=True)
            return y, ids

        def both(layer: MoE, x: jax.Array, mask: jax.Array, dy: jax.Array) -> tuple[Any, ...]:
            y, pull, ids = jax.vjp(lambda layer, x: forward(layer, x, mask), layer, x, has_aux=True)
            return y, ids, *pull(dy)

        self._forward = jax.jit(lambda *args: forward(*args)[0]).lower(self.layer, self.x, self.mask).compile()
        self._both = jax.jit(both).lower(self.layer, self.x, self.mask, self.dy).compile()

    def forward(self) -> jax.Array:
        return self._forward(self.layer, self.x, self.mask)

    def both(self) -> Any:
        return self._both(self.layer, self.x, self.mask, self.dy)

    def gib(self) -> float:
        sizes: Any = self._both.memory_analysis()
        parts = (sizes.argument_size_in_bytes, sizes.output_size_in_bytes, sizes.temp_size_in_bytes)
        return (sum(parts) - sizes.alias_size_in_bytes) / GIB

    def set_load(self, load: str) -> None:
        """Row 0 of the router, in bf16's values."""
        router_HE = jax.device_get(self.layer.router[...])
        noise = router_HE[1:].std() * router_HE.shape[0] ** 0.5
        gumbel = np.pi / 6**0.5  # under noise of this deviation, a bias draws by exp(bias)
        bias_E = -np.log(np.arange(1, router_HE.shape[1] + 1)) * noise / gumbel * (load == "zipf")
        router_HE = np.concatenate([bias_E.astype(jnp.bfloat16).astype(np.float32)[None], router_HE[1:]])
        self.layer.router.set_value(jax.device_put(router_HE, self.layer.router[...].sharding))

    def results(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(expert ids [T, K], results in our layout), seen by torch."""
        y, ids, d_layer, dx = self.both()
        grads = {f"d_{name}": d for name, d in parameters(d_layer).items()}
        return as_torch(ids).flatten(0, 1).long(), {"y": as_torch(y), "dx": as_torch(dx), **grads}


def parameters(layer: MoE) -> dict[str, torch.Tensor]:
    """Router [H, E], gate_up [E, H, 2 I] and down [E, I, H], seen by torch."""
    arrays = {"router": layer.router[...], "gate_up": layer.gate_up[...], "down": layer.down[...]}
    return {name: as_torch(a).flatten(2) if name == "gate_up" else as_torch(a) for name, a in arrays.items()}


class Theirs:
    """transformers' block with copies of our weights, compiled."""

    def __init__(self, case: Case, ours: Ours, backend: str) -> None:
        self.before = torch.cuda.memory_allocated()
        config = transformers.CONFIG_MAPPING[case.family](**case.hf, experts_implementation="grouped_mm")  # pyright: ignore[reportCallIssue]
        module = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
        with torch.device("meta"):
            block = getattr(module, FAMILIES[case.family][0])(config)
        self.block: Any = block.to(torch.bfloat16).to_empty(device=peers.device())
        self.copy_weights(ours)
        self.x, self.dy = as_torch(ours.x).clone().requires_grad_(), as_torch(ours.dy).clone()
        self.compiled = torch.compile(self.block, dynamic=False, backend=backend)

    def named(self) -> dict[str, torch.nn.Parameter]:
        experts = self.block.experts
        return {"router": self.block.gate.weight, "gate_up": experts.gate_up_proj, "down": experts.down_proj}

    @torch.no_grad()
    def copy_weights(self, ours: Ours) -> None:
        for name, value in parameters(ours.layer).items():
            self.named()[name].copy_(value.transpose(-2, -1))

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        return self.compiled(self.x)

    def both(self) -> torch.Tensor:
        """y; the gradients lie in `.grad`, made anew."""
        self.x.grad = None
        self.block.zero_grad(set_to_none=True)
        y = self.compiled(self.x)
        y.backward(self.dy)
        return y

    def gib(self) -> float:
        """Compiles, and returns the peak of `both` above what was there before this block."""
        for call in (self.forward, self.both):
            call()
        if peers.device() == "cpu":
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        self.both()
        return (torch.cuda.max_memory_allocated() - self.before) / GIB

    def results(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.both().detach()
        ids = self.block.gate(self.x.detach().flatten(0, 1))[2]
        grads = {f"d_{n}": p.grad.transpose(-2, -1) for n, p in self.named().items() if p.grad is not None}
        assert self.x.grad is not None
        return ids, {"y": y, "dx": self.x.grad, **grads}


def measure_load(ours: Ours, theirs: Theirs | None, case: Case, repeats: int) -> dict[str, Any]:
    """Times, rates and errors of both sides as their routers are now."""
    calls: dict[str, Any] = {"ours both": (jax_seconds, ours.both), "ours forward": (jax_seconds, ours.forward)}
    if theirs:
        calls |= {"torch both": (torch_seconds, theirs.both), "torch forward": (torch_seconds, theirs.forward)}
    times = interleaved(calls, repeats, SECONDS)
    inputs = parameters(ours.layer), as_torch(ours.x), as_torch(ours.dy)
    errors, chosen = {}, []
    for side, block in (("ours", ours), ("torch", theirs)):
        if block:
            ids_TK, found = block.results()
            errors[side] = block_errors(*inputs, ids_TK, found, norm_topk_prob=ours.norm_topk_prob)
            chosen.append(torch.sort(ids_TK, 1)[0])
    counts_E = torch.bincount(chosen[0].flatten(), minlength=case.experts).double()
    return {
        "max_over_mean": float(counts_E.max() / counts_E.mean()), "errors": errors,
        "differ": float((chosen[0] != chosen[-1]).any(1).double().mean()),
        "seconds": {side: dataclasses.asdict(t) for side, t in times.items()},
        "rates": {side: t.rates(case.forward_flops * (3 if "both" in side else 1)) for side, t in times.items()},
    }  # fmt: skip


def measure(name: str, case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each load. Should torch.compile or all of transformers fail, it is without; the record says why."""
    started, theirs, note = time.perf_counter(), None, ""
    ours = Ours(case, MoEConfig(moe_load_balancing="none", moe_router_dtype=args.router_dtype))
    jax.block_until_ready((ours.forward(), ours.both()))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB
    gib, compiled = {"ours": ours.gib(), "jax_peak_so_far": peak}, time.perf_counter()
    for backend in ("aot_eager",) if args.tiny else ("inductor", "eager"):
        try:
            theirs = Theirs(case, ours, backend)
            gib["torch"] = theirs.gib()
            note += f"transformers with {backend}" if backend != "inductor" else ""
            break
        except Exception as error:
            theirs, note = None, f"transformers with {backend}: {first_line(error)}; "
    print(
        f"{name}: ours {compiled - started:.0f} s, torch {time.perf_counter() - compiled:.0f} s to compile",
        file=sys.stderr,
    )
    for load in args.loads.split(","):
        ours.set_load(load)
        if theirs:
            theirs.copy_weights(ours)
        yield {"block": name, **dataclasses.asdict(case), "load": load, "gib": gib, "note": note,
               **measure_load(ours, theirs, case, args.repeats)}  # fmt: skip
    if args.profile:
        with jax.profiler.trace(str(args.profile / name.replace(" ", "_"))):
            jax.block_until_ready([ours.both() for _ in range(3)][-1])


def lines_of(records: list[dict[str, Any]]) -> list[str]:
    rows, sides, results = [], ("ours", "torch"), ("y", "dx", "d_router", "d_gate_up", "d_down")
    for r in records:
        rates, errors, gib = r.get("rates", {}), r.get("errors", {}), r.get("gib", {})
        sonic = [f"{n:g}" for n in r["sonic"]] if r["sonic"] and r["load"] == "random" else ["-"] * 3
        cells = [r["block"], f"{r['load']} ({r['max_over_mean']:.2f})" if rates else r["load"]]
        for part, was in zip(("both", "forward"), sonic[:2], strict=True):
            cells += [*(rate(rates.get(f"{side} {part}")) for side in sides), was]
        cells += [*(f"{gib[side]:.1f}" if side in gib else "-" for side in sides), sonic[2]]
        cells += [" ".join(f"{errors[s][n]:.1e}" for n in results) if s in errors else "-" for s in sides]
        rows.append([*cells, f"{r['differ']:.2%}" if len(errors) == 2 else "-", r["note"]])
    columns = [f"{part}, {side}" for part in ("both", "forward", "GiB") for side in ("ours", "transformers", SONIC)]
    columns += [f"{whose} errors of {', '.join(results)}" for whose in ("our", "transformers'")]
    return list(table(("block", "load (max/mean)", *columns, "differ", "note"), rows))


def main() -> int:
    parser = peers.argument_parser(__doc__, "moe_block", LOADS, limit_seconds=300.0)
    parser.add_argument("--blocks", default="", help=f"of {','.join(BLOCKS)}")
    parser.add_argument("--router-dtype", choices=("float32", "compute"), default="float32", help="of ours")
    parser.add_argument("--profile", type=Path, help="folder for a profile of ours, a folder in it for each block")
    args = parser.parse_args()
    moe_jax.init(devices=jax.devices()[:1])
    heading = f"{peers.begin()}; bf16, TFLOP/s: median (least-most); {SONIC}: measured earlier, on such a machine"
    report = peers.Report(args, "moe_block", heading, lines_of)
    blocks = TINY if args.tiny else BLOCKS
    for name in args.blocks.split(",") if args.blocks else blocks:
        if report.is_late(name):
            continue
        peers.free_memory()
        try:
            for record in measure(name, blocks[name], args):
                report.add(record)
        except Exception as error:  # one block that fails must not end the run
            report.add({"block": name, **dataclasses.asdict(blocks[name]), "load": "-", "note": first_line(error)})
    report.end()
    return 0 if all("errors" in r and max(r["errors"]["ours"].values()) < LIMIT for r in report.records) else 1


if __name__ == "__main__":
    sys.exit(main())
