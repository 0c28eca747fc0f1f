"""The certificate authority of a run, and the certificates that it signs: ECDSA P-256, in PEM files."""

import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID, ObjectIdentifier

from aedit.proto.rpc import CA
from aedit.types import UserError

CA_KEY = "ca.key"
_CA_DAYS = 3650
_CLOCKS = timedelta(hours=1)
"""Largest difference of two clocks at which a new certificate is not refused as not yet valid."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate of the run's authority, and the key with which it signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a certificate, and its permitted uses."""

    name: str
    role: str
    usage: ObjectIdentifier
    names: Sequence[x509.GeneralName] = ()


def authority_in(directory: Path) -> Authority:
    """Return the authority in `directory`, a new one if there is none."""
    if not (directory / CA_KEY).exists():
        _found(directory)
    private = load_pem_private_key((directory / CA_KEY).read_bytes(), None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise UserError(f"{directory / CA_KEY} is not a key that `aedit keys` wrote: choose another folder")
    certificate = x509.load_pem_x509_certificate((directory / CA).read_bytes())
    return Authority(certificate, private)


def _found(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"aedit {secrets.token_hex(4)}")
    certificate = (
        begun(name, name, key, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write(directory / CA, certificate.public_bytes(Encoding.PEM))
    write(directory / CA_KEY, pem(key))


def certify(path: Path, authority: Authority, holder: Holder, days: int) -> None:
    """Write a new private key and its certificate, PATH.key and PATH.crt."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    builder = (
        begun(_named(holder.name, holder.role), issuer.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(_signer(authority), critical=False)
        .add_extension(x509.ExtendedKeyUsage([holder.usage]), critical=False)
    )
    if holder.names:
        builder = builder.add_extension(x509.SubjectAlternativeName(holder.names), critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    write(path.with_suffix(".key"), pem(key))
    write(path, certificate.public_bytes(Encoding.PEM))


def begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    """Return a certificate that is valid for `days` from now, to be completed and signed."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signer(authority: Authority) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())


def _named(name: str, role: str = "") -> x509.Name:
    unit = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role)] if role else []
    return x509.Name([*unit, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def general(host: str) -> x509.GeneralName:
    """Return a host name or IP address as a certificate has it."""
    return x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)


def is_address(host: str) -> bool:
    """Return whether this is an IP address, and not a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def certificate_in(path: Path) -> x509.Certificate:
    """Return the certificate in a file."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key in PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read. Raises FileExistsError if it exists."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
