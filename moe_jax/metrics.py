"""What a run reports: one JSON line a step, TensorBoard events if asked for, and a progress bar or log lines.

L MoE layers, E experts.
"""

import dataclasses
import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

Record = dict[str, Any]
# Shown in the progress bar and the log lines, in this order.
HEADLINES = {"loss": ".4f", "grad_norm": ".3f", "learning_rate": ".2e", "tokens_per_second": ",.0f", "max_load": ".2f"}

logger = logging.getLogger("moe_jax")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Device figures of one step; the fields are arrays on the device, or on the host once fetched.

    loss is the one that was differentiated; ce, aux, z are its parts, unweighted. num_labels: what ce is the mean of.
    counts: [L, E] tokens that each expert took; dropped, entropy: [L].
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


def load_figures(counts_LE: np.ndarray) -> Record:
    """Returns the balance of the experts in two figures; both are 0 for a model without MoE layers.

    max_load: the fullest expert's tokens over its layer's mean, at the worst layer: 1 is balanced, E one expert alone.
    dead_experts: part of all experts that took no token.
    """
    counts_LE = np.asarray(counts_LE, np.float64)
    if not counts_LE.size or not counts_LE.any():
        return {"max_load": 0.0, "dead_experts": float(counts_LE.size > 0)}
    mean_L = np.maximum(counts_LE.mean(axis=1), 1e-9)
    return {"max_load": float((counts_LE.max(axis=1) / mean_L).max()), "dead_experts": float((counts_LE == 0).mean())}


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
        "entropy": np.asarray(host.entropy, np.float64).round(5).tolist(),
        "counts": np.asarray(host.counts).tolist(),
    }


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
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
    """

    def __init__(
        self, folder: Path, *, first_step: int, steps: int, log_every: int = 0, tensorboard: bool = False
    ) -> None:
        self._active = jax.process_index() == 0
        self._log_every, self._steps, self._first_step = log_every, steps, first_step
        self._train = self._eval = self._board = self._bar = None
        self._folder, self._tensorboard = folder, tensorboard

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
        figures = "  ".join(f"{name} {record[name]:{form}}" for name, form in HEADLINES.items())
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


def _progress_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    figures = TextColumn("{task.fields[figures]}")
    return Progress(BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), figures, console=console())
