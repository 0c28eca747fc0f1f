"""Server-sent events to a client that may read slowly or go away."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aedit.spec_rollout.http.errors import ApiError
from aedit.spec_rollout.http.generation import ClientGone, Generation
from aedit.spec_rollout.http.service import Service

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Return an event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Answer in parts, which ends the generation when the client goes away or does not read."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: Generation, events: AsyncGenerator[bytes, None]) -> None:
        """Make the answer of a generation that has started.

        Args:
            service: Limits and figures.
            generation: Is cancelled at the end of the answer.
            events: Events without the last one, `[DONE]`.
        """
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._generation, self._events = service, generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        watching = asyncio.create_task(self._generation.watch(receive))
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._send(send, start)
            async with aclosing(self._guarded()) as events:
                async for part in events:
                    await self._send(send, {"type": "http.response.body", "body": part, "more_body": True})
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            self._service.metrics.cancelled.inc()
        except TimeoutError:
            self._service.metrics.cancelled.inc()
            log.info("a client did not read its answer for %g s", self._service.limits.write_s)
        finally:
            watching.cancel()
            self._generation.cancel()

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        """Yield the events and the last one, or an error as the last one."""
        try:
            async with aclosing(self._events) as events:
                async for part in events:
                    yield part
        except ApiError as error:
            yield event(error.body())
            return
        yield DONE

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        await asyncio.wait_for(send(message), self._service.limits.write_s)
