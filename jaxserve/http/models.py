"""GET /v1/models and /v1/models/{id}."""

import msgspec
from aiohttp import web

from jaxserve.http.operation import operation
from jaxserve.http.replies import ModelCard, ModelList
from jaxserve.http.state import SERVER, Server


@operation(reply=ModelList)
async def models(request: web.Request) -> web.Response:
    """The names of the model."""
    server = request.app[SERVER]
    cards = ModelList(data=[_card(server, name) for name in server.model_names])
    return web.Response(body=msgspec.json.encode(cards), content_type="application/json")


@operation(reply=ModelCard)
async def model(request: web.Request) -> web.Response:
    """What there is to know of the model under one of its names."""
    server = request.app[SERVER]
    card = _card(server, server.model_name(request.match_info["model"]))
    return web.Response(body=msgspec.json.encode(card), content_type="application/json")


def _card(server: Server, name: str) -> ModelCard:
    info = server.frontend.info
    return ModelCard(id=name, created=server.started, root=info.model, max_model_len=info.max_model_len)
