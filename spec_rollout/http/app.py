"""The public application: routes, errors, authentication, figures, and the tokenizer's routes."""

import hmac
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aedit import traces
from aedit.spec_rollout.http.chat import ChatPrompt, chat_completions
from aedit.spec_rollout.http.completions import completions
from aedit.spec_rollout.http.errors import ApiError, bad_request
from aedit.spec_rollout.http.fields import Body, ModelName, Text, Tokens, parse_body
from aedit.spec_rollout.http.generation import ClientGone
from aedit.spec_rollout.http.service import HttpMetrics, HttpService, encode, in_thread, json_body
from aedit.spec_rollout.http.token_generate import generate_tokens

OPEN_PATHS = ("/health", "/health/", "/ping")
"""Routes that need no key: signs of life for load balancers."""
CLIENT_GONE = 499
TEXT_ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def make_app(service: HttpService, keys: Sequence[str] = (), more_routes: Sequence[Route] = ()) -> ASGIApp:
    """Return the application of a service.

    Args:
        service: What it serves.
        keys: Accepted bearer tokens; empty: no key is needed.
        more_routes: Further routes.
    """
    routes = [*_routes(), *more_routes]
    handlers: Mapping[Any, Any] = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientGone: _client_gone,
        Exception: _failure,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    app.router.redirect_slashes = False
    traced = _traced(app)
    guarded = _with_keys(traced, keys) if keys else traced
    return _measured(guarded, service.metrics, frozenset(route.path for route in routes))


def _routes() -> list[Route]:
    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/inference/v1/generate", generate_tokens, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
        Route("/health", health),
        Route("/health/", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/metrics", show_metrics),
        Route("/version", show_version),
    ]


async def models(request: Request) -> Response:
    """List the model."""
    return JSONResponse({"object": "list", "data": [_card(request.app.state.service)]})


async def model(request: Request) -> Response:
    """Describe the model."""
    service: HttpService = request.app.state.service
    name = request.path_params["name"]
    if name != service.model:
        message = f"there is no model {name[:128]!r} here: use {service.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return JSONResponse(_card(service))


def _card(service: HttpService) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created_s,
        "owned_by": "aedit",
        "max_model_len": service.max_tokens,
    }


async def health(request: Request) -> Response:
    """Answer 200 while samples are taken."""
    status = request.app.state.service.host.status()
    if status["error"]:
        raise ApiError(500, "the engine's thread has died: start the server again", code="failed")
    if status["ending"]:
        raise ApiError(503, "the server is ending", code="ending", retry_after_s=5.0)
    return JSONResponse({"status": "ok"})


async def show_metrics(request: Request) -> Response:
    """Show figures for Prometheus."""
    service: HttpService = request.app.state.service
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def show_version(request: Request) -> Response:
    """Show the version of this program, and of the policy."""
    service: HttpService = request.app.state.service
    return JSONResponse({"version": version("aedit"), "weight_version": str(service.engine.version)})


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:128]}"
    reasons = {404: f"{what}: no such route", 405: f"{what}: this route takes another method"}
    found = ApiError(error.status_code, reasons.get(error.status_code, error.detail), code="no_such_route")
    response = found.response()
    response.headers.update(error.headers or {})
    return response


def _client_gone(request: Request, error: Exception) -> Response:
    request.app.state.service.metrics.cancelled.inc()
    return Response(status_code=CLIENT_GONE)


def _failure(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server has failed; its log has the reason", code="failed").response()


def _with_keys(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """Return an application that refuses requests without one of the keys before their body is read."""
    accepted = [key.encode() for key in keys]

    def is_known(scope: Scope) -> bool:
        found = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (found[0] if len(found) == 1 else b"").partition(b" ")
        # All keys are compared, in constant time.
        known = [hmac.compare_digest(key.strip(), each) for each in accepted]
        return scheme.lower() == b"bearer" and any(known)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not is_known(scope):
            message = "a known API key is needed: send the header Authorization: Bearer KEY"
            await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
            return
        await app(scope, receive, send)

    return guarded


def _traced(app: ASGIApp) -> ASGIApp:
    """Return an application that traces requests for text, below the span that the client names."""

    async def traced(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in TEXT_ROUTES or not traces.is_on():
            await app(scope, receive, send)
            return
        span = traces.requested("server: request", scope["headers"], route=scope["path"])

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.note(status=message["status"])
            await send(message)

        try:
            with traces.below(span):
                await app(scope, receive, noted)
        finally:
            span.end()

    return traced


def _measured(app: ASGIApp, metrics: HttpMetrics, paths: frozenset[str]) -> ASGIApp:
    """Return an application that counts requests by route and status."""

    async def measured(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in paths else "other"
        began_s, status = time.monotonic(), "none"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await app(scope, receive, counted)
        finally:
            metrics.requests.labels(route, status).inc()
            if route in TEXT_ROUTES:
                metrics.seconds.labels(route).observe(time.monotonic() - began_s)

    return measured


class TokenizeChat(ChatPrompt):
    """A request for the tokens of a chat."""

    model: ModelName = None
    return_token_strs: bool = False


class TokenizeText(Body):
    """A request for the tokens of a text."""

    model: ModelName = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class Detokenize(Body):
    """A request for the text of tokens."""

    model: ModelName = None
    tokens: Tokens = Field(None, validate_default=True)


async def tokenize(request: Request) -> Response:
    """Answer with the tokens of a text or of a chat."""
    service: HttpService = request.app.state.service
    async with json_body(request, service) as body:
        asked: TokenizeChat | TokenizeText
        if isinstance(body, dict) and body.get("messages") is not None:
            asked = parse_body(TokenizeChat, body, service)
            tokens = await asked.tokens(service)
        else:
            asked = parse_body(TokenizeText, body, service)
            if asked.prompt is None:
                raise bad_request("prompt", "is missing: give a text, or messages")
            tokens = await encode(service, asked.prompt, special=asked.add_special_tokens)
    shown = {"count": len(tokens), "max_model_len": service.max_tokens, "tokens": tokens}
    if asked.return_token_strs:
        shown["token_strs"] = [service.codec.token_text(token) for token in tokens]
    return JSONResponse(shown)


async def detokenize(request: Request) -> Response:
    """Answer with the text of tokens."""
    service: HttpService = request.app.state.service
    async with json_body(request, service) as body:
        tokens = parse_body(Detokenize, body, service).tokens
    most = service.engine.target.vocabulary
    if tokens and not 0 <= min(tokens) <= max(tokens) < most:
        raise bad_request("tokens", f"has a token outside the vocabulary of {most}")
    text = await in_thread(service.codec.decode, tokens, skip_special=False)
    return JSONResponse({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Answer with special tokens and chat template."""
    service: HttpService = request.app.state.service
    return JSONResponse(service.codec.info())
