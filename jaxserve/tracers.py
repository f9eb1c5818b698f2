"""Processes that trace a deployment's programs side by side. Tracing is Python: under one GIL it takes a second each.

    engine                                         tracer, one of a few; JAX runs on its CPU alone
    start() ──── options, model, device ─────────► makes the same Programs, of shapes alone
    trace() ──── size of the pool, its share ────► traces one program after the other into the step cache
    wait() ◄──── one byte for each

The engine starts them on a first start alone, at best before it loads weights, and reads what they trace out of the
step cache. What a tracer does not do, because it died or its disk is full, the engine does itself.
A tracer ends when its stdin closes, so that none outlives the engine.
"""

import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import fields
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import jax
import msgspec
from jax.sharding import AbstractDevice

from jaxserve.config import EngineConfig, make_cache_dir, tracer_environment
from jaxserve.deployment import resolve_deployment
from jaxserve.errors import ConfigError
from jaxserve.models.loading import model_shapes
from jaxserve.programs import Key, Programs, kind_of
from jaxserve.sharding import devices, mesh_of

log = logging.getLogger(__name__)

MOST = 8
PROGRAMS_EACH = 4  # at least: it takes a tracer as long as two or three of them to come up
MAX_SILENCE_S = 60.0  # of a tracer: a program takes 1 to 2 s


def how_many(platform: str, num_programs: int) -> int:
    """Tracers that pay. Not on a CPU, whose few programs take longer to compile than to trace."""
    count = min(MOST, (os.cpu_count() or 1) // 2, num_programs // PROGRAMS_EACH)
    return count if platform != "cpu" and count > 1 else 0


class Tracers:
    """The engine's side; a context, at whose end there are none left."""

    def __init__(self, config: EngineConfig, hf: Mapping[str, Any], programs: Programs):
        self._programs = programs
        self._device = kind_of(programs.target)
        self._start = {
            "config": {f.name: getattr(config, f.name) for f in fields(EngineConfig)},
            "hf": hf,
            "device": [self._device.device_kind, self._device.num_cores, self._device.platform],
        }
        self._tracers: list[Popen[bytes]] = []
        self._shares: dict[Key, Popen[bytes]] = {}  # who traces what ...
        self._paths: dict[Key, Path] = {}  # ... to where

    def __enter__(self) -> "Tracers":
        return self

    def __exit__(self, *_: object) -> None:
        for tracer in self._tracers:
            tracer.kill()
            tracer.communicate()

    def start(self, num_programs: int) -> None:
        """Starts as many as pay for so many programs; none if there is no cache to trace into."""
        try:
            make_cache_dir("steps")
        except ConfigError:
            return  # which the engine says once, when it starts
        try:
            for _ in range(how_many(self._device.platform, num_programs)):
                tracer = Popen(
                    [sys.executable, "-m", "jaxserve.tracers"],
                    stdin=PIPE,
                    stdout=PIPE,
                    env=tracer_environment(),
                    process_group=0,  # Ctrl-C in a terminal is for the engine
                )
                self._tracers.append(tracer)
        except OSError as error:
            log.warning("%d processes to trace programs, and no more: %s", len(self._tracers), error)
        for tracer in self._tracers:
            self._tell(tracer, self._start)

    def trace(self, num_pages: int, max_model_len: int) -> None:
        """Has them trace the programs that the step cache lacks. Starts them if that has not been done."""
        keys, sizes = self._programs.keys, (num_pages, max_model_len)
        if not how_many(self._device.platform, len(keys)):
            return
        if not self._tracers and self._programs.path(keys[-1], *sizes).exists():
            return  # the last one: so an earlier start has traced them all
        paths = {key: self._programs.path(key, *sizes) for key in keys}
        missing = [key for key, path in paths.items() if not path.exists()]
        if not self._tracers:
            self.start(len(missing))
        for i, tracer in enumerate(self._tracers):
            share = missing[i :: len(self._tracers)]
            self._shares |= dict.fromkeys(share, tracer)
            self._tell(tracer, {"sizes": sizes, "keys": [keys.index(key) for key in share]})
        self._paths = paths
        if self._tracers:
            log.info("%d processes trace %d programs", len(self._tracers), len(missing))

    def wait(self, key: Key) -> None:
        """Returns when a program is traced, or none of them is going to. To be called for all, in order."""
        tracer = self._shares.get(key)
        if tracer is None:
            return
        assert tracer.stdout is not None
        if not wait_for([tracer.stdout.fileno()], MAX_SILENCE_S):
            why = f"has said nothing for {MAX_SILENCE_S:.0f} s"
        elif not os.read(tracer.stdout.fileno(), 1):
            why = "has ended"
        elif not self._paths[key].exists():
            why = "traces others than these"
        else:
            return
        log.warning("process %d, which traces programs, %s: what it has left is traced here", tracer.pid, why)
        self._shares = {key: other for key, other in self._shares.items() if other is not tracer}
        tracer.kill()

    @staticmethod
    def _tell(tracer: Popen[bytes], message: dict[str, Any]) -> None:
        assert tracer.stdin is not None
        try:
            tracer.stdin.write(msgspec.json.encode(message) + b"\n")
            tracer.stdin.flush()
        except OSError:
            log.debug("process %d takes no message", tracer.pid)  # wait() sees that it has ended


def _end_with_engine(stdin: int) -> None:
    while os.read(stdin, 4096):
        pass
    os._exit(0)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints: it is no answer
    start = msgspec.json.decode(sys.stdin.buffer.readline())
    target, config = AbstractDevice(*start["device"]), EngineConfig(**start["config"])
    jax.config.update("jax_num_cpu_devices", config.tensor_parallel_size)  # in place of those
    deployment = resolve_deployment(config, start["hf"], target.platform, target.device_kind)
    mesh = mesh_of(devices(config.tensor_parallel_size))
    shapes = model_shapes(deployment.model, deployment.dtype, mesh)
    programs = Programs(shapes, deployment, mesh, target)
    line = sys.stdin.buffer.readline()
    if not line:  # nothing was missing, or the engine is gone
        return
    threading.Thread(target=_end_with_engine, args=(sys.stdin.fileno(),), daemon=True).start()
    work = msgspec.json.decode(line)
    for key in (programs.keys[number] for number in work["keys"]):
        programs.trace(key, *work["sizes"])
        if not programs.path(key, *work["sizes"]).exists():
            sys.exit("a program cannot be kept")  # the step cache has said why
        os.write(answers, b".")


if __name__ == "__main__":
    main()
