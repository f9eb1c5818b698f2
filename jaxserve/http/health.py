"""GET /health, GET and POST /ping, GET /version."""

from aiohttp import web

from jaxserve import __version__
from jaxserve.errors import EngineDead
from jaxserve.http.state import SERVER

FINGERPRINT = f"jaxserve-{__version__}"


async def health(request: web.Request) -> web.Response:
    """200 and nothing while the engine lives and speaks, otherwise 503."""
    if not request.app[SERVER].client.healthy():
        raise EngineDead("the engine has died, or has said nothing for a while")
    return web.Response()


async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})
