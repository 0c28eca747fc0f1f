"""Role and name of a caller, as certificates and tokens of `aedit keys` carry them.

A token is `ROLE.ISSUED.NAME.SIGNATURE`, signed by the run's authority: its certificate suffices to check one.
ISSUED is in milliseconds since 1970. A revocation names a name and a time: it ends every token that was
issued under the name until then.
"""

import base64
import binascii
import hmac
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aedit.proto.rpc.retry import Refusal
from aedit.system import file_mark

HUB, STANDBY, PEER, NODE, SERVER, READER = ROLES = ("hub", "standby", "peer", "node", "server", "reader")
SHARED = "nodes"
"""Name in the token that all nodes share: its holders choose their own names."""
REVOKED = "revoked"
"""File of revocations in a folder of keys; it is read again whenever it changes."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

_TITLE = b"aedit token\0"
_KNOWN_TOKENS = 8192
_HUBS = frozenset({HUB, STANDBY, PEER})
_MEMBERS = frozenset({HUB, PEER, NODE})
_TRAINERS_AND_SERVERS = frozenset({HUB, STANDBY, PEER, NODE, SERVER})
_EVERYBODY = frozenset(ROLES)
_ROLES_OF: Mapping[str, frozenset[str]] = {
    "Membership/Hello": _EVERYBODY,
    "Membership/Join": _MEMBERS,
    "Membership/Heartbeat": _MEMBERS,
    "Membership/Lease": _MEMBERS,
    "Membership/Leave": _MEMBERS,
    "Membership/TakeOver": _MEMBERS,
    "Exchange/Push": _MEMBERS,
    "Exchange/Pull": _EVERYBODY,
    "State/Status": _EVERYBODY,
    "State/Tail": _HUBS,
    "State/Confirm": _HUBS,
    "Directory/Announce": _TRAINERS_AND_SERVERS,
    "Directory/Withdraw": _TRAINERS_AND_SERVERS,
    "Directory/Servers": _EVERYBODY,
    "Directory/Accuse": _MEMBERS,
    "Versions/Newest": _EVERYBODY,
    "Versions/Get": _EVERYBODY,
    "Versions/Offer": _TRAINERS_AND_SERVERS,
    "Versions/Put": _TRAINERS_AND_SERVERS,
    "Rollouts/Generate": _TRAINERS_AND_SERVERS,
    "Rollouts/ServerStatus": _EVERYBODY,
    "Swarm/Exchange": _MEMBERS,
}
"""Calls of a run by the roles that may make them; hubs alone make any other one."""
_OWN = "/aedit.v1."


@dataclass(frozen=True, slots=True)
class Identity:
    """Role and name of a caller, as the run's authority has signed them."""

    role: str
    name: str
    issued_ms: int = 0

    @property
    def own_name(self) -> str | None:
        """Return the name; None for a token that many callers share."""
        return None if self.name == SHARED else self.name


def read_revocations(path: Path) -> dict[str, int]:
    """Return by name until when its tokens are revoked, in milliseconds; skip lines of another form."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, until = line.partition(" ")
        if until.isdecimal():
            found[name] = max(int(until), found.get(name, 0))
    return found


class TokenReader:
    """Reads tokens that one authority has signed. Any thread may call."""

    def __init__(self, authority: bytes, revoked: Path) -> None:
        """Create a reader.

        Args:
            authority: Certificate in PEM.
            revoked: File of revocations, which may change or appear at any time.

        Raises:
            ValueError: The certificate is of another kind.
        """
        key = x509.load_pem_x509_certificate(authority).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("the authority's key is not an elliptic-curve key")

        @lru_cache(_KNOWN_TOKENS)
        def verified(token: str) -> Identity:
            identity, signature = parse_token(token)
            statement = identity_statement(identity.role, identity.issued_ms, identity.name)
            key.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
            return identity

        self._verified: Callable[[str], Identity] = verified
        self._path, self._lock = revoked, threading.Lock()
        self._mark: tuple[int, int, int] | None = None
        self._revoked_until_ms: dict[str, int] = {}

    def check(self, metadata: Iterable[tuple[str, str | bytes]], method: str) -> None:
        """Raise Refusal unless a token in these metadata is valid and its role may call `/Service/Method`."""
        found = [value for name, value in metadata if name == "authorization"]
        if not found:
            raise _unknown("no token: this run wants the one that `aedit keys` wrote for its nodes")
        try:
            identity = self._verified(_shown(found))
        except (ValueError, InvalidSignature):
            raise _unknown("wrong token: this run was made with other keys") from None
        if self._is_revoked(identity):
            raise _unknown(f"revoked token: the keys of {identity.name!r} are not valid any more")
        if not method.startswith(_OWN):
            return  # health and reflection
        name = method.removeprefix(_OWN)
        allowed = _ROLES_OF.get(name, _HUBS)
        if identity.role not in allowed:
            wanted = ", ".join(role for role in ROLES if role in allowed)
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} is for the roles {wanted}; these keys have the role {identity.role}",
            )

    def _is_revoked(self, identity: Identity) -> bool:
        try:
            mark = file_mark(self._path)
        except OSError:
            mark = None
        with self._lock:
            if mark != self._mark:
                self._revoked_until_ms = read_revocations(self._path) if mark else {}
                self._mark = mark
            return identity.issued_ms <= self._revoked_until_ms.get(identity.name, -1)


def _unknown(reason: str) -> Refusal:
    return Refusal(grpc.StatusCode.UNAUTHENTICATED, reason)


def shown_identity(
    metadata: Iterable[tuple[str, str | bytes]], auth: Mapping[str, Sequence[bytes]]
) -> Identity | None:
    """Return who made a call that has passed a `TokenReader`; None on a connection without TLS.

    auth: gRPC's authentication context. Raises Refusal if token and certificate are not of the same holder.
    """
    if list(auth.get("transport_security_type", ())) != [b"ssl"]:
        return None  # A token in plaintext was not checked.
    try:
        token = parse_token(_shown([value for name, value in metadata if name == "authorization"]))[0]
    except ValueError:
        return None
    for pem in auth.get("x509_pem_cert", ()):
        certified = _certified(bytes(pem))
        if (certified.role, certified.name) != (token.role, token.name):
            raise _unknown(
                f"the certificate is for {certified.role} {certified.name!r} and the token for {token.role}"
                f" {token.name!r}: use the files of one folder"
            )
    return token


def check_validity(auth: Mapping[str, Iterable[bytes]], now_s: float) -> None:
    """Raise Refusal if the caller's certificate has expired; TLS looks only when a connection begins.

    auth: gRPC's authentication context. now_s: seconds since 1970.
    """
    for pem in auth.get("x509_pem_cert", ()):
        until = _valid_until(bytes(pem))
        if now_s >= until.timestamp():
            name = _certified(bytes(pem)).name
            raise _unknown(
                f"the certificate of {name!r} was valid until {until:%Y-%m-%d %H:%M:%S} UTC: remove it, run"
                " `aedit keys` again and restart with the new one"
            )


@lru_cache(_KNOWN_TOKENS)
def _valid_until(pem: bytes) -> datetime:
    """Return the end of a certificate that gRPC has verified."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def identity_statement(role: str, issued_ms: int, name: str) -> bytes:
    """Return what the authority signs for a token."""
    return _TITLE + f"{role}\0{issued_ms}\0{name}".encode()


def token_text(identity: Identity, signature: bytes) -> str:
    """Return the token of this holder. signature: of `identity_statement`, by the authority."""
    signed = base64.urlsafe_b64encode(signature).decode().rstrip("=")
    return f"{identity.role}.{identity.issued_ms}.{identity.name}.{signed}"


def parse_token(token: str) -> tuple[Identity, bytes]:
    """Return holder and signature of a token, unchecked. Raises ValueError for another form."""
    role, issued, rest = [*token.split(".", 2), "", ""][:3]
    name, _, signed = rest.rpartition(".")
    if role not in ROLES or not (issued.isascii() and issued.isdecimal()) or not NAME.fullmatch(name):
        raise ValueError("not a token of `aedit keys`")
    try:
        signature = base64.b64decode(signed + "=" * (-len(signed) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not a token of `aedit keys`") from error
    return Identity(role, name, int(issued)), signature


def _shown(found: Sequence[str | bytes]) -> str:
    text = found[0] if len(found) == 1 else ""
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    if not text.startswith("Bearer ") or len(text) > 512:
        raise ValueError("not one token")
    return text.removeprefix("Bearer ")


@lru_cache(_KNOWN_TOKENS)
def _certified(pem: bytes) -> Identity:
    """Return role and name in a certificate that gRPC has verified."""
    subject = x509.load_pem_x509_certificate(pem).subject

    def first(oid: x509.ObjectIdentifier) -> str:
        return next((str(one.value) for one in subject.get_attributes_for_oid(oid)), "")

    return Identity(first(NameOID.ORGANIZATIONAL_UNIT_NAME), first(NameOID.COMMON_NAME))


AUTHOR = "aedit-author"
"""Metadata of a call that opens or continues a line of policy versions: a secret, drawn for each pair of line
and server, and sent with `Generate`, `Offer` and `Put`. The server binds the line to the first one, so that
another caller that knows the name of the line cannot write into it."""
SECRET_CHARS = 64


def new_secret() -> str:
    """Return a new secret for one line at one server."""
    return secrets.token_hex(SECRET_CHARS // 2)


def author_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call by the author of a line."""
    return ((AUTHOR, secret),)


def secret_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the caller's secret; empty if there is none, or more than one."""
    found = [value for key, value in metadata if key == AUTHOR]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


def is_author(known: str, given: str) -> bool:
    """Return whether the caller has the secret to which a line is bound."""
    # Time must not tell how many characters were right.
    return len(known) == SECRET_CHARS and hmac.compare_digest(known.encode(), given.encode())
