"""POST /v1/embeddings."""

import base64
import time
import uuid

import msgspec
from aiohttp import web

from jaxserve.errors import DeadlineExceeded, EngineDead, QueueFull, RequestAborted
from jaxserve.http.generate import Generation, drain, off_loop
from jaxserve.http.operation import operation
from jaxserve.http.replies import Embedding, EmbeddingList, EmbeddingUsage
from jaxserve.http.request_id import CALL_ID, call_names
from jaxserve.http.schema import EmbeddingBody
from jaxserve.http.state import BODY_BYTES, SERVER, Server, read_object
from jaxserve.request import Request


@operation(EmbeddingBody, reply=EmbeddingList, errors=(QueueFull, RequestAborted, EngineDead, DeadlineExceeded))
async def embeddings(request: web.Request) -> web.Response:
    """The embedding of each text, from the hidden states of the model; each has length 1."""
    server, arrival_s = request.app[SERVER], time.monotonic()
    body, _ = server.parse(EmbeddingBody, await read_object(request))
    call_id = request[CALL_ID] = f"embd-{uuid.uuid4().hex}"
    requests = await off_loop(request[BODY_BYTES], _make_requests, server, call_id, body, arrival_s)
    texts = [server.frontend.text(each) for each in requests]
    await drain(Generation(server, texts, call_names(request)))
    vectors = [text.embedding(body.dimensions) for text in texts]
    tokens = sum(len(each.prompt_token_ids) for each in requests)
    answer = EmbeddingList(
        id=call_id,
        created=int(time.time()),
        model=server.model_name(body.model),
        data=[
            Embedding(
                index=i,
                embedding=vector.tolist()
                if body.encoding_format == "float"
                else base64.b64encode(vector.astype("<f4").tobytes()).decode(),
            )
            for i, vector in enumerate(vectors)
        ],
        usage=EmbeddingUsage(tokens, tokens),
    )
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def _make_requests(server: Server, call_id: str, body: EmbeddingBody, arrival_s: float) -> list[Request]:
    prompts = body.prompts()
    return [
        server.frontend.make_embedding_request(
            f"{call_id}-{i}",
            prompt,
            body.pooling,
            body.dimensions,
            priority=body.priority,
            add_special_tokens=body.add_special_tokens,
            timeout_s=server.config.request_timeout,
            arrival_s=arrival_s,
            prompt_field="input" if len(prompts) == 1 else f"input.{i}",
        )
        for i, prompt in enumerate(prompts)
    ]
