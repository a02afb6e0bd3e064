"""`python -m converters inspect|from-hf|to-hf|roundtrip|verify`: Hugging Face checkpoints in and out, on the CPU."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from converters import parse_size
from moe_jax.errors import ConfigError, require


def _initialise(args: argparse.Namespace) -> None:
    """A mesh of simulated CPU devices; conversion never touches an accelerator."""
    expert, fsdp = args.expert_parallel_degree, args.hybrid_shard_degree
    require(args.devices >= 0, "devices", args.devices, "0 (as many as the degrees need) or a positive integer")
    count = args.devices or max(expert, 1) * max(fsdp, 1)
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import moe_jax

    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"devices is {count}, but must be at most {len(devices)}, the devices that XLA_FLAGS allows")
    settings = {"expert_parallel_degree": expert, "hybrid_shard_degree": fsdp}
    moe_jax.init(settings, devices=devices[:count])


def _inspect(args: argparse.Namespace) -> int:
    from converters.report import print_report

    print_report(args.folder, carry_unknown=args.carry_unknown)
    return 0


def _from_hf(args: argparse.Namespace) -> int:
    import moe_jax
    from converters.io import check_target
    from moe_jax.checkpoint import save_model

    check_target(args.out)
    _initialise(args)
    save_model(args.out, moe_jax.transform(args.folder, carry_unknown=args.carry_unknown))
    print(f"wrote {args.out}")
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    import moe_jax
    from converters.io import check_target
    from moe_jax.checkpoint import load_model

    check_target(args.out)
    limit = parse_size(args.max_shard_size) if args.max_shard_size else None
    _initialise(args)
    moe_jax.save_pretrained(load_model(args.checkpoint), args.out, max_shard_size=limit)
    print(f"wrote {args.out}")
    return 0


def _roundtrip(args: argparse.Namespace) -> int:
    _initialise(args)
    from converters.parity import round_trip

    result = round_trip(args.folder, carry_unknown=args.carry_unknown)
    for sentence in result.differences:
        print(f"DIFFERENT: {sentence}")
    if result.left_out:
        print(f"left out on purpose: {len(result.left_out)} unused buffer(s), {', '.join(result.left_out)}")
    print(
        f"compared {result.num_tensors} tensors ({result.num_bytes:,} bytes) and {result.num_files} other files: "
        f"{len(result.differences)} difference(s)"
    )
    return int(bool(result.differences))


def _verify(args: argparse.Namespace) -> int:
    _initialise(args)
    from converters.parity import MAX_RELATIVE_NORM, NEAR_TIE, verify

    result = verify(args.folder, dtype=args.dtype, num_tokens=args.tokens, length=args.length, seed=args.seed,
                    carry_unknown=args.carry_unknown)  # fmt: skip
    print(f"logits of {result.num_tokens} tokens: relative norm of the difference {result.relative_norm:.3g}, "
          f"largest {result.max_abs:.3g}, same top-1 {result.top1:.2%}")  # fmt: skip
    gaps = (f"; it starts at {len(result.gaps)} of them, the others see one of those; largest router gap where it starts: "
            f"{result.largest_gap:.3g} deviations (near-tie: below {NEAR_TIE:g})")  # fmt: skip
    print(f"tokens whose set of experts differs in any layer: {result.num_differing}{gaps if result.gaps else ''}")
    ok = result.logits_match if args.dtype == "float32" else result.only_near_ties
    wanted = (f"the relative norm must be below {MAX_RELATIVE_NORM:g}" if args.dtype == "float32" else
              f"the experts may differ only where the router gap is below {NEAR_TIE:g}")  # fmt: skip
    print("match" if ok else f"NO MATCH: {wanted}")
    return int(not ok)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m converters", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    carry = argparse.ArgumentParser(add_help=False)
    carry.add_argument("--carry-unknown", action="store_true", help="keep tensors that the model does not use")
    mesh = argparse.ArgumentParser(add_help=False)
    mesh.add_argument("--expert-parallel-degree", type=int, default=1)
    mesh.add_argument("--hybrid-shard-degree", type=int, default=0)
    mesh.add_argument("--devices", type=int, default=0, help="simulated CPU devices (default: as the degrees need)")

    command = commands.add_parser("inspect", parents=[carry], help="print what a folder holds; loads no weights")
    command.add_argument("folder")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("from-hf", parents=[carry, mesh], help="Hugging Face folder -> moe_jax checkpoint")
    command.add_argument("folder")
    command.add_argument("out")
    command.set_defaults(run=_from_hf)

    command = commands.add_parser("to-hf", parents=[mesh], help="moe_jax checkpoint -> Hugging Face folder")
    command.add_argument("checkpoint")
    command.add_argument("out")
    command.add_argument("--max-shard-size", help='such as "5GB"; default: the shards of the source')
    command.set_defaults(run=_to_hf)

    command = commands.add_parser("roundtrip", parents=[carry, mesh], help="convert, export and compare every byte")
    command.add_argument("folder")
    command.set_defaults(run=_roundtrip)

    command = commands.add_parser("verify", parents=[carry, mesh], help="compare logits with transformers")
    command.add_argument("folder")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                         help="of both sides; bfloat16 passes where all tokens that go to other experts are near-ties")  # fmt: skip
    command.add_argument("--tokens", type=int, default=512)
    command.add_argument("--length", type=int, default=300, help="tokens per row")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=_verify)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 where a comparison fails, or 2 for input that cannot work."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("moe_jax").setLevel(logging.INFO)
    try:
        return args.run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder without permission
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
