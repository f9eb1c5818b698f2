"""GET /health, GET and POST /ping, GET /version."""

import msgspec
from aiohttp import web

from jaxserve import __version__
from jaxserve.errors import EngineDead
from jaxserve.http.operation import operation
from jaxserve.http.replies import Version
from jaxserve.http.state import SERVER

FINGERPRINT = f"jaxserve-{__version__}"


@operation(errors=(EngineDead,))
async def health(request: web.Request) -> web.Response:
    """200 and nothing while the engine lives and speaks, otherwise 503."""
    if not request.app[SERVER].client.healthy():
        raise EngineDead("the engine has died, or has said nothing for a while")
    return web.Response()


@operation(reply=Version)
async def show_version(request: web.Request) -> web.Response:
    """The server's version."""
    return web.Response(body=msgspec.json.encode(Version(__version__)), content_type="application/json")
