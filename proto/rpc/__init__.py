"""The hub protocol over gRPC: generated messages, client, server, chunked arrays, limits and TLS."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.rpc import (
        directory_pb2,
        frames,
        hub_pb2,
        identity,
        rollouts_pb2,
        swarm_pb2,
        versions_pb2,
    )
    from aedit.proto.rpc.anchor_versions import (
        MOST_GENERATIONS,
        generation,
        generation_of,
        last_term_before,
        lineage,
        stamp,
        term_text,
        version_of,
    )
    from aedit.proto.rpc.author import SECRET_CHARS, author_metadata, is_author, new_secret, secret_of
    from aedit.proto.rpc.call_context import CallContext
    from aedit.proto.rpc.calls import Calls, Metadata
    from aedit.proto.rpc.candidate import sign_request, signer_of
    from aedit.proto.rpc.client import HubClient, NobodyListens, channel
    from aedit.proto.rpc.connections import raise_descriptor_limit
    from aedit.proto.rpc.directory import (
        LONGEST_REASON,
        MOST_EVIDENCE_BYTES,
        DirectoryClient,
        DirectoryCore,
        accusation,
        directory_service,
        is_signed_card,
    )
    from aedit.proto.rpc.directory_pb2 import ServerCard
    from aedit.proto.rpc.download import Download
    from aedit.proto.rpc.fair_pool import FairPool
    from aedit.proto.rpc.frames import CHUNK_BYTES, MESSAGE_BYTES
    from aedit.proto.rpc.hello import PROTOCOL, caller_keys, check_address, greet
    from aedit.proto.rpc.host_certificate import Endorsement, HostCertificates
    from aedit.proto.rpc.hub_pb2 import (
        HelloReply,
        HelloRequest,
        PullHead,
        PullRequest,
        PushHead,
        PushReply,
        StatusRequest,
        Who,
    )
    from aedit.proto.rpc.identity import (
        HUB,
        NAME,
        READER,
        REVOKED,
        SHARED,
        Identity,
        identity_statement,
        read_revocations,
        token_text,
    )
    from aedit.proto.rpc.limits import Limits, Rates
    from aedit.proto.rpc.node_services import run_services
    from aedit.proto.rpc.notifier import Notifier, Quiet
    from aedit.proto.rpc.retry import HubRefused, HubUnreachable, Patience, TransferBroken, why
    from aedit.proto.rpc.rollouts_pb2 import RolloutStatement, Span
    from aedit.proto.rpc.security import (
        CA,
        NODE,
        SERVER,
        TOKEN,
        ClientKeys,
        ServerKeys,
        check_exposure,
        client_keys,
        host_certificates,
        is_loopback,
        listener_keys,
        name_of,
        own_endorsement,
        server_keys,
    )
    from aedit.proto.rpc.server import Server, serve
    from aedit.proto.rpc.service import Caller, CallHandlers, HubCore, Refusal, Service, donor_service
    from aedit.proto.rpc.signing_key import KEY_BYTES, SIGNATURE_BYTES, SigningKey, is_signed_by
    from aedit.proto.rpc.statement import VERSION, Statement, contradict, is_signed, parsed, place_of, signed
    from aedit.proto.rpc.vote_messages import VoterFile, answer_in, answer_out, proposal_in, proposal_out
    from aedit.proto.rpc.votes import Answer, Ballot, Extent, Proposal, Voter

__all__ = [
    "CA",
    "CHUNK_BYTES",
    "HUB",
    "KEY_BYTES",
    "LONGEST_REASON",
    "MESSAGE_BYTES",
    "MOST_EVIDENCE_BYTES",
    "MOST_GENERATIONS",
    "NAME",
    "NODE",
    "PROTOCOL",
    "READER",
    "REVOKED",
    "SECRET_CHARS",
    "SERVER",
    "SHARED",
    "SIGNATURE_BYTES",
    "TOKEN",
    "VERSION",
    "Answer",
    "Ballot",
    "CallContext",
    "CallHandlers",
    "Caller",
    "Calls",
    "ClientKeys",
    "DirectoryClient",
    "DirectoryCore",
    "Download",
    "Endorsement",
    "Extent",
    "FairPool",
    "HelloReply",
    "HelloRequest",
    "HostCertificates",
    "HubClient",
    "HubCore",
    "HubRefused",
    "HubUnreachable",
    "Identity",
    "Limits",
    "Metadata",
    "NobodyListens",
    "Notifier",
    "Patience",
    "Proposal",
    "PullHead",
    "PullRequest",
    "PushHead",
    "PushReply",
    "Quiet",
    "Rates",
    "Refusal",
    "RolloutStatement",
    "Server",
    "ServerCard",
    "ServerKeys",
    "Service",
    "SigningKey",
    "Span",
    "Statement",
    "StatusRequest",
    "TransferBroken",
    "Voter",
    "VoterFile",
    "Who",
    "accusation",
    "answer_in",
    "answer_out",
    "author_metadata",
    "caller_keys",
    "channel",
    "check_address",
    "check_exposure",
    "client_keys",
    "contradict",
    "directory_pb2",
    "directory_service",
    "donor_service",
    "frames",
    "generation",
    "generation_of",
    "greet",
    "host_certificates",
    "hub_pb2",
    "identity",
    "identity_statement",
    "is_author",
    "is_loopback",
    "is_signed",
    "is_signed_by",
    "is_signed_card",
    "last_term_before",
    "lineage",
    "listener_keys",
    "name_of",
    "new_secret",
    "own_endorsement",
    "parsed",
    "place_of",
    "proposal_in",
    "proposal_out",
    "raise_descriptor_limit",
    "read_revocations",
    "rollouts_pb2",
    "run_services",
    "secret_of",
    "serve",
    "server_keys",
    "sign_request",
    "signed",
    "signer_of",
    "stamp",
    "swarm_pb2",
    "term_text",
    "token_text",
    "version_of",
    "versions_pb2",
    "why",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
