"""Pauses an engine, sends it to sleep and wakes it: what commands do to scheduler and device. Never imports jax."""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from jaxserve.control import PARTS, Command, Part, Pause, ResetPrefixCache, Resume, Sleep, WakeUp
from jaxserve.errors import EngineAsleep, EngineError, RequestError
from jaxserve.scheduler import Scheduler

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """What a Runner has on the device."""

    def free(self, *, keep_weights: bool) -> None:
        """Frees KV pages and weights; `keep_weights`: in host memory. Twice is the same as once."""
        ...

    def restore_kv_cache(self) -> None: ...

    def restore_weights(self, load: Callable[[], Any]) -> None:
        """From host memory, or if there are none, what `load` loads."""
        ...


class Controller:
    """The state of an engine beside its requests. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, memory: DeviceMemory, load_model: Callable[[], Any]):
        self._scheduler, self._memory, self._load_model = scheduler, memory, load_model
        self.paused = False
        self.sleep_level = 0  # 0: awake
        self._asleep: set[Part] = set()
        self._begun: list[Pause | Sleep] = []  # waits until nothing runs

    @property
    def busy(self) -> bool:
        """Whether a command has been begun and is not done."""
        return bool(self._begun)

    def check_awake(self) -> None:
        """Raises EngineAsleep while requests are refused."""
        if self.sleep_level or self._falls_asleep:
            raise EngineAsleep(f"the engine {'is asleep' if self.sleep_level else 'is falling asleep'}: POST /wake_up")

    def begin(self, command: Command) -> None:
        """Begins a command; advance() brings it to its end. Raises RequestError, EngineError if it cannot be."""
        match command:
            case Pause():
                if command.mode == "keep" and self._falls_asleep:
                    raise RequestError("mode may not be keep while the engine is falling asleep", param="mode")
                self.paused = True
                self._begun.append(command)
                self._stop(command.mode)
            case Sleep():
                self._begun.append(command)
                self._stop(command.mode)
            case Resume():
                self.paused = False
                self._begun = [each for each in self._begun if isinstance(each, Sleep)]
            case WakeUp():
                self._begun = [each for each in self._begun if isinstance(each, Pause)]
                self._wake_up(command)
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache()
        if not (self.paused or self.sleep_level or self._falls_asleep):
            self._scheduler.go_on()
        self.advance()

    def advance(self) -> None:
        """Does what waits for the running requests, if none is left. To be called after every step."""
        if not self._begun or self._scheduler.has_work:
            return
        for command in self._begun:
            if isinstance(command, Sleep):
                self._sleep(command.level)
            elif command.clear_cache:
                self._scheduler.reset_prefix_cache()
        self._begun = []

    @property
    def _falls_asleep(self) -> bool:
        return any(isinstance(each, Sleep) for each in self._begun)

    def _stop(self, mode: str) -> None:
        self._scheduler.hold(freeze=mode == "keep")
        if mode == "abort":
            for request_id in list(self._scheduler.requests):
                self._scheduler.cancel(request_id)

    def _sleep(self, level: int) -> None:
        started = time.monotonic()
        self._scheduler.reset_prefix_cache()
        self._memory.free(keep_weights=level == 1)
        self.sleep_level = max(level, self.sleep_level)
        self._asleep = set(PARTS)
        log.info("asleep at level %d, after %.1f s", self.sleep_level, time.monotonic() - started)

    def _wake_up(self, command: WakeUp) -> None:
        """Raises EngineError if the device has no room, or the checkpoint is gone: it then sleeps on."""
        started = time.monotonic()
        for part in PARTS:
            if part not in self._asleep or part not in command.tags:
                continue
            try:
                if part == "weights":
                    self._memory.restore_weights(self._load_model)
                else:
                    self._memory.restore_kv_cache()
            except Exception as error:  # of the device's runtime, or of the file system
                log.exception("%s cannot be brought back", part)
                raise EngineError(f"{part} cannot be brought back to the device: {error}") from error
            self._asleep.remove(part)
        if self.sleep_level and not self._asleep:
            self.sleep_level = 0
            log.info("awake after %.1f s", time.monotonic() - started)
