"""Errors in the form of OpenAI's interface."""

import math
from typing import Any

from starlette.responses import JSONResponse

from aedit.spec_rollout.server import DeadlinePassed, HostEnding, LineClosed, Overloaded, PauseReplaced

INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Make an error.

        Args:
            status: HTTP status.
            message: Reason, expectation and remedy.
            param: Name of the parameter that is wrong.
            code: Name of the error for programs.
            retry_after_s: Seconds after which the same request may succeed.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """Return OpenAI's type of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return SERVER if self.status >= 500 else INVALID

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer.

        What is left of the request's body is read and dropped, for as long as a connection may idle.
        """
        headers = {"connection": "close"} if self.status == 408 else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def bad_request(param: str | None, rule: str, code: str | None = None) -> ApiError:
    """Return the error of a parameter: `bad_request("n", "must be at least 1, got 0")`."""
    return ApiError(400, f"{param} {rule}" if param else rule, param=param, code=code)


def host_error(error: Exception) -> ApiError:
    """Return the answer for an error of the engine's host, or of a sample."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            message = f"the server is busy: {error}; try again in {error.retry_after_s:.0f} s"
            return ApiError(429, message, code="overloaded", retry_after_s=error.retry_after_s)
        case HostEnding() | LineClosed():
            return ApiError(503, str(error), code="ending", retry_after_s=5.0)
        case PauseReplaced():
            return ApiError(409, str(error), code="pause_replaced")
        case DeadlinePassed():
            return ApiError(504, str(error), code="timeout")
        case ValueError():
            return bad_request(None, str(error))
    return ApiError(500, "the server has failed; its log has the reason", code="failed")
