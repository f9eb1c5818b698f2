"""All routes, one line each."""

from aiohttp import web

from jaxserve.http.chat import chat_completions
from jaxserve.http.completions import completions
from jaxserve.http.control import (
    abort_requests,
    is_paused,
    is_sleeping,
    load,
    pause,
    reset_prefix_cache,
    resume,
    sleep,
    wake_up,
)
from jaxserve.http.docs import docs
from jaxserve.http.embeddings import embeddings
from jaxserve.http.health import health, show_version
from jaxserve.http.metrics import metrics
from jaxserve.http.models import model, models
from jaxserve.http.openapi import openapi
from jaxserve.http.responses import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from jaxserve.http.tokenize import detokenize, tokenize

DOC_ROUTES = [  # left out with --disable-docs
    web.get("/openapi.json", openapi),
    web.get("/docs", docs),
]
CONTROL_ROUTES = [  # of the engine as a whole
    web.get("/load", load),
    web.post("/abort_requests", abort_requests),
    web.post("/reset_prefix_cache", reset_prefix_cache),
    web.post("/pause", pause),
    web.post("/resume", resume),
    web.get("/is_paused", is_paused),
    web.post("/sleep", sleep),
    web.post("/wake_up", wake_up),
    web.get("/is_sleeping", is_sleeping),
]
ROUTES = [
    web.post("/v1/chat/completions", chat_completions),
    web.post("/v1/completions", completions),
    web.post("/v1/responses", create_response),
    web.post("/v1/responses/input_tokens", count_input_tokens),
    web.get("/v1/responses/{response_id}", get_response),
    web.delete("/v1/responses/{response_id}", delete_response),
    web.post("/v1/responses/{response_id}/cancel", cancel_response),
    web.get("/v1/responses/{response_id}/input_items", list_input_items),
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
    *CONTROL_ROUTES,
    *DOC_ROUTES,
]
