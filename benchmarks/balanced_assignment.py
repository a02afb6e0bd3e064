"""Quality and time of the balanced assignment on one device: `python benchmarks/balanced_assignment.py [--full] [--json FILE]`.

The gain is (total - mean) / (best - mean): total is the sum of the chosen experts' scores, mean that of the average balanced
assignment, and best the exact optimum (a linear program; up to EXACT_SIZE scores, with SciPy) or else the upper bound that the
prices prove, sum_t topK(s_t + g) - sum_e g_e quota_e. Logits are standard normal, plus a slope of 6 over the experts ("skewed"), or
products of 3 factors with a tenth of noise ("rank 3"); times the scale. --full adds the sizes for an accelerator.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.moe.balanced import balanced_assignment

SIZES = [(1024, 8, 2), (4096, 8, 2), (4096, 64, 1), (4096, 64, 8), (16384, 64, 8)]  # tokens, experts, K
FULL_SIZES = [(16384, 8, 2), (65536, 64, 6), (65536, 128, 1), (65536, 128, 8)]
KINDS, SCALES = ["random", "skewed", "rank 3"], [0.01, 1.0, 100.0]
EXACT_SIZE, REPEATS = 1 << 14, 5
COLUMNS = {
    "tokens": "{:>7}", "experts": "{:>7}", "k": "{:>3}", "logits": "{:>8}", "scale": "{:>6}", "top-k load": "{:>10.2f}",
    "load": "{:>5.3f}", "gain": "{:>8.5f}", "of": "{:>8}", "price steps": "{:>11}", "rounds": "{:>6}", "finisher": "{:>8}",
    "ms": "{:>8.2f}",
}  # fmt: skip


def make_logits(kind: str, scale: float, num_tokens: int, num_experts: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num_tokens, num_experts))
    if kind == "skewed":
        logits += np.linspace(3, -3, num_experts)
    elif kind == "rank 3":
        logits = rng.normal(size=(num_tokens, 3)) @ rng.normal(size=(3, num_experts)) + 0.1 * logits
    return (scale * logits).astype(np.float32)


def optimum(scores: np.ndarray, top_k: int) -> float:
    """The largest sum of a balanced assignment; the linear program of a b-matching has an integral optimum."""
    import scipy.optimize
    import scipy.sparse as sparse

    num_tokens, num_experts = scores.shape
    floor, num_ceil = divmod(num_tokens * top_k, num_experts)
    rows = sparse.kron(sparse.eye(num_tokens), np.ones((1, num_experts)))
    columns = sparse.kron(np.ones((1, num_tokens)), sparse.eye(num_experts))
    constraints = sparse.bmat([[rows, None], [columns, -sparse.eye(num_experts)], [None, np.ones((1, num_experts))]])
    sums = np.r_[np.full(num_tokens, top_k), np.full(num_experts, floor), num_ceil]
    unit = np.abs(scores).max()  # the solver's tolerances are absolute
    costs = np.r_[-scores.ravel() / unit, np.zeros(num_experts)]
    return -unit * scipy.optimize.linprog(costs, A_eq=constraints.tocsr(), b_eq=sums, bounds=(0, 1)).fun


def upper_bound(scores: np.ndarray, prices: np.ndarray, top_k: int) -> float:
    """No balanced assignment has a larger sum, whatever the prices."""
    floor, num_ceil = divmod(scores.shape[0] * top_k, scores.shape[1])
    best = np.partition(scores + prices, -top_k, axis=1)[:, -top_k:].sum()
    return best - floor * prices.sum() - np.sort(prices)[:num_ceil].sum()


def load(ids: np.ndarray, num_experts: int) -> float:
    """Largest count over mean count."""
    return float(np.bincount(ids.ravel(), minlength=num_experts).max() * num_experts / ids.size)


def measure(num_tokens: int, num_experts: int, top_k: int, kind: str, scale: float) -> dict:
    """One row of the table."""
    logits = make_logits(kind, scale, num_tokens, num_experts)
    run = jax.jit(partial(balanced_assignment, num_experts_per_tok=top_k, axes=()))
    arguments = (jnp.asarray(logits), jnp.ones(num_tokens, bool), jnp.arange(num_tokens, dtype=jnp.int32))
    ids, found = jax.device_get(run(*arguments))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - start)
    scores = logits.astype(np.float64)
    exact = scores.size <= EXACT_SIZE and importlib.util.find_spec("scipy") is not None
    best = optimum(scores, top_k) if exact else upper_bound(scores, found.prices_E.astype(np.float64), top_k)
    mean = scores.mean() * num_tokens * top_k
    plain = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    return {
        "tokens": num_tokens, "experts": num_experts, "k": top_k, "logits": kind, "scale": scale,
        "top-k load": load(plain, num_experts), "load": load(ids, num_experts),
        "gain": float((np.take_along_axis(scores, ids, 1).sum() - mean) / (best - mean)),
        "of": "optimum" if exact else "bound", "price steps": int(found.iterations), "rounds": int(found.repair_rounds),
        "finisher": "yes" if found.finished else "no", "ms": 1e3 * statistics.median(seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="larger sizes too")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    header = {
        "date": time.strftime("%Y-%m-%d"), "device": jax.devices()[0].device_kind, "backend": jax.default_backend(),
        "jax": jax.__version__, "numpy": np.__version__, "python": sys.version.split()[0],
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in header.items()))
    widths = {name: len(form.format(0) if "f" in form else form.format("")) for name, form in COLUMNS.items()}
    print(" ".join(f"{name:>{max(widths[name], len(name))}}" for name in COLUMNS))
    rows = []
    for size in SIZES + (FULL_SIZES if args.full else []):
        for kind in KINDS:
            for scale in SCALES if size == SIZES[0] else [1.0]:
                rows.append(measure(*size, kind, scale))
                cells = ((form.format(rows[-1][name]), len(name)) for name, form in COLUMNS.items())
                print(" ".join(f"{cell:>{width}}" for cell, width in cells), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
