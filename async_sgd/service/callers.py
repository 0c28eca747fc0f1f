"""Checks of a caller that joins: the name it may take, the proof that it is the same node, its origin."""

import ipaddress
from dataclasses import replace
from hashlib import sha256

import grpc

from aedit.async_sgd.hub import CERTIFIED, Joiner
from aedit.async_sgd.rules import LimitConfig
from aedit.proto.rpc import HUB, Caller, Refusal
from aedit.proto.rpc import hub_pb2 as pb

MOST_PROOF_BYTES = 64
_FINGERPRINT_BYTES = 16


def fingerprint(secret: int) -> int:
    """Return what the journal has of a number that proves who somebody is; 0 for 0, which proves nothing."""
    return _digest(secret.to_bytes(8, "little")) if secret else 0


def known_by(joiner: Joiner, request: pb.JoinRequest, caller: Caller, limits: LimitConfig) -> Joiner:
    """Return the joiner with its proofs, as fingerprints, and its origin.

    Raises Refusal if it takes the name of other keys, or names a donor on another machine.
    """
    named = caller.name is not None and caller.role != HUB  # the hub of a region names itself after its run
    if named:
        check_name(request.name, caller.name, "node")
    if len(request.rejoin) > MOST_PROOF_BYTES:
        raise _wrong(f"rejoin has {len(request.rejoin)} bytes; at most {MOST_PROOF_BYTES} are kept")
    _check_donor(request.donor, caller.host)
    return replace(
        joiner,
        session=fingerprint(request.who.session),
        process=fingerprint(request.process),
        proof=CERTIFIED if named else f"{_digest(request.rejoin):x}" if request.rejoin else "",
        origin=f"keys of {caller.name}" if named else origin_of(caller.host),
        most_names=limits.nodes if is_local(caller.host) else limits.names,
    )


def check_name(name: str, certified: str | None, role: str) -> None:
    """Raise Refusal if the caller's keys are for another name. certified: in its keys; None: none, or any."""
    if certified is not None and name != certified:
        text = f"the certificate is for {certified!r}: a {role} has the name of its certificate"
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, text)


def origin_of(host: str) -> str:
    """Return the host as an origin: an IPv6 network counts as one, since anybody there has 2^64 addresses."""
    try:
        address = ipaddress.ip_address(_address(host))
    except ValueError:
        return f"host {host[:64]}"
    if address.version == 6 and not address.is_loopback:
        return f"host {ipaddress.ip_network((address, 64), strict=False)}"
    return f"host {address}"


def is_local(host: str) -> bool:
    """Return whether the caller is on this machine. host: as gRPC writes it, `ipv4:127.0.0.1`."""
    try:
        return ipaddress.ip_address(_address(host)).is_loopback
    except ValueError:
        return host.startswith("unix")


def _address(host: str) -> str:
    return host.partition(":")[2].replace("%5B", "").replace("%5D", "").strip("[]").partition("%")[0]


def _check_donor(donor: str, host: str) -> None:
    """Raise Refusal for an address at which the node itself cannot be: others would connect there."""
    if not donor:
        return
    place, _, port = donor.rpartition(":")
    try:
        there = ipaddress.ip_address(place.strip("[]"))
    except ValueError:
        raise _wrong("donor: expected HOST:PORT with an IP address") from None
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise _wrong("donor: expected HOST:PORT with a port from 1 to 65535")
    if not (there.is_loopback and is_local(host)) and str(there) != _address(host):
        raise _wrong(f"donor: {there} is not where this node calls from")


def _digest(data: bytes) -> int:
    return int.from_bytes(sha256(b"aedit session" + data).digest()[:_FINGERPRINT_BYTES], "little")


def _wrong(text: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
