"""What the sinkhorn plan's tolerance and cap cost and give: `python benchmarks/sinkhorn.py [--json FILE]`.

T = 8192 tokens, E experts, K experts per token. Logits are scale * unit, with unit standard normal ("none"), plus one normal
number an expert times 1 or 3 ("bias 1", "bias 3"), or products of 3 factors with a tenth of noise, of variance 1 ("rank 3").

A row is one set of logits: the iterations to each tolerance, and the load (the fullest expert's tokens over the mean) of the
top-K of logits + log v there, beside plain top-K ("none") and the defaults of `MoEConfig` ("default", with what is left of the
column error); "top-1" is the load of the plan's largest entries alone, at the last tolerance. The tables after it are over
all rows: what each tolerance costs and leaves, and how often a cap cuts the iteration to the default tolerance short.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import MoEConfig
from moe_jax.moe.router import select_experts
from moe_jax.moe.sinkhorn import sinkhorn_log_scale

NUM_TOKENS = 8192
SIZES = [(8, 2), (64, 8), (128, 8)]  # experts, K
SCALES, SKEWS = [0.1, 1.0, 3.0, 10.0], ["none", "bias 1", "bias 3", "rank 3"]
TOLERANCES = [1e-1, 1e-2, 1e-3, 1e-4]
CAP = 2000
CAPS = [8, 16, 32, 64, 128, 256]


def make_logits(skew: str, scale: float, num_experts: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    unit = rng.normal(size=(NUM_TOKENS, num_experts))
    if skew.startswith("bias"):
        unit += float(skew.split()[1]) * rng.normal(size=num_experts)
    elif skew == "rank 3":
        factors = rng.normal(size=(NUM_TOKENS, 3)) @ rng.normal(size=(3, num_experts)) / np.sqrt(3)
        unit = (factors + 0.1 * unit) / np.sqrt(1.01)
    return (scale * unit).astype(np.float32)


@partial(jax.jit, static_argnames="top_k")
def balance(logits_TE: jax.Array, tolerance: jax.Array, cap: jax.Array, top_k: int) -> dict[str, jax.Array]:
    """Iterations, the largest relative error of a column sum, and the loads (max over mean) of top-1 and top-K."""
    mask_T = jnp.ones(logits_TE.shape[0], bool)
    log_v_E, iterations = sinkhorn_log_scale(logits_TE, mask_T, (), max_iterations=cap, tolerance=tolerance)  # pyright: ignore[reportArgumentType]
    scores_TE = logits_TE + log_v_E[None, :]
    columns_E = jnp.mean(jax.nn.softmax(scores_TE, axis=1), axis=0) * logits_TE.shape[1]
    return {"iterations": iterations, "error": jnp.max(jnp.abs(columns_E - 1)), "load": load(scores_TE, top_k),
            "top-1 load": load(scores_TE, 1)}  # fmt: skip


def load(scores_TE: jax.Array, top_k: int) -> jax.Array:
    """Largest count over mean count of the top-K."""
    ids_TK, num_experts = select_experts(scores_TE, top_k), scores_TE.shape[1]
    counts_E = jnp.sum(ids_TK[:, :, None] == jnp.arange(num_experts)[None, None, :], axis=(0, 1))
    return jnp.max(counts_E) * num_experts / ids_TK.size


def measure(num_experts: int, top_k: int, skew: str, scale: float) -> dict:
    """One row: everything found for one set of logits."""
    logits_TE = jnp.asarray(make_logits(skew, scale, num_experts))

    def found(tolerance: float, cap: int) -> dict[str, float]:
        result = jax.device_get(balance(logits_TE, jnp.float32(tolerance), jnp.int32(cap), top_k))
        return {name: float(value) for name, value in result.items()}

    moe = MoEConfig()
    return {
        "experts": num_experts, "k": top_k, "skew": skew, "scale": scale, "none": float(load(logits_TE, top_k)),
        "none top-1": float(load(logits_TE, 1)),
        "to": {tolerance: found(tolerance, CAP) for tolerance in TOLERANCES},
        "default": found(moe.sinkhorn_tolerance, moe.sinkhorn_max_iterations),
        "caps": {cap: found(moe.sinkhorn_tolerance, cap) for cap in CAPS},
    }  # fmt: skip


def print_row(row: dict) -> None:
    def steps(found: dict) -> str:
        return f"{found['iterations']:.0f}" if found["iterations"] < CAP else f">{CAP}"

    cells = [f"{row['experts']:>4}{row['k']:>3} {row['skew']:>6}{row['scale']:>6g}  "]
    cells += [f"{steps(found):>6}" for found in row["to"].values()]
    cells += [f"  {row['none']:>6.2f}", *(f"{found['load']:>7.3f}" for found in row["to"].values())]
    cells += [f"{row['default']['load']:>8.3f} {row['default']['error']:>8.1e}{row['to'][1e-4]['top-1 load']:>8.3f}"]
    print("".join(cells), flush=True)


def print_summary(rows: list[dict]) -> None:
    """The sets of logits taken together: what each tolerance costs and leaves, then each cap at the default tolerance."""
    print(
        f"\n{'tolerance':>9} {'median':>7} {'mean':>6} {'most':>5} iterations {'mean load':>10} {'most above that at 1e-4':>24}"
    )
    for tolerance in TOLERANCES:
        found = [row["to"][tolerance] for row in rows]
        steps = [f["iterations"] for f in found]
        print(f"{tolerance:>9g} {np.median(steps):>7.1f} {np.mean(steps):>6.1f} {max(steps):>5.0f}"
              f"{np.mean([f['load'] for f in found]):>22.4f} {_most_lost(found, rows):>24.4f}")  # fmt: skip
    print(f"{'none':>9}{np.mean([row['none'] for row in rows]):>43.4f}")
    print(f"\n{'cap':>9} {'cut short':>10} {'largest error':>14} {'mean load':>10} {'most above that at 1e-4':>24}")
    for cap in CAPS:
        found = [row["caps"][cap] for row in rows]
        cut = sum(f["error"] > MoEConfig().sinkhorn_tolerance for f in found)
        print(f"{cap:>9} {f'{cut} of {len(rows)}':>10} {max(f['error'] for f in found):>14.1e} "
              f"{np.mean([f['load'] for f in found]):>10.4f} {_most_lost(found, rows):>24.4f}")  # fmt: skip


def _most_lost(found: list[dict], rows: list[dict]) -> float:
    return max(f["load"] - row["to"][TOLERANCES[-1]]["load"] for f, row in zip(found, rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    header = {
        "date": time.strftime("%Y-%m-%d"), "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "tokens": NUM_TOKENS, "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in header.items()))
    names = "".join(f"{f'{t:g}':>6}" for t in TOLERANCES), "".join(f"{f'{t:g}':>7}" for t in TOLERANCES)
    print(f"{'':>21}{'iterations to':>24}  {'load of the top-K at':>34}")
    print(
        f"{'E':>4}{'K':>3} {'skew':>6}{'scale':>6}  {names[0]}  {'none':>6}{names[1]}{'default':>8} {'error':>8}{'top-1':>8}"
    )
    rows = []
    for num_experts, top_k in SIZES:
        for skew in SKEWS:
            for scale in SCALES:
                rows.append(measure(num_experts, top_k, skew, scale))
                print_row(rows[-1])
    print_summary(rows)
    if args.json:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
