"""The hub's directory of rollout servers: its gRPC service, and its client for servers and trainers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from aedit.proto.rpc import directory_pb2 as pb
from aedit.proto.rpc.client import HubClient
from aedit.proto.rpc.keys import ClientKeys, is_signed_by
from aedit.proto.rpc.limits import FairPool, Limits
from aedit.proto.rpc.retry import HubRefused, HubUnreachable
from aedit.proto.rpc.service import Caller, CallHandlers, Service
from aedit.types import printable

NAME = "aedit.v1.Directory"
_THREADS = 4
_TITLE = b"aedit server card"
MOST_EVIDENCE_BYTES = 2048
LONGEST_REASON = 256

M = TypeVar("M", bound=Message)


class DirectoryCore(Protocol):
    """The interface of a directory for gRPC.

    Called by many threads at once; every method may raise `Refusal`.
    """

    def announce(self, card: pb.ServerCard, caller: Caller) -> pb.AnnounceReply:
        """Register a server, or renew its lease."""

    def withdraw(self, request: pb.WithdrawRequest, caller: Caller) -> pb.WithdrawReply:
        """Take out a server that ends."""

    def servers(self, request: pb.ServersRequest, caller: Caller) -> pb.ServersReply:
        """Return the servers of the run."""

    def accuse(self, accusation: pb.Accusation, caller: Caller) -> pb.AccuseReply:
        """Count an accusation of a server."""


def directory_service(core: DirectoryCore, limits: Limits) -> Service:
    """Return the service over `core`, with threads of its own."""
    handlers, pool = CallHandlers(limits), FairPool(_THREADS, "directory")
    calls = {
        "Announce": handlers.call_as(pb.ServerCard, core.announce, pool),
        "Withdraw": handlers.call_as(pb.WithdrawRequest, core.withdraw, pool),
        "Servers": handlers.call_as(pb.ServersRequest, core.servers, pool),
        "Accuse": handlers.call_as(pb.Accusation, core.accuse, pool),
    }
    return Service(NAME, calls, (pool,))


class DirectoryClient:
    """Client of the directory, for servers and trainers. Any thread may call.

    hubs: HOST:PORT of each hub process of the run, in the order of `HelloReply.addresses`; the first one has
    the directory. standby: where that one's standbys listen, separated by commas, which are asked when the
    hub does not answer or does not lead any more. Every method raises HubUnreachable after its deadline, and
    HubRefused if the hub refuses.
    """

    def __init__(
        self,
        hubs: Sequence[str],
        run: str,
        keys: ClientKeys = None,
        *,
        standby: str = "",
        call_timeout_s: float = 10.0,
    ) -> None:
        assert hubs, "a run has a hub"
        places = (hubs[0], *filter(None, standby.split(",")))
        self._run, self._timeout_s = run, call_timeout_s / len(places)
        self._clients = [HubClient(place, keys, call_timeout_s=self._timeout_s) for place in places]
        self._first = 0
        """Index of the client that answered last."""

    def announce(self, card: pb.ServerCard, key: Ed25519PrivateKey) -> pb.AnnounceReply:
        """Register a server, or renew its lease; sets run, public key and signature of the card.

        Raises HubRefused with ALREADY_EXISTS while another server holds the name.
        """
        card.run, card.public_key = self._run, key.public_key().public_bytes_raw()
        card.signature = key.sign(card_statement(card))
        return self._call("Announce", card, pb.AnnounceReply)

    def withdraw(self, name: str, process: int) -> None:
        """Take this server out of the directory."""
        request = pb.WithdrawRequest(run=self._run, name=name, process=process)
        self._call("Withdraw", request, pb.WithdrawReply)

    def servers(self) -> tuple[pb.ServerCard, ...]:
        """Return the live servers of the run, by name.

        `process` is not the number that the server has drawn, but changes with it.
        """
        return tuple(self._call("Servers", pb.ServersRequest(run=self._run), pb.ServersReply).servers)

    def accuse(self, accusation: pb.Accusation) -> bool:
        """Report a server; return whether it is banned now. Sets run. Needs a session with the first hub."""
        accusation.run = self._run
        return self._call("Accuse", accusation, pb.AccuseReply).banned

    def close(self) -> None:
        """Close all connections. Calls of other threads end with HubUnreachable."""
        for client in self._clients:
            client.close()

    def _call(self, method: str, request: Message, kind: type[M]) -> M:
        """Return the answer of the one that leads; HubRefused only if no other one may still come back."""
        failure: HubUnreachable | HubRefused | None = None
        for at in range(self._first, self._first + len(self._clients)):
            client = self._clients[at % len(self._clients)]
            try:
                reply = client.call(f"Directory/{method}", request, kind, self._timeout_s)
            except HubUnreachable as error:
                failure = error
            except HubRefused as error:
                if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                failure = failure or error
            else:
                self._first = at % len(self._clients)
                return reply
        assert failure is not None
        raise failure


def make_accusation(
    server: str,
    public_key: bytes,
    reason: str,
    evidence: Mapping[str, Any],
    *,
    node: int = 0,
    session: int = 0,
) -> pb.Accusation:
    """Return an accusation that the hub takes, whatever the server has put into reason and evidence.

    Of evidence that is too long, the longest values are left out. node, session: of the training node.
    """
    plain = dict(evidence)
    while len(data := json.dumps(plain, default=str).encode()) > MOST_EVIDENCE_BYTES:
        del plain[max(plain, key=lambda name: len(json.dumps(plain[name], default=str)))]
    shown = printable(reason, LONGEST_REASON)
    return pb.Accusation(
        node=node,
        session=session,
        server=server,
        public_key=public_key,
        reason=shown or "no reason given",
        evidence=data,
    )


def card_statement(card: pb.ServerCard) -> bytes:
    """Return what a server signs to show that the key of its card is its own."""
    parts = (_TITLE, card.run.encode(), card.name.encode(), card.address.encode(), b"%d" % card.process)
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def is_signed_card(card: pb.ServerCard) -> bool:
    """Return whether the card is signed with its own key."""
    return is_signed_by(card.public_key, card.signature, card_statement(card))
