"""What a run reports: one JSON line a step, TensorBoard events if asked for, and a progress bar or log lines.

L MoE layers, E experts.
"""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

Record = dict[str, Any]
# Shown in the progress bar and the log lines, in this order: what a figure is called there, and its format.
HEADLINES = {
    "loss": ("loss", ".4f"), "grad_norm": ("grad_norm", ".3f"), "learning_rate": ("lr", ".2e"),
    "tokens_per_second": ("tokens/s", ",.0f"), "max_load": ("max_load", ".2f"), "dead_experts": ("dead", ".1%"),
    "mean_entropy": ("entropy", ".3f"), "dropped": ("dropped", ",d"),
}  # fmt: skip
SHOWN_UNLESS_ZERO = ("dropped",)
# A record's per-layer lists that TensorBoard gets as one series a layer, by the end of the series' name.
LAYER_SERIES = {
    "max_load": "layer_max_load", "dead": "layer_dead", "dropped": "layer_dropped", "entropy": "entropy",
    "aux": "layer_aux", "z": "layer_z", "mean_logit": "mean_logit", "max_logit": "max_logit", "bias_min": "bias_min",
    "bias_max": "bias_max", "plan_iterations": "plan_iterations", "further_rounds": "further_rounds",
    "further_blocks": "further_blocks",
}  # fmt: skip

logger = logging.getLogger("moe_jax")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Device figures of one step; the fields are arrays on the device, or on the host once fetched.

    loss is the one that was differentiated; ce, aux, z are its parts, unweighted. num_labels: what ce is the mean of.
    counts: int32 [L, E], (token, expert) pairs chosen; dropped: int32 [L], those of them that were not computed.
    entropy: [L], mean entropy of the routing, in nats. layer_aux, layer_z: [L], unweighted.
    mean_logit, max_logit: [L], of the router's logits over the real tokens.
    plan_iterations: int32 [L], of the plan that balances the load; 0 where the mode has none.
    further_rounds: int32 [L], of the exchange, beyond the first of each chunk; 0 where its buffers held everything.
    further_blocks: int32 [L], blocks of (token, expert) pairs beyond the first that the fullest device computed.
    bias_min, bias_max: [L], range of the bias by which experts are chosen; 0 where the mode has none.
    """

    loss: Any
    ce: Any
    aux: Any
    z: Any
    grad_norm: Any
    learning_rate: Any
    num_labels: Any
    counts: Any
    dropped: Any
    entropy: Any
    layer_aux: Any
    layer_z: Any
    mean_logit: Any
    max_logit: Any
    plan_iterations: Any
    further_rounds: Any
    further_blocks: Any
    bias_min: Any
    bias_max: Any


def relative_load(counts_LE: np.ndarray) -> np.ndarray:
    """Returns each expert's tokens over its layer's mean: 1 is balanced; 0 in a layer that took no token."""
    counts_LE = np.asarray(counts_LE, np.float64)
    return counts_LE / np.maximum(counts_LE.mean(axis=1, keepdims=True), 1e-9)


def load_figures(counts_LE: np.ndarray) -> Record:
    """Returns the balance of the experts in two figures; both are 0 for a model without MoE layers.

    max_load: the fullest expert's tokens over its layer's mean, at the worst layer: 1 is balanced, E one expert alone.
    dead_experts: part of all experts that took no token.
    """
    dead = float(np.mean(np.asarray(counts_LE) == 0)) if np.size(counts_LE) else 0.0
    return {"max_load": float(relative_load(counts_LE).max(initial=0.0)), "dead_experts": dead}


def step_record(step: int, metrics: StepMetrics, *, num_tokens: int, seconds: float) -> Record:
    """Returns one step's line; waits for the device to finish the step.

    step: steps done, so the first is 1. num_tokens: real tokens of the global batch. seconds: since the step before.
    """
    host = jax.device_get(metrics)
    scalars = ("loss", "ce", "aux", "z", "grad_norm", "learning_rate")
    return {
        "step": step,
        **{name: float(getattr(host, name)) for name in scalars},
        "num_labels": int(host.num_labels),
        "tokens_per_second": num_tokens / max(seconds, 1e-9),
        **load_figures(host.counts),
        "dropped": int(np.sum(host.dropped)),
        **_router_figures(host),
        **_layer_figures(host),
    }


def _router_figures(host: StepMetrics) -> Record:
    """What all routers did, in one figure each; all 0 for a model without MoE layers."""
    if not len(host.entropy):
        return {"mean_entropy": 0.0, "max_router_logit": 0.0, "max_abs_bias": 0.0}
    return {
        "mean_entropy": float(np.mean(host.entropy)),
        "max_router_logit": float(np.max(host.max_logit)),
        "max_abs_bias": float(np.max(np.abs([host.bias_min, host.bias_max]))),
    }


def _layer_figures(host: StepMetrics) -> Record:
    """Lists with one entry a MoE layer; counts has one list a layer."""
    floats = ("entropy", "layer_aux", "layer_z", "mean_logit", "max_logit", "bias_min", "bias_max")
    return {
        "layer_max_load": _shortened(relative_load(host.counts).max(axis=1)),
        "layer_dead": _shortened(np.mean(host.counts == 0, axis=1)),
        "layer_dropped": np.asarray(host.dropped).tolist(),
        **{name: _shortened(getattr(host, name)) for name in floats},
        "plan_iterations": np.asarray(host.plan_iterations).tolist(),
        "further_rounds": np.asarray(host.further_rounds).tolist(),
        "further_blocks": np.asarray(host.further_blocks).tolist(),
        "counts": np.asarray(host.counts).tolist(),
    }


def _shortened(values_L: np.ndarray) -> list[float]:
    """Six significant digits: float32 has hardly more."""
    return [float(f"{value:.6g}") for value in values_L]


class CollapseWatch:
    """Says when a layer sends its tokens to one expert, step after step.

    threshold: times an even share; a layer counts as collapsing while its fullest expert is above it. 0 never speaks.
    patience: that many steps in a row make a collapse. layers: the model's layer number of every row of counts.
    """

    def __init__(self, threshold: float, patience: int, layers: Sequence[int]) -> None:
        self._threshold, self._patience, self._layers = threshold, patience, layers
        self._steps_above = [0] * len(layers)

    def check(self, record: Record) -> list[str]:
        """Returns a sentence for every layer whose collapse this step completes; the next one after it recovered."""
        if not self._threshold:
            return []
        sentences = []
        for row, (layer, load) in enumerate(zip(self._layers, record["layer_max_load"], strict=True)):
            self._steps_above[row] = self._steps_above[row] + 1 if load > self._threshold else 0
            if self._steps_above[row] == self._patience:
                sentences.append(self._sentence(layer, load, int(np.argmax(record["counts"][row])), record["step"]))
        return sentences

    def _sentence(self, layer: int, load: float, expert: int, step: int) -> str:
        return (
            f"layer {layer} collapses: expert {expert} took {load:.2f} times an even share of the tokens at step {step}, "
            f"and the layer's fullest expert more than {self._threshold:g} times in every step from "
            f"{step - self._patience + 1} to {step}"
        )


class JsonlWriter:
    """Appends records to a file, one line each, flushed at once.

    last_step: what the file holds of later steps is cut off, so that a resumed run does not tell a step twice.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        kept = [record for record in read_jsonl(path) if record["step"] <= last_step]
        self._file = path.open("w", encoding="utf-8")
        for record in kept:
            self.write(record)

    def write(self, record: Record) -> None:
        # JSON has no NaN and no infinity: a reader of the line that ended a run gets null.
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """The value with None for every float in it that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_jsonl(path: Path) -> list[Record]:
    """Returns the records of a file; none if it is absent, and without a last line that a killed process cut off."""
    records = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return records


@functools.cache
def console() -> Any:
    """Returns the one console (stderr) that the progress bar and the log lines share."""
    from rich.console import Console

    return Console(stderr=True)


class Reporter:
    """Sends records to every place that was asked for; all but process 0 of a run stay silent.

    A progress bar where stderr is a terminal, else a log line every `log_every` steps (0: none). A context manager.
    layers: the model's number of every MoE layer, for the names of its series; None numbers the MoE layers alone.
    """

    def __init__(
        self, folder: Path, *, first_step: int, steps: int, log_every: int = 0, tensorboard: bool = False,
        layers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._active = jax.process_index() == 0
        self._log_every, self._steps, self._first_step = log_every, steps, first_step
        self._train = self._eval = self._board = self._bar = None
        self._folder, self._tensorboard, self._layers = folder, tensorboard, layers

    def __enter__(self) -> "Reporter":
        if not self._active:
            return self
        self._folder.mkdir(parents=True, exist_ok=True)
        self._train = JsonlWriter(self._folder / "metrics.jsonl", self._first_step)
        self._eval = JsonlWriter(self._folder / "eval.jsonl", self._first_step)
        if self._tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._first_step + 1)
        if console().is_terminal:
            self._bar = _progress_bar()
            self._bar.start()
            self._task = self._bar.add_task("train", total=self._steps, completed=self._first_step, figures="")
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self._train, self._eval, self._board):
            if sink is not None:
                sink.close()
        if self._bar is not None:
            self._bar.stop()

    def step(self, record: Record) -> None:
        """Reports one training step."""
        if self._train is None:
            return
        self._train.write(record)
        self._scalars("train", record)
        self._layer_scalars("train", record)
        figures = _headline(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], figures=figures)
        elif self._log_every and (record["step"] % self._log_every == 0 or record["step"] == self._steps):
            logger.info("step %d/%d  %s", record["step"], self._steps, figures)

    def evaluation(self, record: Record) -> None:
        """Reports one evaluation."""
        if self._eval is None:
            return
        self._eval.write(record)
        self._scalars("eval", record)
        logger.info("step %d/%d  eval_loss %.4f", record["step"], self._steps, record["eval_loss"])

    def _scalars(self, prefix: str, record: Record) -> None:
        if self._board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{prefix}/{name}", value, record["step"])

    def _layer_scalars(self, prefix: str, record: Record) -> None:
        if self._board is None:
            return
        layers = range(len(record["counts"])) if self._layers is None else self._layers
        for name, field in LAYER_SERIES.items():
            for layer, value in zip(layers, record[field], strict=True):
                self._board.add_scalar(f"{prefix}/layer_{layer:02d}/{name}", value, record["step"])
        for layer, counts in zip(layers, record["counts"], strict=True):
            self._board.add_histogram(f"{prefix}/layer_{layer:02d}/counts", np.asarray(counts), record["step"])


def _headline(record: Record) -> str:
    shown = [name for name in HEADLINES if record[name] or name not in SHOWN_UNLESS_ZERO]
    return "  ".join(f"{HEADLINES[name][0]} {record[name]:{HEADLINES[name][1]}}" for name in shown)


def _progress_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    figures = TextColumn("{task.fields[figures]}")
    return Progress(BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), figures, console=console())
