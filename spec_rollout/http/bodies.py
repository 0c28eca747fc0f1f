"""Reading of request bodies: limited in size, time, and in the memory of all of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from aedit.spec_rollout.http.errors import ApiError, bad_request
from aedit.spec_rollout.http.service import Service

BIG_BODY_BYTES = 1 << 18
"""Bodies above this size are parsed in another thread, so that the event loop goes on."""


@asynccontextmanager
async def json_body(request: Request, service: Service, empty: Any = None) -> AsyncIterator[Any]:
    """Return a context with the JSON value of a request. Its bytes count as buffered inside the context.

    Args:
        request: The request.
        service: Limits and counters.
        empty: Value of an empty body; None: it must not be empty.

    Raises:
        ApiError: It is too large, too slow, or no JSON.
    """
    counted = _Counted(service)
    try:
        try:
            body = await asyncio.wait_for(_read(request, counted), service.limits.body_s)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {service.limits.body_s:g} s") from None
        if not body and empty is not None:
            yield empty
        elif len(body) > BIG_BODY_BYTES:
            yield await asyncio.to_thread(parse_json, body)
        else:
            yield parse_json(body)
    finally:
        counted.release()


class _Counted:
    """Bytes of one body, counted in the sum of all."""

    def __init__(self, service: Service) -> None:
        self._service, self.num_bytes = service, 0

    def add(self, num_bytes: int) -> None:
        limits = self._service.limits
        if self.num_bytes + num_bytes > limits.max_body_bytes:
            raise ApiError(413, f"the body exceeds {limits.max_body_bytes} bytes: send a smaller request")
        if self._service.num_buffered_bytes + num_bytes > limits.max_buffered_bytes:
            message = "the server is busy with other large requests: try again in 1 s"
            raise ApiError(429, message, code="overloaded", retry_after_s=1.0)
        self.num_bytes += num_bytes
        self._service.num_buffered_bytes += num_bytes

    def release(self) -> None:
        self._service.num_buffered_bytes -= self.num_bytes
        self.num_bytes = 0


async def _read(request: Request, counted: _Counted) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > counted._service.limits.max_body_bytes:
        counted.add(counted._service.limits.max_body_bytes + 1)
    parts = []
    try:
        async for part in request.stream():
            counted.add(len(part))
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the client went away") from None
    return b"".join(parts)


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: It is none.
    """
    try:
        return json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:128]
        raise bad_request(None, f"the body is not valid JSON: {reason}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
