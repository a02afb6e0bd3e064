"""The one exception type for input that a user can mend, so that commands can turn it into exit code 2."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting, file or argument that cannot work; the message names it, its value and what is allowed."""


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` naming the keys of `given` that are not in `known`, with the nearest known spelling."""
    known = sorted(known)
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(
        f"{what} has unknown key(s) {', '.join(map(repr, unknown))}{hint}; known keys: {', '.join(known)}"
    )


def require(ok: bool, field: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` "`field` is `value`, but must be `allowed`" unless `ok`."""
    if not ok:
        raise ConfigError(f"{field} is {value!r}, but must be {allowed}")
