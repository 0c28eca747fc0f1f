"""Errors of calls, and retries: which errors may pass, for how long to try, and the message in the end."""

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import grpc

from aedit.system import growing_pause_s

T = TypeVar("T")

_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,  # by the other side: it stops, or found that the stream stood still
        grpc.StatusCode.DATA_LOSS,  # bits have changed on the way
    }
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0

# What gRPC says of a failed connection, and what it means to a person.
_REASONS = (
    ("WRONG_VERSION_NUMBER", "it does not speak TLS: call it without keys, or give it some"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not from our authority (ca.crt), or has expired"),
    ("Hostname Verification", "its certificate is for another host name"),
    ("CERTIFICATE_REQUIRED", "it wants a node certificate, and we have none that it takes"),
    ("UNKNOWN_CA", "our node certificate is not from its authority"),
)
_REFUSED = "Connection refused"
# What may still change, so that the call is tried again.
_PASSING = (
    (_REFUSED, "no program listens there: check the address, and that the hub is running"),
    ("DNS resolution failed", "the host name is unknown: check the address"),
)
_HUNG_UP = ("Socket closed", "Connection reset", "Stream removed", "GOAWAY")


class HubUnreachable(TimeoutError):
    """No answer came from an address until the deadline."""


class PortClosed(HubUnreachable):
    """The machine answers, and no program listens at the port: what was there has ended."""


class HubRefused(Exception):
    """The other side has answered, and refuses."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class TransferBroken(Exception):
    """An answer broke off or was damaged on the way."""


class Refusal(Exception):
    """An answer of this side that refuses a call. hub.proto says how a node reacts to each code."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Patience:
    """Limits on retries: stop when nothing has moved for `still_s`, and after `total_s` in all."""

    def __init__(self, still_s: float, total_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._still_s = still_s
        self._end_s = clock() + total_s
        self._tries = 0
        self._moved_s = clock()
        self.num_bytes = 0
        """Bytes that have moved, in all tries."""

    def moved(self, num_bytes: int) -> None:
        """Note progress: retrying is worthwhile, and soon."""
        self._moved_s, self._tries = self._clock(), 0
        self.num_bytes += num_bytes

    @property
    def left_s(self) -> float:
        """Return the seconds until the end, whatever moves."""
        return self._end_s - self._clock()

    @property
    def call_s(self) -> float:
        """Return the seconds that a call may take which moves nothing before its end."""
        return min(self._still_s, self.left_s)

    def pause_s(self, random: float) -> float | None:
        """Return the pause before the next try (exponential, full jitter; random in [0, 1)).

        None to give up.
        """
        longest_s = growing_pause_s(self._tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._tries += 1
        after_s = self._clock() + random * longest_s
        enough = after_s >= min(self._end_s, self._moved_s + self._still_s)
        return None if enough else random * longest_s


def is_final(error: grpc.RpcError) -> bool:
    """Return whether the same call can only end the same way."""
    text = error.details() or ""
    return (
        error.code() not in _AGAIN or "larger than max" in text or any(sign in text for sign, _ in _REASONS)
    )


def is_port_closed(error: Exception) -> bool:
    """Return whether the connection was refused, as by a machine where no program listens at the port."""
    return isinstance(error, grpc.RpcError) and _REFUSED in (error.details() or "")


def why(error: grpc.RpcError, encrypted: bool, *, answered: bool = False) -> str:
    """Return what went wrong, in words, as far as gRPC tells.

    Args:
        error: What gRPC has raised.
        encrypted: Whether this side uses TLS.
        answered: Whether the other side has answered before on this connection, so that keys are not why.
    """
    text = (error.details() or "no reason given").splitlines()[0]
    meanings = [meaning for sign, meaning in (*_REASONS, *_PASSING) if sign in text]
    if not meanings and error.code() is grpc.StatusCode.UNAVAILABLE and any(s in text for s in _HUNG_UP):
        perhaps = (
            "perhaps it wants a node certificate, and ours is not one that it takes"
            if encrypted
            else "perhaps it speaks TLS and wants keys"
        )
        meanings = ["it has ended, or the connection was cut" if answered else f"it hung up: {perhaps}"]
    return f"{'; '.join(meanings)} ({text})" if meanings else text
