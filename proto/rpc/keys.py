"""Keys and certificates: Ed25519 keys of servers and peers, endorsements of peers, TLS and tokens.

TLS shows that the program at an address has a certificate of the run for that host. The key of such a
certificate also signs the identity of a peer, so that others know which single peer has it.
"""

import ipaddress
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from aedit.proto.rpc.identity import REVOKED, TokenReader, parse_token
from aedit.types import UserError

KEY_BYTES = 32
"""Length of a private key and of a public key."""
SIGNATURE_BYTES = 64


class SigningKey:
    """Ed25519 key of a server or peer."""

    def __init__(self, private: bytes | None = None) -> None:
        """Use the 32 private bytes; None draws a new key.

        Raises:
            ValueError: There are more or fewer bytes.
        """
        if private is None:
            self._key = Ed25519PrivateKey.generate()
            return
        if len(private) != KEY_BYTES:
            raise ValueError(f"a private key has {KEY_BYTES} bytes, got {len(private)}")
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    @classmethod
    def kept(cls, path: Path) -> "SigningKey":
        """Return the key in a file; make the file, readable by its owner only, if there is none.

        Raises:
            ValueError: The file does not contain a key.
            OSError: It cannot be read or written.
        """
        if not path.exists():
            _create(path, cls()._key.private_bytes_raw())
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}; delete it for a new key") from None

    @property
    def public(self) -> bytes:
        """Return the 32 public bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> Ed25519PrivateKey:
        """Return the key itself."""
        return self._key


def is_signed_by(public_key: bytes, signature: bytes, signed: bytes) -> bool:
    """Return whether the owner of `public_key` has signed exactly these bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)
    except (InvalidSignature, ValueError):  # ValueError: not the length of a key
        return False
    return True


def _create(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole; keep the file of another process that was faster."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, path)


_PURPOSE = b"aedit peer certificate 1\n"
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Endorsement:
    """A certificate, and the signature of its key over the identity of a peer."""

    certificate: bytes = b""
    """In DER; empty for a peer that no other calls."""
    signature: bytes = b""

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the certificate in hexadecimal; "" without one."""
        return sha256(self.certificate).hexdigest() if self.certificate else ""


def endorsement(private: bytes, certificate: bytes, run: str, key: bytes) -> Endorsement:
    """Return the endorsement of a peer by its own certificate.

    Args:
        private: Key of the certificate, ECDSA, in PEM.
        certificate: In PEM.
        run: Name of the run.
        key: Public Ed25519 key of the peer.

    Raises:
        ValueError: The private key is of another kind.
    """
    signer = load_pem_private_key(private, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the certificate is not an elliptic-curve key")
    der = x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER)
    return Endorsement(der, signer.sign(_signed_identity(run, key), ec.ECDSA(hashes.SHA256())))


class HostCertificates:
    """Checks the endorsements of peers against the authority of the run."""

    def __init__(self, authority: bytes, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Trust one authority. authority: certificate in PEM. clock: of the wall."""
        self._authority, self._clock = x509.load_pem_x509_certificate(authority), clock

    def check(self, made: Endorsement, run: str, key: bytes, address: str) -> None:
        """Check that a certificate of the run for the host of `address` endorses the peer with this key.

        Raises:
            ValueError: It does not; the text says why.
        """
        if not 0 < len(made.certificate) <= _MOST_BYTES:
            raise ValueError(
                f"its certificate has {len(made.certificate)} bytes; expected 1 to {_MOST_BYTES}"
            )
        found = x509.load_der_x509_certificate(made.certificate)
        public = found.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError("the key of its certificate is not an elliptic-curve key")
        try:
            found.verify_directly_issued_by(self._authority)
        except (InvalidSignature, TypeError, ValueError):
            raise ValueError("its certificate is not of the authority of this run") from None
        if not found.not_valid_before_utc <= self._clock() <= found.not_valid_after_utc:
            raise ValueError(f"its certificate is valid until {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
        if not _is_for(found, address):
            raise ValueError(f"its certificate is not for a server at {address}")
        try:
            public.verify(made.signature, _signed_identity(run, key), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise ValueError("the key of its certificate has not signed its identity") from None


def _signed_identity(run: str, key: bytes) -> bytes:
    return _PURPOSE + key + run.encode()


def _is_for(found: x509.Certificate, address: str) -> bool:
    """Return whether a certificate is that of a server at the host of HOST:PORT."""
    host = address.rpartition(":")[0].strip("[]").lower()
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return False
    try:
        is_named = ipaddress.ip_address(host) in names.get_values_for_type(x509.IPAddress)
    except ValueError:
        is_named = host in map(str.lower, names.get_values_for_type(x509.DNSName))
    return is_named and ExtendedKeyUsageOID.SERVER_AUTH in usages


CA = "ca.crt"
TOKEN = "token"
SERVER = "server"
NODE = "node"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Credentials that a server requires of its callers."""

    credentials: grpc.ServerCredentials | None = None
    """None: plaintext."""
    tokens: TokenReader | None = None
    """Reads the tokens of callers; None: they need none."""


ClientKeys: TypeAlias = grpc.ChannelCredentials | None
"""Credentials of a caller, and those by which it recognises its server; None: plaintext."""


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
        tokens = TokenReader(_read(directory / CA), directory / REVOKED)
    except ValueError as error:
        raise UserError(f"{directory / CA} is not an authority of `aedit keys`: {error}") from error
    return ServerKeys(credentials, tokens)


def client_keys(directory: Path) -> ClientKeys:
    """Return keys with the token in `directory`, and its node certificate if it has one.

    Only a server that the run's own authority has certified receives the token. Raises UserError naming the
    file.
    """
    key, certificate = _pair(directory, NODE) if (directory / f"{NODE}.key").exists() else (None, None)
    tls = grpc.ssl_channel_credentials(_read(directory / CA), key, certificate)
    token = grpc.access_token_call_credentials(_token(directory))
    return grpc.composite_channel_credentials(tls, token)


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
    if keys is None or keys.credentials is None or keys.tokens is None:
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


def name_of(directory: Path | None) -> str:
    """Return the name that the keys in `directory` are for; "" without keys, or if many share them."""
    return "" if directory is None else (parse_token(_token(directory))[0].own_name or "")


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
        parse_token(token)
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
