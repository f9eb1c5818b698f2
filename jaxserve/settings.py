"""Values of a model's files (config.json, generation_config.json, GGUF metadata), checked where they are read.

A value that cannot be meant is a ConfigError naming file, key and value, and not a failure somewhere later.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.request import short

CONFIG = "config.json of the model"
INT32_MAX = 2**31 - 1


def need(values: Mapping[str, Any], key: str, file: str = CONFIG) -> Any:
    """A value that must be there."""
    if values.get(key) is None:
        raise ConfigError(f"{file} has no {key!r}")
    return values[key]


def whole(
    values: Mapping[str, Any], key: str, default: int | None = None, *, ge: int = 1, le: int = INT32_MAX,
    file: str = CONFIG,
) -> int:  # fmt: skip
    """A whole number from `ge` to `le`. Null and absent are `default`; without one the key must be there."""
    value = default if values.get(key) is None else values[key]
    if value is None:
        return need(values, key, file)
    if not isinstance(value, int) or isinstance(value, bool) or not ge <= value <= le:
        raise ConfigError(f"{file}: {key} must be a whole number from {ge} to {le}, got {short(value)}")
    return value


def real(
    values: Mapping[str, Any], key: str, default: float | None = None, *, ge: float | None = None, gt: float = 0.0,
    file: str = CONFIG,
) -> float:  # fmt: skip
    """A finite number, greater than `gt`, or at least `ge` if that is given; otherwise like `whole`."""
    value = default if values.get(key) is None else values[key]
    if value is None:
        return need(values, key, file)
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # of NaN: false
    if not (finite and (value > gt if ge is None else value >= ge)):
        limit = f"greater than {gt:g}" if ge is None else f"at least {ge:g}"
        raise ConfigError(f"{file}: {key} must be a number {limit}, got {short(value)}")
    return float(value)


def flag(values: Mapping[str, Any], key: str, default: bool = False, *, file: str = CONFIG) -> bool:
    """true or false; null and absent are `default`."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, bool):
        raise ConfigError(f"{file}: {key} must be true or false, got {short(value)}")
    return value


def mapping(values: Mapping[str, Any], key: str, *, file: str = CONFIG) -> dict[str, Any]:
    """An object; null and absent are an empty one."""
    value = {} if values.get(key) is None else values[key]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: {key} must be an object, got {short(value)}")
    return dict(value)


def names(values: Mapping[str, Any], key: str, *, file: str = CONFIG) -> list[str]:
    """A list of texts; null and absent are an empty one."""
    value = [] if values.get(key) is None else values[key]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{file}: {key} must be a list of texts, got {short(value)}")
    return value


def token_ids(values: Mapping[str, Any], key: str, *, file: str = CONFIG) -> list[int]:
    """A token id or a list of them; null and absent are none."""
    value = values.get(key)
    given = [] if value is None else value if isinstance(value, list) else [value]
    for each in given:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each <= INT32_MAX:
            raise ConfigError(f"{file}: {key} must be a token id or a list of them, got {short(value)}")
    return given
