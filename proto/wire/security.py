"""Who may talk to a hub: TLS, one token for the run, and node certificates where they are asked for.

`aedit keys` (launch/cli/keys.py) writes the folders that are read here. Loopback is open without them; any
other address is not, unless a person spells out that it shall be.
"""

import hmac
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from cryptography import x509

from aedit.types import UserError

CA = "ca.crt"
TOKEN = "token"
SERVER = "server"
NODE = "node"
_MIN_TOKEN = 32
"""Characters: what `aedit keys` writes has 43. A shorter one was typed by a person, and can be guessed."""

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # takes no parameters at run time
_Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a server asks of those who call it."""

    credentials: grpc.ServerCredentials | None = None
    """None: plaintext."""
    interceptors: tuple[grpc.ServerInterceptor, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a caller shows, and by what it knows its server."""

    credentials: grpc.ChannelCredentials | None = None
    """None: plaintext."""


def server_keys(directory: Path, *, require_client_certificates: bool = False) -> ServerKeys:
    """Let in who has the token in `directory`, over TLS; with `require_client_certificates` only nodes that
    also have a certificate of the run's own authority. Raises UserError naming the file."""
    pair = _pair(directory, SERVER)
    if require_client_certificates:
        credentials = grpc.ssl_server_credentials([pair], _read(directory / CA), require_client_auth=True)
    else:
        credentials = grpc.ssl_server_credentials([pair])
    return ServerKeys(credentials, (TokenCheck(_token(directory)),))


def client_keys(directory: Path) -> ClientKeys:
    """Call with the token in `directory`, and with its node certificate if it has one. Only a server that
    the run's own authority has certified gets to see the token. Raises UserError naming the file."""
    key, certificate = _pair(directory, NODE) if (directory / f"{NODE}.key").exists() else (None, None)
    tls = grpc.ssl_channel_credentials(_read(directory / CA), key, certificate)
    token = grpc.access_token_call_credentials(_token(directory))
    return ClientKeys(grpc.composite_channel_credentials(tls, token))


def check_exposure(address: str, keys: ServerKeys | None, insecure: bool) -> None:
    """Refuse to serve HOST:PORT to others than this machine without TLS and token, unless told to."""
    if insecure or is_loopback(address):
        return
    if keys is None or keys.credentials is None or not keys.interceptors:
        raise UserError(
            f"{address} can be reached from other machines, and without keys anybody who reaches it can"
            " change the model: make some with `aedit keys` and name their folder with --keys, or say"
            " --insecure if the network is closed"
        )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach HOST:PORT. Host names but `localhost` may mean anything."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TokenCheck(grpc.ServerInterceptor):
    """Answers whoever lacks the token before anything of the server is reached: no method, no stream, no
    health check, no reflection."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Found],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Found:
        found = [v for k, v in handler_call_details.invocation_metadata or () if k == "authorization"]
        if len(found) == 1 and self._is_wanted(found[0]):
            return continuation(handler_call_details)
        return _NO_TOKEN if not found else _WRONG_TOKEN

    def _is_wanted(self, given: str | bytes) -> bool:
        # Time must not tell how many characters were right.
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._wanted)


def _refusing(reason: str) -> _Handler:
    def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    # Of all kinds of calls this one reads nothing by itself, so it serves for the others as well.
    return grpc.stream_stream_rpc_method_handler(refuse)


_NO_TOKEN = _refusing("no token: this run wants the one that `aedit keys` wrote for its nodes")
_WRONG_TOKEN = _refusing("wrong token: this run was made with other keys")


def _pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    """Private key and certificate, which must not have expired: a TLS peer would only be cut off."""
    key, certificate = _read(directory / f"{name}.key"), _read(directory / f"{name}.crt")
    path = directory / f"{name}.crt"
    try:
        ends = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError as error:
        raise UserError(f"{path} is not a certificate in PEM: {error}") from error
    if ends < datetime.now(UTC):
        raise UserError(
            f"{path} was valid until {ends:%Y-%m-%d %H:%M} UTC: remove it and run `aedit keys` again"
        )
    return key, certificate


def _token(directory: Path) -> str:
    token = _read(directory / TOKEN).decode("ascii", "replace").strip()
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable():
        raise UserError(f"{directory / TOKEN} holds no token: run `aedit keys`, or copy the file again")
    return token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): run `aedit keys`, or copy its folder"
        ) from error
