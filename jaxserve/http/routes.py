"""All routes, one line each."""

from aiohttp import web

from jaxserve.http.chat import chat_completions
from jaxserve.http.completions import completions
from jaxserve.http.docs import docs
from jaxserve.http.embeddings import embeddings
from jaxserve.http.health import health, show_version
from jaxserve.http.metrics import metrics
from jaxserve.http.models import model, models
from jaxserve.http.openapi import openapi
from jaxserve.http.tokenize import detokenize, tokenize

DOC_ROUTES = [  # left out with --disable-docs
    web.get("/openapi.json", openapi),
    web.get("/docs", docs),
]
ROUTES = [
    web.post("/v1/chat/completions", chat_completions),
    web.post("/v1/completions", completions),
    web.post("/v1/embeddings", embeddings),
    web.get("/v1/models", models),
    web.get("/v1/models/{model:.+}", model),
    web.post("/tokenize", tokenize),
    web.post("/detokenize", detokenize),
    web.get("/health", health),
    web.get("/ping", health),
    web.post("/ping", health),
    web.get("/version", show_version),
    web.get("/metrics", metrics),
    *DOC_ROUTES,
]
