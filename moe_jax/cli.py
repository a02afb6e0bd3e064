"""The command `moe-jax`: parses, sets the devices, and calls.

Exit codes: 0 done; 1 the training diverged; 2 a setting, file or argument that cannot work (one line on stderr says
which); 143 stopped by SIGTERM after writing a checkpoint.
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from moe_jax.errors import ConfigError
from moe_jax.run_config import RunConfig

USAGE = """usage: moe-jax train RUN.yaml [--devices N] [--section.field value ...]

  train   run the training that RUN.yaml describes; `moe-jax train --help` lists every field
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["train"]:
            return _train(arguments[1:])
        if arguments and arguments[0] in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        raise ConfigError(
            f"unknown command {arguments[0]!r}; the only one is 'train'" if arguments else "no command; try --help"
        )
    except ConfigError as error:
        print(f"moe-jax: {error}", file=sys.stderr)
        return 2


def _train(arguments: list[str]) -> int:
    config, devices = parse_run(arguments)
    if devices:
        simulate_devices(devices)
    _set_up_logging()
    from moe_jax.train import PREEMPTED_EXIT_CODE, TrainingDiverged, train

    try:
        result = train(config)
    except TrainingDiverged as error:
        print(f"moe-jax: {error}", file=sys.stderr)
        return 1
    return PREEMPTED_EXIT_CODE if result.preempted else 0


def parse_run(arguments: Sequence[str]) -> tuple[RunConfig, int]:
    """Returns the run that `RUN.yaml [--section.field value ...]` describes, and how many devices to simulate, or 0."""
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
    return RunConfig(**fields), namespace["devices"]


def _parser() -> Any:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog="moe-jax train",
        exit_on_error=False,
        usage="moe-jax train RUN.yaml [--devices N] [--section.field value ...]",
    )
    parser.add_argument("--config", action="config", help="the same as RUN.yaml")
    parser.add_argument("--devices", type=jsonargparse.typing.NonNegativeInt, default=0,
                        help="run on that many simulated CPU devices")  # fmt: skip
    parser.add_class_arguments(RunConfig)
    return parser


def simulate_devices(number: int) -> None:
    """Makes JAX see that many CPU devices and nothing else; only before it has looked for devices."""
    import jax

    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"--xla_force_host_platform_device_count={number}"])
    jax.config.update("jax_platforms", "cpu")


def _set_up_logging() -> None:
    """Log lines go through the console that the progress bar draws on; other libraries' only from warnings up."""
    from rich.logging import RichHandler

    from moe_jax.metrics import console

    handler = RichHandler(console=console(), show_path=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("moe_jax").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
