"""The course of a request for text: read, generate, answer whole or in parts."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aedit.spec_rollout.http.bodies import json_body
from aedit.spec_rollout.http.event_stream import EventStream
from aedit.spec_rollout.http.generation import Call, Generation
from aedit.spec_rollout.http.service import Service


class Asked(Protocol):
    """A request that has been read."""

    @property
    def call(self) -> Call:
        """Return its work for the engine."""


class Answer(Protocol):
    """The answer to a request."""

    def whole(self) -> Mapping[str, Any]:
        """Return it when everything is generated."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield it in parts while it is generated."""


A = TypeVar("A", bound=Asked)


async def answered(
    request: Request,
    read: Callable[[Any, Service, Request], Awaitable[A]],
    show: Callable[[Service, A, Generation], Answer],
) -> Response:
    """Return the answer to a request.

    Args:
        request: The request.
        read: Returns the request of a JSON body. Raises ApiError if it is not valid.
        show: Returns the answer of a generation that has started.
    """
    service: Service = request.app.state.service
    async with json_body(request, service) as body:
        asked = await read(body, service, request)
    generation = Generation(service, asked.call)
    generation.start()
    shown = show(service, asked, generation)
    if asked.call.stream:
        return EventStream(service, generation, shown.events())
    await generation.finish(request.receive)
    return JSONResponse(shown.whole())
