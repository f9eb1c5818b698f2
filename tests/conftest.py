"""Fixtures that tests of several folders use."""

import asyncio
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from aiohttp import web

ROOT = Path(__file__).parent.parent


def modules_with_shapes() -> list[str]:
    """Modules that annotate shapes."""
    paths = [path for path in (ROOT / "jaxserve").rglob("*.py") if "from jaxtyping import" in path.read_text()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


MOST_MAPPINGS = 30_000
# Kernels in JAX's GPU interpreter wait for each other in threads of XLA's, which has one for each core: on two cores they
# can wait for ever.
XLA_THREADS = 16

# In tests every call of these is checked, from their import on: which is why this stands here.
jaxtyping.install_import_hook(sorted(modules_with_shapes()), "beartype.beartype")


def pytest_sessionstart() -> None:
    """Starts JAX with so many threads, on a CPU alone; the processes that tests start have as many as ever."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" and "NPROC" not in os.environ:
        os.environ["NPROC"] = str(max(XLA_THREADS, os.cpu_count() or 1))
        import jax

        jax.devices()
        del os.environ["NPROC"]


@pytest.fixture(autouse=True)
def _programs_are_dropped() -> Iterator[None]:
    """Forgets what tests compiled, once it is much. A program takes memory mappings, of which Linux gives a process
    65,530 (vm.max_map_count); those of the whole suite were more, and XLA then ends in a segmentation fault.
    """
    yield
    jax, maps = sys.modules.get("jax"), Path("/proc/self/maps")
    if jax and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


# A topology of each TPU generation, as libtpu names it.
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def has_compilers() -> bool:
    """Whether scripts/test installs the compilers for other devices here: then CI may not leave their tests out."""
    here = (os.environ.get("JAX_PLATFORMS"), platform.system(), platform.machine())
    return here == ("cpu", "Linux", "x86_64") and bool(os.environ.get("CI"))


@pytest.fixture(scope="session")
def h200() -> Any:
    """An H200 to compile for, by XLA's own compiler, on this host. It times no kernels, and of those of Mosaic GPU it
    compiles the call alone.

    Skips where the compiler is missing: pip install '.[dev,cuda-compiler]' brings it.
    """
    versions = {name: installed_version(name) for name in ("jaxlib", "jax-cuda13-plugin")}
    if len(set(versions.values())) > 1 and not has_compilers():
        pytest.skip(f"the compiler for GPUs is not installed, or not that of this jaxlib: {versions}")
    from jax.experimental import topologies

    config = (ROOT / "tests" / "goldens" / "h200.txtpb").read_text()
    return topologies.get_topology_desc("h200", "cuda", target_config=config, topology="1x1x1").devices[0]


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture(scope="session")
def tpu_chips() -> Callable[[str], list[Any]]:
    """tpu_chips(generation): four devices of that kind (a key of TPUS) to compile for, by the real compiler, on this
    host.

    Skips where the compiler is missing: pip install '.[dev,tpu]' brings it. In CI it may not, if scripts/test has it.
    """
    if importlib.util.find_spec("libtpu") is None and not has_compilers():
        pytest.skip("libtpu is not installed: pip install '.[dev,tpu]'")
    import libtpu  # noqa: F401 - fails where it may not be skipped
    from jax.experimental import topologies

    from jaxserve.config import compile_only

    compile_only()

    def chips(generation: str) -> list[Any]:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=TPUS[generation]).devices)

    return chips


@pytest.fixture(scope="session")
def tpu_chip(tpu_chips: Callable[[str], list[Any]]) -> Callable[[str], Any]:
    """tpu_chip(generation): one of tpu_chips."""
    return lambda generation: tpu_chips(generation)[0]


@pytest.fixture(scope="session")
def compile_for_tpu(tpu_chip: Callable[[str], Any]) -> Callable[..., Any]:
    """compile(generation, function, *shapes, donated=()): compiled for one chip, see tpu_chip."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

    def compile(generation: str, function: Callable[..., Any], *shapes: Any, donated: tuple[int, ...] = ()) -> Any:
        chip = tpu_chip(generation)
        place = SingleDeviceSharding(chip)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
        kind = AbstractDevice(chip.device_kind, getattr(chip, "num_cores", 1), "tpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            return jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*shapes).compile()

    return compile


METRICS = """# TYPE jaxserve:num_requests_running gauge
jaxserve:num_requests_running{model_name="stand-in"} 2.0
# TYPE jaxserve:kv_cache_wasted_slots_ratio gauge
jaxserve:kv_cache_wasted_slots_ratio{model_name="stand-in"} 0.125
# TYPE jaxserve:prefix_cache_hits counter
jaxserve:prefix_cache_hits_total{model_name="stand-in"} %d.0
# TYPE other:thing counter
other:thing_total 5.0
"""


@dataclass
class StandIn:
    """A server that speaks the OpenAI API and answers with the words `w0 w1 ...`; what it was asked is in `bodies`."""

    url: str = ""
    word: str = "w"
    delay_s: float = 0.0  # before each word
    fail: Callable[[dict[str, Any]], int | None] = lambda body: None  # body -> HTTP status of a refusal
    refuse_models: tuple[int, Any] | None = None  # status and body of GET /v1/models
    break_after: int | None = None  # words after which an error event is sent
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    disconnects: int = 0
    scrapes: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        if self.refuse_models:
            status, body = self.refuse_models
            return web.json_response(body, status=status)
        return web.json_response({"object": "list", "data": [{"id": "stand-in", "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        return web.Response(text=METRICS % self.scrapes)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if status := self.fail(body):
            error = {"message": "refused by the stand-in", "type": "BadRequestError", "param": None, "code": status}
            return web.json_response({"error": error}, status=status)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnects += 1
            raise
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = "messages" in body
        words = body.get("max_tokens") or body.get("max_completion_tokens") or 3
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(data: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        if chat:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(words):
            if i == self.break_after:
                await send({"error": {"message": "broken by the stand-in", "type": "InternalServerError", "code": 500}})
                return response
            await asyncio.sleep(self.delay_s)
            text = f"{self.word}{i} "
            await send({"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]})
        await send({"choices": [{"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}]})
        await send({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": words}})
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A running StandIn, on a free port, in a thread of its own."""
    server, ready, loop = StandIn(), threading.Event(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.app(), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
