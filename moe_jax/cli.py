"""The command `moe-jax`: parses, sets the devices, and calls.

Exit codes: 0 done; 1 the training diverged, or the doctor found a fault; 2 a setting, file or argument that cannot work (one
line on stderr says which); 143 stopped by SIGTERM after writing a checkpoint.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.errors import ConfigError
from moe_jax.run_config import RunConfig

TRAIN_USAGE = "moe-jax train RUN.yaml [--devices N | --distributed] [--section.field value ...]"
DOCTOR_USAGE = "moe-jax doctor [--model MODEL] [--tokens N] [--dtype bfloat16]"
TUNE_USAGE = (
    "moe-jax tune {--model MODEL ... [--tokens N] | --rows M --experts E --hidden H --width I} "
    "[--legs LEG ...] [--out tiles.json]"
)
USAGE = f"""usage: {TRAIN_USAGE}
       {DOCTOR_USAGE}
       {TUNE_USAGE}

  train   run the training that RUN.yaml describes; `moe-jax train --help` lists every field
  doctor  what the experts' products run as on this machine, and whether that works
  tune    measure tiles of the Hopper GPU kernels for the shapes of a model, into a table for MOE_JAX_TILES

MODEL: a checkpoint folder, a config.json, or a well-known model such as Qwen3-30B-A3B
"""


# How a scheduler says of how many processes this one is: Slurm's steps, Open MPI.
PROCESS_COUNT_VARIABLES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

logger = logging.getLogger("moe_jax")


class ParsedRun(NamedTuple):
    """A parsed command line: the run, how many devices to simulate (0 for none), whether to join other processes."""

    config: RunConfig
    devices: int
    distributed: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        commands = {"train": _train, "doctor": _doctor, "tune": _tune}
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        if arguments and arguments[0] in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        raise ConfigError(
            f"unknown command {arguments[0]!r}; there are {', '.join(commands)}"
            if arguments
            else "no command; try --help"
        )
    except ConfigError as error:
        print(f"moe-jax: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder without permission
        print(f"moe-jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _train(arguments: list[str]) -> int:
    config, devices, distributed = parse_run(arguments)
    if devices:
        simulate_devices(devices)
    _set_up_logging()
    if distributed:
        join_processes()
    else:
        warn_if_alone()
    from moe_jax.train import PREEMPTED_EXIT_CODE, TrainingDiverged, train

    try:
        result = train(config)
    except TrainingDiverged as error:
        print(f"moe-jax: {error}", file=sys.stderr)
        return 1
    return PREEMPTED_EXIT_CODE if result.preempted else 0


def parse_run(arguments: Sequence[str]) -> ParsedRun:
    """Returns what `RUN.yaml [--devices N | --distributed] [--section.field value ...]` says."""
    from argparse import ArgumentError

    parser = _parser()
    arguments = list(arguments)
    if not any(argument in ("-h", "--help") for argument in arguments):
        if not arguments or arguments[0].startswith("-"):
            raise ConfigError("train needs the file of the run as its first argument: moe-jax train RUN.yaml")
        arguments.insert(0, "--config")
    try:
        namespace = parser.instantiate(parser.parse_args(arguments))
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    fields: dict[str, Any] = {name: namespace[name] for name in RunConfig.__dataclass_fields__}
    if namespace["devices"] and namespace["distributed"]:
        raise ConfigError(f"--devices is {namespace['devices']}, but must be absent beside --distributed")
    return ParsedRun(RunConfig(**fields), namespace["devices"], namespace["distributed"])


def _doctor(arguments: list[str]) -> int:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(prog="moe-jax doctor", exit_on_error=False, usage=DOCTOR_USAGE)
    _add_model(parser, action="store")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = _parse(parser, arguments)
    from moe_jax.doctor import DEFAULT_MODELS, examine, find_model, report_lines

    models = [options.model] if options.model else DEFAULT_MODELS
    report = examine(dict(find_model(m, options.tokens) for m in models), options.dtype)
    print("\n".join(report_lines(report)))
    return 1 if report.faults else 0


def _tune(arguments: list[str]) -> int:
    import jsonargparse

    from moe_jax.kernels.choice import LEGS, TILES_VARIABLE

    parser = jsonargparse.ArgumentParser(prog="moe-jax tune", exit_on_error=False, usage=TUNE_USAGE)
    _add_model(parser, action="append")
    sizes = ("rows", "experts", "hidden", "width")
    for name in sizes:
        parser.add_argument(f"--{name}", type=jsonargparse.typing.PositiveInt)
    parser.add_argument("--legs", nargs="+", choices=LEGS, default=list(LEGS))
    parser.add_argument("--out", default="tiles.json", help="the table that entries are added to")
    options = _parse(parser, arguments)
    given = [getattr(options, name) for name in sizes]
    if not options.model and None in given:
        raise ConfigError("tune needs --model, or all of --rows, --experts, --hidden and --width")
    if options.model and any(given):
        raise ConfigError("--rows, --experts, --hidden and --width cannot stand beside --model")
    if options.tokens and not options.model:
        raise ConfigError("--tokens needs --model; --rows says it all")
    from moe_jax.doctor import find_model
    from moe_jax.kernels.tuning import MoEShape, tune

    models = dict(find_model(m, options.tokens) for m in options.model or ())
    tune(models or {"model": MoEShape(given[0], 1, *given[1:])}, Path(options.out), options.legs)
    print(f"use them with {TILES_VARIABLE}={Path(options.out).resolve()}")
    return 0


def _add_model(parser: Any, action: str) -> None:
    import jsonargparse

    parser.add_argument("--model", action=action, default=None,
                        help="a checkpoint folder, a config.json or the name of a well-known model")  # fmt: skip
    parser.add_argument("--tokens", type=jsonargparse.typing.NonNegativeInt, default=0,
                        help="of a device in a step; 0 takes a usual number")  # fmt: skip


def _parse(parser: Any, arguments: list[str]) -> Any:
    from argparse import ArgumentError

    try:
        return parser.parse_args(arguments)
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from None


def _parser() -> Any:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog="moe-jax train",
        exit_on_error=False,
        usage=TRAIN_USAGE,
    )
    parser.add_argument("--config", action="config", help="the same as RUN.yaml")
    parser.add_argument("--devices", type=jsonargparse.typing.NonNegativeInt, default=0,
                        help="run on that many simulated CPU devices")  # fmt: skip
    parser.add_argument("--distributed", action="store_true",
                        help="join the processes that the scheduler started (Slurm, Open MPI, a TPU pod)")  # fmt: skip
    parser.add_class_arguments(RunConfig)
    return parser


def simulate_devices(number: int) -> None:
    """Makes JAX see that many CPU devices and nothing else; only before it has looked for devices."""
    import jax

    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"--xla_force_host_platform_device_count={number}"])
    jax.config.update("jax_platforms", "cpu")


def _processes_by_environment() -> tuple[str, int]:
    """The first scheduler variable that counts more than one process, and its count; ("", 1) without one."""
    for name in PROCESS_COUNT_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 1:
            return name, int(value)
    return "", 1


def warn_if_alone() -> None:
    """Logs a warning where a scheduler's variables speak of several processes, and this one runs by itself."""
    name, count = _processes_by_environment()
    if name:
        logger.warning("%s is %d, but this process trains alone: pass --distributed to join the others", name, count)


def join_processes() -> None:
    """Makes this process one of those that the scheduler started; before JAX has looked for devices."""
    import jax

    name, expected = _processes_by_environment()
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--distributed: JAX could not join the other processes: {' '.join(str(error).split())}"
        ) from None
    found = jax.process_count()
    logger.info("processes: expected %s, found %d with %d device(s) in all, %d here",
                f"{expected} ({name})" if name else "what JAX detects", found, jax.device_count(),
                jax.local_device_count())  # fmt: skip
    if name and found != expected:
        logger.warning("%s is %d, but %d process(es) joined", name, expected, found)


def _set_up_logging() -> None:
    """Log lines go through the console that the progress bar draws on; other libraries' only from warnings up."""
    from rich.logging import RichHandler

    from moe_jax.metrics import console

    handler = RichHandler(console=console(), show_path=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("moe_jax").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
