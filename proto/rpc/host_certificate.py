"""Certificates of peers, bound to the Ed25519 keys that are their identities.

TLS shows that who answers at an address has a certificate of the run for that host. Here the key of such a
certificate signs the peer's identity, so that others know which peer has it, and that it is one peer only.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

_PURPOSE = b"aedit peer certificate 1\n"
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Endorsement:
    """A certificate, and the signature of its key over the identity of a peer."""

    certificate: bytes = b""
    """In DER; empty for a peer that nobody calls."""
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
    return Endorsement(der, signer.sign(_signed(run, key), ec.ECDSA(hashes.SHA256())))


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
            public.verify(made.signature, _signed(run, key), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise ValueError("the key of its certificate has not signed its identity") from None


def _signed(run: str, key: bytes) -> bytes:
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
