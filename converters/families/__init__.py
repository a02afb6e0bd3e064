"""The supported families: each a translation of the Hugging Face config plus a choice of tensor names."""

from typing import Any

from converters.families import mixtral, olmoe, qwen3_moe
from converters.families.common import Family
from moe_jax.errors import ConfigError

FAMILIES: dict[str, Family] = {f.model_type: f for f in (mixtral.FAMILY, qwen3_moe.FAMILY, olmoe.FAMILY)}


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a parsed config.json."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type is {model_type!r}, but must be one of {', '.join(map(repr, FAMILIES))}")
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "Family", "family_of"]
