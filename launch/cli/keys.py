"""`aedit keys`: create a certificate authority for a run, and a folder of keys for each machine.

Each folder has the authority's certificate, a token with role and name, and, for a holder of its own, a
certificate with the same role and name: ECDSA P-256, in PEM files. `revoke` ends the keys of a holder.
"""

import argparse
import ipaddress
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
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
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from aedit.proto.rpc import (
    CA,
    HUB,
    NODE,
    READER,
    REVOKED,
    SERVER,
    TOKEN,
    Identity,
    identity,
    identity_statement,
    read_revocations,
    token_text,
)
from aedit.proto.rpc import NAME as _NAME
from aedit.proto.rpc import SHARED as ANY_NODE
from aedit.system import write_atomically
from aedit.types import UserError

DAYS = 365
_LOCAL = ("localhost", "127.0.0.1", "::1")
CA_KEY = "ca.key"
_CA_DAYS = 3650
_CLOCKS = timedelta(hours=1)
"""Largest difference of two clocks at which a new certificate is not refused as not yet valid."""


Hosted = Mapping[str, Sequence[str]]
"""Names of holders, and for each the host names and IP addresses at which others reach it."""


class Authority:
    """The run's authority in a folder: its certificate, and the key with which it signs."""

    def __init__(self, directory: Path, days: int) -> None:
        """Read the authority of `directory`, or make it. days: validity of what it signs."""
        if not (directory / CA_KEY).exists():
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
        private = load_pem_private_key((directory / CA_KEY).read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise UserError(
                f"{directory / CA_KEY} is not a key that `aedit keys` wrote: choose another folder"
            )
        self._certificate, self._key, self._days = certificate_in(directory / CA), private, days

    def certify(self, path: Path, name: str, role: str, hosts: Iterable[str] = ()) -> None:
        """Write a new private key and its certificate, PATH.key and PATH.crt, unless they exist.

        hosts: of a holder that others call; without any it only calls others.
        """
        if path.exists():
            return
        key = ec.generate_private_key(ec.SECP256R1())
        names = list(map(general, hosts))
        usage = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            begun(_named(name, role), self._certificate.subject, key, self._days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(signer, critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        write(path.with_suffix(".key"), pem(key))
        write(path, certificate.public_bytes(Encoding.PEM))

    def serving(self, folder: Path, name: str, role: str, hosts: Sequence[str]) -> None:
        """Write the certificate of a holder that others call, and the list of revoked keys that it reads."""
        path, wanted = folder / f"{SERVER}.crt", dict.fromkeys(hosts)
        self.certify(path, name, role, wanted)
        if (revoked := folder.parent / REVOKED).exists() and not (folder / REVOKED).exists():
            write_atomically(folder / REVOKED, revoked.read_text())
        held = certificate_in(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if missing := [host for host in wanted if general(host) not in list(held)]:
            raise UserError(
                f"{path} is not for {', '.join(missing)}: remove {folder} and run `aedit keys` again"
            )

    def share(self, folder: Path, role: str) -> Path:
        """Write the authority's certificate and a token; return the folder."""
        if not (folder / CA).exists():
            write(folder / CA, self._certificate.public_bytes(Encoding.PEM))
        if not (folder / TOKEN).exists():
            holder = Identity(role, folder.name, time.time_ns() // 10**6)
            statement = identity_statement(holder.role, holder.issued_ms, holder.name)
            signed = self._key.sign(statement, ec.ECDSA(hashes.SHA256()))
            write(folder / TOKEN, token_text(holder, signed).encode() + b"\n")
        return folder


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


def keys(options: argparse.Namespace) -> str:
    """Make or revoke keys as the command line says; return the instructions. Raises UserError."""
    made = (options.host, options.node, options.server, options.standby, options.peer, options.reader)
    if options.revoke and any(made):
        raise UserError("--revoke: stands alone; make new keys by a second command")
    if options.revoke:
        return revoke(options.out, options.revoke)
    return make_keys(
        options.out,
        options.host,
        options.node,
        servers=hosted_of("server", options.server),
        standbys=hosted_of("standby", options.standby),
        peers=hosted_of("peer", options.peer),
        readers=options.reader,
    )


_NONE: Hosted = {}


def make_keys(
    directory: Path,
    hosts: Sequence[str],
    nodes: Sequence[str] = (),
    *,
    servers: Hosted = _NONE,
    standbys: Hosted = _NONE,
    peers: Hosted = _NONE,
    readers: Sequence[str] = (),
    days: int = DAYS,
) -> str:
    """Write `directory`/hub for the hub and one folder for each other name.

    Return the instructions for copying them.

    Without hosts there is no hub: all others are for a swarm, which has peers. Without names, one folder
    `nodes` serves all nodes of a hub, with one token and no certificate. Existing files are
    not overwritten: a second call with the same directory adds what is missing, from the same authority. Keys
    are ECDSA P-256, readable by their owner only. Raises UserError for invalid names, for other hosts than
    the hub's existing certificate has, and for folders that cannot be written.

    Args:
        directory: Folder for authority and keys.
        hosts: Host names and IP addresses at which nodes reach the hub.
        nodes: Names of the nodes.
        servers: Rollout servers, which trainers reach. They, standbys and peers have a certificate for their
            calls and one for their own services.
        standbys: Standbys, which nodes reach.
        peers: Peers of a swarm, which the other peers reach.
        readers: Names of those who may look at the run and copy its model, and nothing else.
        days: Validity of the certificates.
    """
    if hosts or not peers:
        _check_hosts(hosts, "--host", "the hub")
    serving = (
        ("server", identity.SERVER, servers),
        ("standby", identity.STANDBY, standbys),
        ("peer", identity.PEER, peers),
    )
    for flag, _, hosted in serving:
        for name, places in hosted.items():
            _check_hosts(places, f"--{flag} {name}", f"the {flag}")
        _check_names(hosted, f"--{flag}")
    _check_names(nodes, "--node")
    _check_names(readers, "--reader")
    named = ((identity.NODE, nodes), *((role, hosted) for _, role, hosted in serving), (READER, readers))
    roles = _roles(directory, named)
    try:
        authority = Authority(directory, days)
        if hosts:
            # The hub's own machine can always use loopback.
            authority.serving(directory / HUB, "aedit hub", HUB, (*hosts, *_LOCAL))
        folders = []
        for name, role in (({HUB: HUB} if hosts else {}) | roles).items():
            authority.certify(directory / name / f"{NODE}.crt", name, role)
            folders.append(authority.share(directory / name, role))
        for _, role, hosted in serving:
            is_server = role == identity.SERVER
            for name, places in hosted.items():
                shown, reached = (name, places) if is_server else ("aedit hub", (*places, *_LOCAL))
                authority.serving(directory / name, shown, role, reached)
        if hosts and not nodes:
            folders.append(authority.share(directory / ANY_NODE, identity.NODE))
    except OSError as error:
        raise UserError(f"cannot write {error.filename} ({error.strerror}): choose another folder") from error
    return _what_to_copy(directory, folders)


def revoke(directory: Path, names: Sequence[str]) -> str:
    """End all keys that were made for `names` until now; return the instructions.

    The folders in `directory` of hub, standbys, peers and rollout servers get the new list. Those of `names`
    are renamed, so that `make_keys` makes new keys under the same names. Raises UserError for a name that has
    no keys, and for folders that cannot be written.
    """
    now_ms = time.time_ns() // 10**6
    known = read_revocations(directory / REVOKED) if (directory / REVOKED).exists() else {}
    for name in names:
        if not (directory / name / TOKEN).exists() and name not in known:
            raise UserError(
                f"--revoke {name}: {directory / name} has no keys; give the name of a folder there"
            )
        if name == HUB:
            raise UserError(
                f"--revoke {HUB}: make keys in a new folder instead, and copy them to all machines"
            )
        known[name] = now_ms
    text = "".join(f"{name} {until}\n" for name, until in sorted(known.items()))
    try:
        for name in names:
            if (directory / name).exists():
                (directory / name).rename(directory / f"{name}.revoked.{now_ms}")
        places = [path.parent for path in directory.glob(f"*/{SERVER}.crt") if ".revoked." not in str(path)]
        for place in (directory, *places):
            write_atomically(place / REVOKED, text)
    except OSError as error:
        raise UserError(f"cannot write {error.filename} ({error.strerror}): choose another folder") from error
    lines = [f"Revoked: {', '.join(names)}."]
    for place in sorted(places):
        lines.append(f"Copy {place / REVOKED} beside the keys of {place.name}, which reads it at once.")
    return "\n".join(lines)


def hosted_of(flag: str, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the hosts of each holder from arguments such as `spare-1=10.0.0.5,gpu-5.example.org`.

    flag: of the command line, for errors. Raises UserError for arguments of another form.
    """
    found: dict[str, list[str]] = {}
    for argument in arguments:
        name, sign, hosts = argument.partition("=")
        if not (name and sign and hosts):
            raise UserError(
                f"--{flag}: {argument!r} is not NAME=HOST, as in spare-1=10.0.0.5,spare.example.org"
            )
        found[name] = hosts.split(",")
    return found


def _roles(directory: Path, named: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """Return the role of each named holder. Raises UserError if a name has two, or has keys for another."""
    found: dict[str, str] = {}
    for role, name in ((role, name) for role, names in named for name in names):
        if found.setdefault(name, role) != role:
            raise UserError(f"{name!r} cannot be a {found[name]} and a {role}: give each a name of its own")
    for name, role in found.items():
        path = directory / name / TOKEN
        if path.exists():
            held, _ = identity.parse_token(path.read_text().strip())
            if held.role != role:
                raise UserError(f"{name!r} has keys of a {held.role}: revoke them, or use another name")
    return found


def _check_hosts(hosts: Sequence[str], flag: str, whom: str) -> None:
    if not hosts:
        raise UserError(f"{flag}: missing; give the host names or IP addresses at which nodes reach {whom}")
    for host in hosts:
        if not is_address(host) and not all(map(_NAME.fullmatch, host.split("."))):
            raise UserError(f"{flag}: {host!r} is neither a host name nor an IP address (without port)")


def _check_names(names: Iterable[str], flag: str) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or name in (HUB, ANY_NODE, CA, CA_KEY, TOKEN):
            raise UserError(
                f"{flag}: {name!r} cannot be a folder of its own: use other letters, digits, '.', '_', '-'"
            )


def _what_to_copy(directory: Path, folders: Sequence[Path]) -> str:
    lines = [f"{directory / CA_KEY} signs for the whole run: keep it here, off the machines that train."]
    for folder in folders:
        certificates = [path for path in (folder / f"{SERVER}.crt", folder / f"{NODE}.crt") if path.exists()]
        days = [certificate_in(path).not_valid_after_utc for path in certificates]
        ends = f", valid until {min(days):%Y-%m-%d}" if days else ""
        kind = identity.parse_token((folder / TOKEN).read_text().strip())[0].role
        whom = {HUB: "the hub's machine", ANY_NODE: "every node"}.get(folder.name, f"{kind} {folder.name}")
        lines.append(f"Copy {folder} to {whom}{ends}.")
    if directory / ANY_NODE in folders:
        lines.append("The nodes have no certificates: one token lets them all in, under any name.")
    lines.append("Then name the copied folder with --keys, wherever it is used.")
    return "\n".join(lines)
