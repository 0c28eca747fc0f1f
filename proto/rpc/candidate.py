"""Requests of hubs for votes, in a swarm signed with the key of the peer that hosts the candidate."""

from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.signing_key import SigningKey, is_signed_by

_PURPOSE = b"aedit request for a vote 1\n"


def sign_request(request: pb.ProposeRequest, key: SigningKey) -> None:
    """Sign a request; it must not change afterwards."""
    request.public_key = key.public
    request.signature = key.private.sign(_signed(request))


def signer_of(request: pb.ProposeRequest) -> bytes:
    """Return the public key with which a request is signed; empty if it is not."""
    is_signed = is_signed_by(request.public_key, request.signature, _signed(request))
    return request.public_key if is_signed else b""


def _signed(request: pb.ProposeRequest) -> bytes:
    copy = pb.ProposeRequest()
    copy.CopyFrom(request)
    copy.ClearField("signature")
    return _PURPOSE + copy.SerializeToString(deterministic=True)
