"""Access to a hub: TLS, tokens, and certificates of callers where they are required.

`aedit keys` (launch/cli/keys.py) writes the folders that are read here. Loopback addresses need no keys; any
other address does, unless the user passes --insecure.
"""

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from cryptography import x509

from aedit.proto.rpc.host_certificate import Endorsement, HostCertificates, endorsement
from aedit.proto.rpc.identity import REVOKED, Stranger, TokenReader, check_call, parse
from aedit.types import UserError

CA = "ca.crt"
TOKEN = "token"
SERVER = "server"
NODE = "node"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # takes no parameters at run time
_Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Credentials that a server requires of its callers."""

    credentials: grpc.ServerCredentials | None = None
    """None: plaintext."""
    interceptors: tuple[grpc.ServerInterceptor, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Credentials of a caller, and those by which it recognises its server."""

    credentials: grpc.ChannelCredentials | None = None
    """None: plaintext."""


def server_keys(directory: Path, *, require_client_certificates: bool = False) -> ServerKeys:
    """Return keys that admit callers with a token of the run's authority, over TLS.

    With `require_client_certificates` only callers that also have a certificate of it. A file `revoked` in
    `directory` ends tokens; it is read again when it changes. Raises UserError naming the file.
    """
    pair = _pair(directory, SERVER)
    if require_client_certificates:
        credentials = grpc.ssl_server_credentials([pair], _read(directory / CA), require_client_auth=True)
    else:
        credentials = grpc.ssl_server_credentials([pair])
    try:
        reader = TokenReader(_read(directory / CA), directory / REVOKED)
    except ValueError as error:
        raise UserError(f"{directory / CA} is not an authority of `aedit keys`: {error}") from error
    return ServerKeys(credentials, (TokenCheck(reader),))


def client_keys(directory: Path) -> ClientKeys:
    """Return keys with the token in `directory`, and its node certificate if it has one.

    Only a server that the run's own authority has certified receives the token. Raises UserError naming the
    file.
    """
    key, certificate = _pair(directory, NODE) if (directory / f"{NODE}.key").exists() else (None, None)
    tls = grpc.ssl_channel_credentials(_read(directory / CA), key, certificate)
    token = grpc.access_token_call_credentials(_token(directory))
    return ClientKeys(grpc.composite_channel_credentials(tls, token))


def host_certificates(directory: Path) -> HostCertificates:
    """Return the check of other peers' certificates by the authority in `directory`. Raises UserError."""
    try:
        return HostCertificates(_read(directory / CA))
    except ValueError as error:
        raise UserError(f"{directory / CA} is not an authority of `aedit keys`: {error}") from error


def own_endorsement(directory: Path, run: str, key: bytes) -> Endorsement:
    """Return the endorsement of the peer with this public key by the certificate in `directory`.

    Raises UserError naming the file.
    """
    pair = _pair(directory, SERVER)
    try:
        return endorsement(*pair, run, key)
    except ValueError as error:
        raise UserError(f"{directory / SERVER}.key is not a key of `aedit keys`: {error}") from error


def check_exposure(address: str, keys: ServerKeys | None, insecure: bool) -> None:
    """Raise UserError for serving other machines without TLS and token, unless `insecure` is true."""
    if insecure or is_loopback(address):
        return
    if keys is None or keys.credentials is None or not keys.interceptors:
        raise UserError(
            f"{address} can be reached from other machines, and without keys anybody who reaches it can"
            " change the model: make some with `aedit keys` and name their folder with --keys, or say"
            " --insecure if the network is closed"
        )


def listener_keys(address: str, directory: Path | None, *, certificates: bool, insecure: bool) -> ServerKeys:
    """Return what a hub or peer at `address` requires of its callers; nothing if `directory` is None.

    Args:
        address: HOST:PORT at which it listens.
        directory: Folder of its keys.
        certificates: Require certificates of the callers too.
        insecure: Serve other machines without TLS and tokens.

    Raises:
        UserError: The keys do not suffice, or cannot be read.
    """
    if certificates and directory is None:
        raise UserError(
            "hub.certificates = true needs --keys: the folder that `aedit keys` made for this hub or peer"
        )
    keys = server_keys(directory, require_client_certificates=certificates) if directory else None
    check_exposure(address, keys, insecure)
    return keys or ServerKeys()


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach HOST:PORT. Host names but `localhost` may mean anything."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TokenCheck(grpc.ServerInterceptor):
    """Interceptor that refuses a caller before anything of the server is reached.

    It lets through who has a token of the run's authority and a role that may make the call.
    """

    def __init__(self, reader: TokenReader) -> None:
        self._reader = reader

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Found],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Found:
        """Return the handler of the call, or one that refuses it."""
        try:
            identity = self._reader.identity(handler_call_details.invocation_metadata or ())
        except Stranger as error:
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, str(error))
        try:
            check_call(identity, handler_call_details.method)
        except Stranger as error:
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return continuation(handler_call_details)


def _refusing(code: grpc.StatusCode, reason: str) -> _Handler:
    def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.abort(code, reason)

    # Of all kinds of calls this one reads nothing by itself, so it serves for the others as well.
    return grpc.stream_stream_rpc_method_handler(refuse)


def name_of(directory: Path | None) -> str:
    """Return the name that the keys in `directory` are for; "" without keys, or if many share them."""
    return "" if directory is None else (parse(_token(directory))[0].own_name or "")


def _pair(directory: Path, name: str) -> tuple[bytes, bytes]:
    """Return private key and certificate. Raises UserError if the certificate has expired."""
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
    try:
        parse(token)
    except ValueError:
        raise UserError(
            f"{directory / TOKEN} holds no token: run `aedit keys` in a new folder, or copy the file again"
        ) from None
    return token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): run `aedit keys`, or copy its folder"
        ) from error
