"""Rotary settings out of a Hugging Face config, in the nested spelling of transformers 5 and the older one."""

from typing import Any

from converters.families.common import is_number
from moe_jax.config import ROPE_TYPES, RopeConfig
from moe_jax.errors import ConfigError, refuse_unknown, require

# "finetuned" only records how a checkpoint was made.
_KEYS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
         "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor",
         "partial_rotary_factor", "finetuned")  # fmt: skip


def _nested(hf: dict[str, Any], key: str) -> dict[str, Any]:
    """The dict under `key` without its null values, with the old key "type" renamed; empty where absent or null."""
    value = hf.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}, but must be an object or null")
    refuse_unknown(key, value, _KEYS)
    nested = {k: v for k, v in value.items() if v is not None}
    old = nested.pop("type", None)
    return {"rope_type": old, **nested} if old is not None else nested


def rope_config(hf: dict[str, Any], *, default_theta: float, max_positions: int) -> RopeConfig:
    """The rotary settings of a config; a `rope_theta` inside the nested settings wins over the one at the top.

    `rope_scaling` beside `rope_parameters` must mean the same: transformers 5 itself lets the older one win.
    """
    new, old = _nested(hf, "rope_parameters"), _nested(hf, "rope_scaling")
    rope, other = (_resolve(hf, settings, default_theta, max_positions) for settings in (new or old, old or new))
    if rope != other:
        raise ConfigError(f"rope_scaling {old!r} contradicts rope_parameters {new!r}; keep one of the two")
    return rope


def _resolve(hf: dict[str, Any], settings: dict[str, Any], default_theta: float, max_positions: int) -> RopeConfig:
    """The rotary settings of one nested object, completed from the top of the config."""
    kind = settings.get("rope_type", "default")
    require(kind in ROPE_TYPES, "rope_type", kind, f"one of {', '.join(map(repr, ROPE_TYPES))}")
    partial = settings.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    require(partial in (None, 1), "partial_rotary_factor", partial, "1 or absent (partial rotation is not supported)")
    top = hf.get("rope_theta")
    theta = settings.get("rope_theta", default_theta if top is None else top)
    require(is_number(theta) and theta > 0, "rope_theta", theta, "a positive number")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    original = _original_positions(hf, settings, kind, max_positions)
    fields: dict[str, Any] = {"factor": _factor(settings, kind, original, max_positions)}
    if kind == "yarn":
        fields |= _yarn(settings)
    if kind == "llama3":
        fields |= {key: _number(_required(settings, kind, key), key) for key in ("low_freq_factor", "high_freq_factor")}
    return RopeConfig(rope_type=kind, theta=float(theta), original_max_positions=original, **fields)


def _required(settings: dict[str, Any], kind: str, key: str) -> Any:
    if key not in settings:
        raise ConfigError(f"{key} is missing, but rope_type {kind!r} needs it")
    return settings[key]


def _number(value: Any, key: str) -> float:
    require(is_number(value), key, value, "a number")
    return float(value)


def _original_positions(hf: dict[str, Any], settings: dict[str, Any], kind: str, max_positions: int) -> int:
    """The length the scaling refers to; a value at the top of the config wins, as in transformers."""
    if kind == "linear":
        return 0
    if kind == "dynamic":
        return max_positions
    top = hf.get("original_max_position_embeddings")
    value = settings.get("original_max_position_embeddings", max_positions) if top is None else top
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(valid, "original_max_position_embeddings", value, "a positive integer")
    return value


def _factor(settings: dict[str, Any], kind: str, original: int, max_positions: int) -> float:
    if kind == "yarn" and "factor" not in settings:
        return max_positions / original
    return _number(_required(settings, kind, "factor"), "factor")


def _yarn(settings: dict[str, Any]) -> dict[str, Any]:
    """The optional settings of yarn; 0 counts as absent for betas and mscales, as in transformers."""
    factor = settings.get("attention_factor")
    require(factor is None or (is_number(factor) and factor > 0), "attention_factor", factor, "a positive number")
    truncate = settings.get("truncate", True)
    require(isinstance(truncate, bool), "truncate", truncate, "true or false")
    defaults = {"beta_fast": 32, "beta_slow": 1, "mscale": 0, "mscale_all_dim": 0}
    numbers = {key: _number(settings.get(key) or default, key) for key, default in defaults.items()}
    return {"attention_factor": float(factor or 0.0), "truncate": truncate, **numbers}
