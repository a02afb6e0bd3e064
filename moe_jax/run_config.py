"""One training run as frozen dataclasses (`RunConfig`), which a YAML file or Python code fills in. Imports no JAX."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from moe_jax.config import REMAT_POLICIES, ModelConfig, MoEConfig, ParallelConfig
from moe_jax.errors import require

INITS = ("weights", "random")
# No float16: its gradients need a loss scale, which is not built. A float16 checkpoint trains in bfloat16.
DTYPES = ("bfloat16", "float32")
DEVICES = ("auto", "gpu", "cpu")
SMALLEST_COLLAPSE = 2.0  # times an even share: what the default of train.collapse_load calls a collapse at the least


def _check_int(owner: object, section: str, name: str, lowest: int) -> None:
    value = getattr(owner, name)
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
    require(ok, f"{section}.{name}", value, f"an integer >= {lowest}")


def _check_number(owner: object, section: str, name: str, low: float, high: float, allowed: str) -> None:
    value = getattr(owner, name)
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    require(ok, f"{section}.{name}", value, allowed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model is trained.

    path: a Hugging Face checkpoint folder, or a folder (or a .json file) with just a config.
    init: "weights" reads the folder's safetensors, "random" makes new parameters from its config.
    """

    path: str
    init: Literal["weights", "random"] = "weights"

    def __post_init__(self) -> None:
        require(self.init in INITS, "model.init", self.init, f"one of {', '.join(map(repr, INITS))}")
        require(bool(self.path), "model.path", self.path, "a folder or a config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text and how it becomes rows of tokens.

    files: text files in UTF-8 (or just one), taken in this order; none means the embedded corpus (Python's own documentation).
    document_separator: cuts every file into documents; "" makes a file one document.
    tokenizer: "bytes" (ids 0..255), a folder that holds tokenizer.json, or that file itself.
    eos_id: the id that ends a document; None takes the tokenizer's own, for bytes 256.
    eval_fraction: part of the rows, cut off the end, that is kept for evaluation and never trained on.
    shuffle_seed: seed of the order of the training rows, which is new in every epoch.
    """

    files: tuple[str, ...] | str = ()
    document_separator: str = ""
    tokenizer: str = "bytes"
    eos_id: int | None = None
    eval_fraction: float = 0.05
    shuffle_seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", (self.files,) if isinstance(self.files, str) else tuple(self.files))
        require(bool(self.tokenizer), "data.tokenizer", self.tokenizer, '"bytes" or a folder with tokenizer.json')
        if self.eos_id is not None:
            _check_int(self, "data", "eos_id", 0)
        _check_number(self, "data", "eval_fraction", 0.0, 0.5, "a number from 0 to 0.5")
        _check_int(self, "data", "shuffle_seed", 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay.

    learning_rate: the peak, reached after `warmup_steps` steps.
    min_ratio: the last step's learning rate as a part of the peak.
    weight_decay: decoupled, times the learning rate; norm weights and biases are not decayed (`optim.is_decayed`).
    clip_norm: the gradient's global norm is cut down to this; 0 does not clip.
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 0
    min_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _check_number(self, "optimizer", "learning_rate", 0.0, 1e6, "a number >= 0")
        _check_int(self, "optimizer", "warmup_steps", 0)
        _check_number(self, "optimizer", "min_ratio", 0.0, 1.0, "a number from 0 to 1")
        for name in ("beta1", "beta2"):
            _check_number(self, "optimizer", name, 0.0, 1.0, "a number from 0 to below 1")
            require(getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "a number from 0 to below 1")
        require(self.eps > 0, "optimizer.eps", self.eps, "a positive number")
        _check_number(self, "optimizer", "weight_decay", 0.0, 1e6, "a number >= 0")
        _check_number(self, "optimizer", "clip_norm", 0.0, 1e30, "a number >= 0 (0 does not clip)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Length, batch and housekeeping of a run.

    global_batch_size: rows a step, over all devices and micro-batches.
    accumulation_steps: micro-batches a step; their gradients are averaged by counted tokens.
    dtype: compute dtype; parameters, gradients and optimizer state are float32 always.
    remat: what the backward pass recomputes: "full" each layer, "dispatched" all of it but the token exchange, "none".
    checkpoint_every, eval_every: in steps, 0 for never (the last step always writes a checkpoint, and always evaluates
        when there is evaluation data and eval_every is not 0).
    eval_batches: evaluation batches each time; 0 takes the whole evaluation part.
    log_every: a log line every so many steps where no progress bar can be drawn; 0 for none.
    tensorboard: also write event files, for TensorBoard.
    collapse_load: a layer whose fullest expert takes more than this many times an even share of the tokens, for
        `collapse_steps` steps in a row, is warned of. No load is above num_experts / num_experts_per_tok; None takes
        half of that, at least 2, and is no watch where no load can be above 2. 0 is no watch.
    device: "gpu" and "cpu" refuse to start on anything else; "auto" takes what JAX finds, and the CPU only if asked for
        it (by simulated devices or JAX_PLATFORMS=cpu).
    resume: continue from the newest checkpoint under the output folder, when there is one.
    """

    steps: int = 100
    global_batch_size: int = 8
    seq_len: int = 512
    accumulation_steps: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Literal["full", "dispatched", "none"] = "full"
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    eval_every: int = 0
    eval_batches: int = 0
    log_every: int = 10
    tensorboard: bool = False
    collapse_load: float | None = None
    collapse_steps: int = 20
    device: Literal["auto", "gpu", "cpu"] = "auto"
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "accumulation_steps", "keep_checkpoints", "collapse_steps"):
            _check_int(self, "train", name, 1)
        _check_int(self, "train", "seq_len", 2)
        for name in ("checkpoint_every", "eval_every", "eval_batches", "log_every"):
            _check_int(self, "train", name, 0)
        require(self.dtype in DTYPES, "train.dtype", self.dtype, f"one of {', '.join(map(repr, DTYPES))}")
        require(self.remat in REMAT_POLICIES, "train.remat", self.remat,
                f"one of {', '.join(map(repr, REMAT_POLICIES))}")  # fmt: skip
        require(self.device in DEVICES, "train.device", self.device, f"one of {', '.join(map(repr, DEVICES))}")
        if self.collapse_load is not None:
            allowed = "a number above 1, 0 (no watch) or null (half of the largest possible load)"
            _check_number(self, "train", "collapse_load", 0.0, 1e6, allowed)
            above_even = self.collapse_load == 0 or self.collapse_load > 1
            require(above_even, "train.collapse_load", self.collapse_load, allowed)

    def collapse_threshold(self, model: ModelConfig) -> float:
        """Returns what `collapse_load` means for this model, 0 for no watch; refuses one that no layer can pass."""
        largest = model.num_experts / model.num_experts_per_tok
        if self.collapse_load is None:
            return max(largest / 2, SMALLEST_COLLAPSE) if model.num_moe_layers and largest > SMALLEST_COLLAPSE else 0.0
        allowed = f"0, null or below num_experts / num_experts_per_tok = {largest:g}, the largest load there can be"
        if not model.num_moe_layers:
            allowed = "0 or null: the model has no MoE layer"
        reachable = self.collapse_load < largest and model.num_moe_layers > 0
        require(self.collapse_load == 0 or reachable, "train.collapse_load", self.collapse_load, allowed)
        return float(self.collapse_load)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything one run needs.

    output: folder for metrics.jsonl, eval.jsonl, the plots, checkpoints/ and hf/; new or empty unless train.resume.
    export: write the trained model as a Hugging Face folder (output/hf) at the end.
    """

    model: ModelSettings
    output: str
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    export: bool = True

    def __post_init__(self) -> None:
        require(bool(self.output), "output", self.output, "a folder")
        require(not self.moe.benchmark_only_uniform_routing, "moe.benchmark_only_uniform_routing", True,
                "False in a training run: it ignores what the router says")  # fmt: skip
        optimizer, train, data = self.optimizer, self.train, self.data
        require(optimizer.warmup_steps <= train.steps, "optimizer.warmup_steps", optimizer.warmup_steps,
                f"at most train.steps ({train.steps})")  # fmt: skip
        size, accumulation = train.global_batch_size, train.accumulation_steps
        require(size % accumulation == 0, "train.global_batch_size", size,
                f"a multiple of train.accumulation_steps ({accumulation})")  # fmt: skip
        if train.eval_every:
            require(data.eval_fraction > 0, "data.eval_fraction", data.eval_fraction, "above 0 when eval_every is set")

    @property
    def folder(self) -> Path:
        return Path(self.output)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as nested dicts and lists, as JSON and YAML hold them."""
        return _plain(dataclasses.asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
