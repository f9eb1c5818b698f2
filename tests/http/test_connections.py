"""What comes over the wire, byte by byte: nonsense, floods, bodies that stall, lie about their size or blow up.

Whatever it is: one answer in the error shape if HTTP allows one, no traceback in the log, and the next client is served.
"""

import asyncio
import gzip
import http.client
import json
import logging
import resource
import zlib
from dataclasses import dataclass

import pytest
from aiohttp import http_parser
from aiohttp.http_exceptions import ContentEncodingError

import jaxserve.http.app as http_app
import jaxserve.http.state as http_state

TEXT = "/v1/completions"
BODY = b'{"prompt":"hi","max_tokens":2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    return POST + b"".join(header + b"\r\n" for header in headers) + LENGTH % len(body) + b"\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"


def bomb(size: int) -> bytes:
    """gzip of so many spaces, made without holding them."""
    packer, pieces = zlib.compressobj(9, wbits=31), []
    for _ in range(size // 2**20):
        pieces.append(packer.compress(b" " * 2**20))
    return b"".join(pieces) + packer.flush()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == self.status
        assert self.headers["content-type"].startswith("application/json") and len(error["message"]) < 500
        return error


class Wire:
    """A connection without a client library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Sends all of it, or as much as is taken."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            pass

    async def answer(self, *, to_head: bool = False) -> Answer | None:
        """The next answer; None if the server hangs up instead."""
        async with asyncio.timeout(20):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                size = 0 if to_head else int(headers.get("content-length", 0))
                return Answer(int(first.split()[1]), headers, await self.reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    async def closed(self) -> bool:
        async with asyncio.timeout(20):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


@pytest.fixture
async def connect():
    writers = []

    async def run(api) -> Wire:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return Wire(reader, writer)

    yield run
    for writer in writers:
        writer.close()


@pytest.fixture
async def small(start):
    async with start(max_body_bytes=20_000) as api:
        yield api


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        yield
    assert not caplog.records


NOT_HTTP = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "nonsense": b"this is no HTTP\r\n\r\n",
    "zeros": b"\0" * 100 + b"\r\n\r\n",
    "unknown method": b"FOO /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown version": b"GET / HTTP/9.9\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n",
    "a header with a zero": b"GET /health HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "length in words": POST + b"Content-Length: ten\r\n\r\n" + BODY,
    "length with a sign": POST + b"Content-Length: +30\r\n\r\n" + BODY,
    "length of 23 digits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "two lengths": POST + LENGTH % len(BODY) + b"Content-Length: 3\r\n\r\n" + BODY,
    "length and chunks": POST + LENGTH % len(BODY) + b"Transfer-Encoding: chunked\r\n\r\n" + BODY,
    "chunks that are none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "unknown transfer coding": POST + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
    "a long path": b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 10_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: 1\r\n" % i for i in range(500)) + b"\r\n",
}


@pytest.mark.parametrize("data", NOT_HTTP.values(), ids=NOT_HTTP)
async def test_what_is_not_http_gets_one_error_and_the_door(api, connect, data):
    wire = await connect(api)
    await wire.send(data)
    answer = await wire.answer()
    assert answer and answer.status == 400 and answer.error()["type"] == "BadRequestError"
    assert await wire.closed()
    await api.ok(TEXT, {"prompt": "still there"})
    assert len(api.engine.requests) == 1


async def test_a_flood_of_headers_is_cut_off(api, connect):
    wire = await connect(api)
    await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: 1\r\n" * 3_000_000)
    answer = await wire.answer()  # it may hang up while the flood still comes
    assert answer is None or answer.error()
    assert await wire.closed()
    await api.ok(TEXT, {"prompt": "still there"})


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET /health HTTP/1.1\r\nHost: x\r\nA: "])
async def test_headers_that_do_not_come(start, connect, monkeypatch, sent):
    """Also if they trickle: the time runs from the beginning."""
    monkeypatch.setattr(http_app, "KEEPALIVE_S", 0.3)
    async with start() as api:
        wire = await connect(api)
        await wire.send(sent)
        closed = asyncio.create_task(wire.closed())
        for _ in range(2000):
            if closed.done():
                break
            await wire.send(b"a" if sent else b"")
            await asyncio.sleep(0.01)
        assert await closed


@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("trickles", [False, True])
async def test_a_body_that_does_not_come(api, connect, monkeypatch, framing, trickles):
    monkeypatch.setattr(http_state, "BODY_TIMEOUT_S", 0.3)
    wire = await connect(api)
    await wire.send(POST + framing + b"\r\n\r\n")
    answer = asyncio.create_task(wire.answer())
    while not answer.done():
        await wire.send((b"1\r\n{\r\n" if b"chunked" in framing else b" ") if trickles else b"")
        await asyncio.sleep(0.02)
    assert (got := await answer) and got.status == 408
    assert "0.3 seconds" in got.error()["message"] and got.error()["type"] == "RequestTimeoutError"
    await api.ok(TEXT, {"prompt": "still there"})


async def test_many_bodies_that_stall_hold_nobody_up(api, connect):
    wires = [await connect(api) for _ in range(200)]
    await asyncio.gather(*(wire.send(POST + b"Content-Length: 1000\r\n\r\n{") for wire in wires))
    await api.ok(TEXT, {"prompt": "still there"})


@pytest.mark.parametrize("size", [20_001, 10**9, 10**15])
async def test_a_length_over_the_limit_is_refused_unread(small, connect, size):
    wire = await connect(small)
    await wire.send(POST + b"Content-Length: %d\r\n\r\n{" % size)
    answer = await wire.answer()
    assert answer and answer.status == 413 and "20000 bytes" in answer.error()["message"]
    assert answer.headers["connection"] == "close"


async def test_chunks_over_the_limit(small, connect):
    wire = await connect(small)
    await wire.send(chunked(b'{"prompt":"hi","user":"', *[b"x" * 1000] * 30, b'"}'))
    answer = await wire.answer()
    assert answer and answer.status == 413 and answer.error()["type"] == "PayloadTooLargeError"
    assert answer.headers["connection"] == "close" and await wire.closed()


async def test_chunks_without_end(small, connect):
    wire = await connect(small)
    await wire.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"3e8\r\n" + b" " * 1000 + b"\r\n") * 40)
    assert (answer := await wire.answer()) and answer.status == 413
    await small.ok(TEXT, {"prompt": "still there"})


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        (b"gzip", gzip.compress(BODY)),
        (b"GZIP", gzip.compress(BODY)),
        (b"gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        (b"deflate", zlib.compress(BODY)),
        (b"deflate", zlib.compress(BODY, wbits=-15)),
        (b"identity", BODY),
    ],
)
async def test_compressed_bodies(small, connect, encoding, data):
    wire = await connect(small)
    await wire.send(post(data, b"Content-Encoding: " + encoding))
    assert (answer := await wire.answer()) and answer.status == 200


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        (b"gzip", BODY, 400),
        (b"gzip", gzip.compress(BODY)[:12] + b"\xff" * 30, 400),
        (b"gzip", gzip.compress(BODY)[:20], 400),
        (b"deflate", b"zz", 400),
        (b"deflate", zlib.compress(BODY)[:-1], 400),
        (b"gzip", gzip.compress(BODY) + b" ", 400),
        (b"gzip", gzip.compress(BODY) + gzip.compress(b"")[:-1], 400),
        (b"gzip", gzip.compress(BODY) + gzip.compress(b"") * 16, 400),
        (b"deflate", zlib.compress(BODY) + zlib.compress(b""), 400),
        (b"rot13", BODY, 415),
        (b"br", BODY, 415),
        (b"zstd", BODY, 415),
        (b"gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
    ],
)
async def test_bodies_that_are_not_compressed_as_they_say(small, connect, encoding, data, status):
    wire = await connect(small)
    await wire.send(post(data, b"Content-Encoding: " + encoding))
    assert (answer := await wire.answer()) and answer.status == status
    assert ("must be one of identity, gzip, deflate" in answer.error()["message"]) == (status == 415)
    await small.ok(TEXT, {"prompt": "still there"})


@pytest.mark.parametrize("more", [b" ", b"\n", bytes(512), b"{}"])
async def test_what_follows_the_end_of_a_compressed_body_is_called_so(small, connect, more):
    wire = await connect(small)
    await wire.send(post(gzip.compress(BODY) + more, b"Content-Encoding: gzip"))
    assert (answer := await wire.answer()) and answer.status == 400
    assert answer.error()["message"] == "the request body cannot be decoded: as gzip, more follows its end"


@pytest.mark.parametrize("encoding", ["br", "zstd"])
@pytest.mark.parametrize("installed", [False, True])
async def test_an_encoding_is_refused_whatever_aiohttp_has_or_says(small, connect, encoding, installed, monkeypatch):
    monkeypatch.setattr(http_parser, "HAS_BROTLI", installed)
    monkeypatch.setattr(http_parser, "HAS_ZSTD", installed)
    monkeypatch.setattr(http_parser, "ContentEncodingError", lambda message: ContentEncodingError("in other words"))
    wire = await connect(small)
    await wire.send(post(BODY, b"Content-Encoding: " + encoding.encode()))
    assert (answer := await wire.answer()) and answer.status == 415
    assert answer.error()["message"] == f"the Content-Encoding must be one of identity, gzip, deflate, got '{encoding}'"


async def test_a_gzip_bomb_is_refused_before_it_goes_off(start, connect):
    """512 MiB of spaces in half a MiB: refused at the limit of what comes out, without the memory for the rest."""
    data = bomb(512 * 2**20)
    async with start(max_body_bytes=2**20) as api:
        assert len(data) < 2**20
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wire = await connect(api)
        await wire.send(post(data, b"Content-Encoding: gzip"))
        answer = await wire.answer()
        assert answer and answer.status == 413 and "limit of 1048576 bytes" in answer.error()["message"]
        await api.ok(TEXT, {"prompt": "still there"})
        await api.ok(TEXT, {"prompt": "and while the rest is thrown away"})
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


async def test_pipelined_calls_are_answered_in_order(api, connect):
    wire = await connect(api)
    lengths = [1, 4, 2, 3, 1]
    bodies = [json.dumps({"prompt": "hi", "max_tokens": n, "ignore_eos": True}).encode() for n in lengths]
    await wire.send(b"".join(map(post, bodies)) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answers = [await wire.answer() for _ in lengths]
    assert [json.loads(answer.body)["usage"]["completion_tokens"] for answer in answers if answer] == lengths
    assert (last := await wire.answer()) and (last.status, last.body) == (200, b"")


async def test_pipelined_calls_of_a_client_that_goes_away(api, connect):
    api.engine.gate.clear()
    wire = await connect(api)
    await wire.send(post(BODY) * 3)
    async with asyncio.timeout(5):
        while not api.engine.open:
            await asyncio.sleep(0.005)
    assert len(api.engine.open) == 1, "one after the other"
    wire.writer.close()
    await api.settled()


async def test_an_error_in_a_pipeline_does_not_shift_the_answers(api, connect):
    wire = await connect(api)
    await wire.send(post(BODY) + post(b"{") + b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" + post(BODY))
    assert [answer.status for _ in range(4) if (answer := await wire.answer())] == [200, 400, 404, 200]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/docs", "/openapi.json", "/version"])
async def test_head_is_get_without_a_body(api, connect, path):
    wire = await connect(api)
    await wire.send(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 2)
    for _ in range(2):
        assert (answer := await wire.answer(to_head=True)) and answer.status == 200
    async with api.session.get(api.url + path) as response:
        await response.read()
        assert answer.headers.get("content-type") == response.headers.get("Content-Type")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("HEAD /v1/completions", 405),
        ("OPTIONS *", 404),
        ("OPTIONS /v1/completions", 405),
        ("TRACE /health", 405),
        ("CONNECT x:80", 404),
        ("GET /v1/models/%ff%00", 404),
        ("GET /v1/models/../../etc/passwd", 404),
        ("GET //health", 404),
    ],
)
async def test_odd_calls(api, connect, line, status):
    wire = await connect(api)
    await wire.send(f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = line.startswith("HEAD")
    assert (answer := await wire.answer(to_head=head)) and answer.status == status and (head or answer.error())


async def test_expectations(api, connect):
    wire = await connect(api)
    await wire.send(post(BODY, b"Expect: 100-continue"))
    assert (answer := await wire.answer()) and answer.status == 100
    assert (answer := await wire.answer()) and answer.status == 200
    await wire.send(post(BODY, b"Expect: the unexpected"))
    assert (answer := await wire.answer()) and answer.status == 417 and answer.error()


async def test_a_body_where_none_belongs(api, connect):
    wire = await connect(api)
    await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + LENGTH % len(BODY) + b"\r\n" + BODY)
    await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert [answer.status for _ in range(2) if (answer := await wire.answer())] == [200, 200]


async def test_a_body_byte_by_byte(api, connect):
    wire = await connect(api)
    for byte in post(BODY):
        await wire.send(bytes([byte]))
    assert (answer := await wire.answer()) and answer.status == 200


@pytest.mark.parametrize("size", [20_001, 3_000_000])
async def test_a_client_that_sends_too_much_gets_to_read_why(small, size):
    """Also one that reads only once all is sent: the server does not hang up on what is still on its way."""
    host, port = small.url.removeprefix("http://").split(":")

    def call() -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("POST", TEXT, b" " * size, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.getheader("Connection"), answer.read()

    status, after, body = await asyncio.to_thread(call)
    assert (status, after) == (413, "close") and b"the limit is 20000 bytes" in body
