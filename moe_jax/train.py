"""A training run from a `RunConfig`: build or resume, step, report, evaluate, checkpoint, export."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from moe_jax import mesh
from moe_jax.checkpoint import (
    TrainCheckpointer,
    TrainState,
    check_same_model,
    complete_steps,
    latest_step,
    read_model_info,
    replacing,
    replicated,
    restore,
)
from moe_jax.config import ModelConfig
from moe_jax.data import Batches, Rows, eval_batches, load_rows, training_batches
from moe_jax.errors import ConfigError
from moe_jax.metrics import CollapseWatch, Reporter, StepMetrics, read_jsonl, step_record
from moe_jax.optim import check_masters, make_optimizer, make_schedule
from moe_jax.plots import plot_expert_load, plot_load_over_time, plot_loss
from moe_jax.run_config import SMALLEST_COLLAPSE, RunConfig
from moe_jax.train_step import evaluate, make_train_step, num_compilations, put_batch

CHECKPOINTS, EXPORT = "checkpoints", "hf"
PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM

logger = logging.getLogger("moe_jax")


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite any more; the message names the step."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run ended with.

    steps: done in all, earlier ones of a resumed run included. loss: of the last step done here; NaN without one.
    eval_loss: of the last evaluation; None without one.
    num_compilations: how often the training step was compiled; 1, unless no step was left to do.
    preempted: stopped early by SIGTERM, with a checkpoint of `steps` and without an export.
    """

    state: TrainState
    steps: int
    loss: float
    eval_loss: float | None
    num_compilations: int
    preempted: bool
    output: Path


def train(config: RunConfig) -> TrainResult:
    """Runs `config` to its end, or to a SIGTERM, and returns what came out.

    The output folder then holds metrics.jsonl, eval.jsonl, loss.png, for a model with MoE layers expert_load.png and
    load_over_time.png, checkpoints/, with `export` hf/.
    On SIGTERM the step at work is finished, a checkpoint written, and the result says `preempted`; a second one changes
    nothing. Raises `ConfigError` for settings that cannot work, before any weight is read where they can be known by
    then, and `TrainingDiverged` when a loss or gradient is not finite.
    """
    with _stop_on_sigterm() as stop:
        _check_devices(config)
        mesh.init(config.parallel)
        _check_batch(config)
        resumes = _check_output(config)
        model_config = _model_config(config, resumes)
        config.train.collapse_threshold(model_config)
        train_rows, eval_rows = load_rows(config.data, config.train.seq_len, model_config.vocab_size)
        optimizer = make_optimizer(config.optimizer, config.train.steps)
        state = _resumed_state(config, optimizer) if resumes else _fresh_state(config, optimizer)
        check_masters(state.model)
        return _Run(config, state, optimizer, train_rows, eval_rows, stop, resumes).run()


class _Run:
    """The loop of one run and what it holds open."""

    def __init__(self, config: RunConfig, state: TrainState, optimizer: optax.GradientTransformation, train_rows: Rows,
                 eval_rows: Rows, stop: Callable[[int], bool], resumed: bool) -> None:  # fmt: skip
        settings = config.train
        self.config, self.settings, self.state, self.stop, self.resumed = config, settings, state, stop, resumed
        self.first_step = self.step = int(state.step)
        self.batches: Batches = training_batches(train_rows, settings.global_batch_size, config.data.shuffle_seed)
        micro_batch = settings.global_batch_size // settings.accumulation_steps
        held_out = eval_batches(eval_rows, micro_batch) if settings.eval_every and len(eval_rows) else []
        self.eval_batches = held_out[: settings.eval_batches or None]
        self.train_step = make_train_step(optimizer, make_schedule(config.optimizer, settings.steps))
        self.loss, self.eval_loss, self.evaluated_at, self.saved_at = math.nan, None, -1, self.step if resumed else -1
        self.pending: tuple[int, StepMetrics, int] | None = None
        self.clock = time.perf_counter()
        self.warned_of_no_labels = False
        self.layers = _moe_layers(state.model.config)
        self.watch = _collapse_watch(config, state.model.config)

    def run(self) -> TrainResult:
        settings, folder = self.settings, self.config.folder
        reporter = Reporter(folder, first_step=self.first_step, steps=settings.steps, log_every=settings.log_every,
                            tensorboard=settings.tensorboard, layers=self.layers)  # fmt: skip
        checkpointer = TrainCheckpointer(folder / CHECKPOINTS, settings.keep_checkpoints)
        with reporter as self.reporter, checkpointer as self.checkpointer:
            checkpointer.write_model_info(self.state.model, keep_source=self.resumed)
            preempted = self._steps()
            if not preempted and self.eval_batches:
                self._evaluate()
                preempted = self.stop(self.step)
            self._save()
        if jax.process_index() == 0:
            _draw(folder, self.layers)
        logger.info("%s at step %d, written to %s", "stopped" if preempted else "done", self.step, folder)
        if self.config.export and not preempted:
            _export(self.state.model, folder / EXPORT)
        return TrainResult(
            self.state, self.step, self.loss, self.eval_loss, num_compilations(self.train_step), preempted, folder
        )

    def _steps(self) -> bool:
        """Steps until the end or a signal; returns whether it was a signal."""
        settings = self.settings
        while self.step < settings.steps:
            if self.stop(self.step):
                self._read_pending()
                logger.warning("SIGTERM: stopping after step %d of %d", self.step, settings.steps)
                return True
            self._one_step()
            if _due(self.step, settings.eval_every) and self.eval_batches:
                self._evaluate()
            if _due(self.step, settings.checkpoint_every):
                self._save()
        self._read_pending()
        return self.stop(self.step)

    def _one_step(self) -> None:
        """Starts one step, then reads the metrics of the one before, so that the device never waits for the host."""
        batch = self.batches[self.step]
        self.state, metrics = self.train_step(self.state, put_batch(batch, self.settings.accumulation_steps))
        self._read_pending()
        self.step += 1
        self.pending = self.step, metrics, int(np.count_nonzero(batch["segment_ids"]))

    def _read_pending(self) -> None:
        if self.pending is None:
            return
        step, metrics, num_tokens = self.pending
        self.pending = None
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        record = step_record(step, metrics, num_tokens=num_tokens, seconds=now - self.clock)
        self.clock, self.loss = now, record["loss"]
        self.reporter.step(record)
        for name in ("loss", "grad_norm"):
            if not math.isfinite(record[name]):
                raise TrainingDiverged(
                    f"{name} is {record[name]} at step {step}; the newest checkpoint is of a step before"
                )
        if record["num_labels"] == 0 and not self.warned_of_no_labels:
            logger.warning("step %d has no label at all: nothing but the router losses was trained on", step)
            self.warned_of_no_labels = True
        for sentence in self.watch.check(record):
            logger.warning("%s", sentence)

    def _evaluate(self) -> None:
        if self.evaluated_at == self.step:
            return
        self._read_pending()
        started = time.perf_counter()
        # All processes have to leave the loop at one batch: with several, a signal does not cut an evaluation short.
        loss = evaluate(self.state.model, self.eval_batches, lambda: jax.process_count() == 1 and self.stop(self.step))
        if loss is not None:
            self.eval_loss, self.evaluated_at = loss, self.step
            self.reporter.evaluation({"step": self.step, "eval_loss": loss, "seconds": time.perf_counter() - started})
        self.clock = time.perf_counter()

    def _save(self) -> None:
        """Writes a checkpoint of this step unless there is one; a state that is not finite is never written."""
        self._read_pending()
        if self.saved_at != self.step:
            self.checkpointer.save(self.step, self.state, self.config.to_dict())
            self.saved_at = self.step
        self.clock = time.perf_counter()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- before the first step ----


def _check_devices(config: RunConfig) -> None:
    found, device = jax.default_backend(), config.train.device
    if config.export and jax.process_count() > 1:
        raise ConfigError(
            f"export is True, but {jax.process_count()} processes share the model, and an export needs it in one: set "
            "export to False, and export with load_model(output/checkpoints) and save_pretrained in one process"
        )
    if device != "auto" and found != device:
        raise ConfigError(f"train.device is {device!r}, but JAX found only {found!r} devices")
    if device == "auto" and found == "cpu" and not _cpu_is_asked_for():
        raise ConfigError("train.device is 'auto', but JAX found only CPU devices; set train.device to 'cpu' or --devices N "
                          "to run on the CPU")  # fmt: skip
    degrees = config.parallel.expert_parallel_degree, max(config.parallel.hybrid_shard_degree, 1)
    logger.info(
        "devices: expected a multiple of expert_parallel_degree x hybrid_shard_degree = %d x %d, found %d of kind %s in "
        "%d process(es), %d of them in this one",
        *degrees, jax.device_count(), found, jax.process_count(), jax.local_device_count(),
    )  # fmt: skip


def _cpu_is_asked_for() -> bool:
    """Whether JAX was told to use the CPU, by JAX_PLATFORMS or its setting, or by a number of simulated devices."""
    platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]  # JAX_PLATFORMS' value
    simulated = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return platforms.split(",")[0] == "cpu" or simulated


def _check_batch(config: RunConfig) -> None:
    devices, settings = mesh.state.world_size, config.train
    unit = devices * settings.accumulation_steps
    if settings.global_batch_size % unit:
        raise ConfigError(
            f"train.global_batch_size is {settings.global_batch_size}, but must be a multiple of devices x "
            f"accumulation_steps = {devices} x {settings.accumulation_steps} = {unit}"
        )


def _check_output(config: RunConfig) -> bool:
    """Whether the run resumes; refuses an output folder that holds something else."""
    folder = config.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output is {config.output!r}, which is not a folder")
    if not config.train.resume:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"output is {config.output!r}, which is not empty; set train.resume to continue the run "
                              "in it, or choose a new folder")  # fmt: skip
        return False
    if complete_steps(folder / CHECKPOINTS):
        return True
    logger.info("train.resume: no complete checkpoint in %r yet, starting at step 0", str(folder / CHECKPOINTS))
    return False


def _config_file(config: RunConfig) -> Path:
    path = Path(config.model.path)
    return path if path.suffix == ".json" else path / "config.json"


def _read_hf_config(config: RunConfig) -> dict[str, Any]:
    path = _config_file(config)
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"model.path: {str(path)!r} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.path: {str(path)!r} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"model.path: {str(path)!r} holds no JSON object")
    return raw


def _model_config(config: RunConfig, resumes: bool) -> ModelConfig:
    """What is trained, known before any weight is read."""
    from moe_jax.hf import model_config_of

    if resumes:
        return read_model_info(config.folder / CHECKPOINTS)[0]
    return model_config_of(_read_hf_config(config))


def _moe_layers(model_config: ModelConfig) -> list[int]:
    """The number of every MoE layer in the model."""
    return [number for number, layer in enumerate(model_config.layers) if layer.is_moe]


def _collapse_watch(config: RunConfig, model_config: ModelConfig) -> CollapseWatch:
    threshold, layers = config.train.collapse_threshold(model_config), _moe_layers(model_config)
    if layers and not threshold and config.train.collapse_load is None:
        logger.info("no layer is watched for collapse: with %d of %d experts per token no load can pass %g times an even "
                    "share", model_config.num_experts_per_tok, model_config.num_experts, SMALLEST_COLLAPSE)  # fmt: skip
    return CollapseWatch(threshold, config.train.collapse_steps, layers)


def _fresh_state(config: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    from moe_jax import hf

    folder, dtype, remat = Path(config.model.path), config.train.dtype, config.train.remat
    if config.model.init == "random":
        # The folder's tokenizer and other files go on into the export.
        described, files = hf.config_folder(folder) if folder.is_dir() else (_read_hf_config(config), {})
        model = hf.from_config(described, files, config.moe, dtype, remat)
    elif folder.is_dir():
        model = hf.transform(folder, config.moe, dtype, remat=remat)
    else:
        raise ConfigError(f"model.path is {config.model.path!r}, but model.init 'weights' needs a checkpoint folder")
    return TrainState(model, jax.jit(optimizer.init)(model), replicated(np.int32(0)))


def _resumed_state(config: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    step, steps = latest_step(config.folder / CHECKPOINTS), config.train.steps
    if step > steps:
        raise ConfigError(f"train.steps is {steps}, but the checkpoint in {config.output!r} is already of step {step}")
    model = _abstract_model(config)
    abstract = TrainState(model, jax.eval_shape(optimizer.init, model), jax.ShapeDtypeStruct((), jnp.int32))
    logger.info("resuming after step %d of %d", step, steps)
    return restore(config.folder / CHECKPOINTS, abstract, config.to_dict())


def _abstract_model(config: RunConfig) -> Any:
    """The checkpoint's model without arrays, under this run's MoE switches; refuses a run that describes another."""
    from moe_jax.hf import abstract_model, model_config_of

    checkpoints, settings = config.folder / CHECKPOINTS, config.train
    stored, _, _, source = read_model_info(checkpoints)
    if _config_file(config).is_file():
        wanted = model_config_of(_read_hf_config(config))
        check_same_model(stored, wanted, checkpoints)
    else:
        logger.warning("model.path %r is not there any more; the checkpoint's own description of the model is used",
                       config.model.path)  # fmt: skip
    return abstract_model(stored, config.moe, settings.dtype, source, remat=settings.remat)


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[Callable[[int], bool]]:
    """Gives a function that says, at a step, whether to stop there; the signal itself interrupts nothing.

    With several processes they all stop at one step, through JAX's own handling of the signal.
    """
    received = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        received.set()

    def stop(step: int) -> bool:
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return received.is_set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may have signal handlers
        yield stop
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- after the last step ----


def _draw(folder: Path, layers: list[int]) -> None:
    train_records, eval_records = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "eval.jsonl")
    if not train_records:
        return
    plot_loss(train_records, eval_records, folder / "loss.png")
    if layers:
        plot_expert_load(train_records, folder / "expert_load.png", layers)
        plot_load_over_time(train_records, folder / "load_over_time.png", layers)


def _export(model: Any, folder: Path) -> None:
    """Writes the Hugging Face folder, in the place of the one that an earlier end of this run wrote."""
    from moe_jax.hf import save_pretrained

    with replacing(folder) as unfinished:
        save_pretrained(model, unfinished)
    logger.info("exported to %s", folder)
