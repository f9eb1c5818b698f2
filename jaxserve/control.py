"""Commands to the engine as a whole: plain data that crosses the socket as it is. Never imports jax.

    running ──Pause──► paused ──Resume──► running        new requests wait in the queue
    awake   ──Sleep──► asleep ──WakeUp──► awake          new requests are refused (503)

Both may hold at once. A command is done when nothing runs any more that its `mode` lets finish.
"""

import reprlib
from typing import Literal, get_args

from msgspec import Struct

from jaxserve.errors import RequestError

Part = Literal["weights", "kv_cache"]  # of what sleep takes from the device
PARTS: tuple[Part, ...] = get_args(Part)
SLEEP_LEVELS = (1, 2)


class Pause(Struct, tag=True, frozen=True):
    """Starts no new request until Resume.

    mode         of those accepted before: "abort" ends them, "wait" lets them finish, "keep" freezes them as they are
    clear_cache  then forget the prefix cache
    """

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, ("abort", "wait", "keep"))


class Resume(Struct, tag=True, frozen=True):
    """Ends a pause."""


class Sleep(Struct, tag=True, frozen=True):
    """Frees the KV pages and the weights on the device, and forgets the prefix cache.

    level  1: weights go to host memory; 2: they are dropped, and WakeUp loads them from the checkpoint again
    mode   of accepted requests: "abort" ends them, "wait" lets them finish
    """

    level: int = 1
    mode: Literal["abort", "wait"] = "abort"

    def __post_init__(self) -> None:
        _check_choice("level", self.level, SLEEP_LEVELS)
        _check_choice("mode", self.mode, ("abort", "wait"))


class WakeUp(Struct, tag=True, frozen=True):
    """Brings `tags` back to the device; the engine is awake once all are there."""

    tags: tuple[Part, ...] = PARTS

    def __post_init__(self) -> None:
        for tag in self.tags:
            _check_choice("tags", tag, PARTS)


class ResetPrefixCache(Struct, tag=True, frozen=True):
    """Forgets all cached pages; sequences that run keep theirs."""


Command = Pause | Resume | Sleep | WakeUp | ResetPrefixCache


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices or isinstance(value, bool):
        raise RequestError(f"{name} must be {' or '.join(map(str, choices))}, got {reprlib.repr(value)}", param=name)
