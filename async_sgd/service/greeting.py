"""What a hub says to everybody who asks."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.service import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What everybody may know who asks, in the words of HelloReply; the term is the hub's own."""

    protocol: int
    code: str
    version: str
    run: str
    config: str
    """The run's TOML."""
    addresses: Callable[[], tuple[str, ...]]
    standby: Callable[[], str]
    """Empty: nobody else could lead."""

    def reply(self, request: pb.HelloRequest, term: int) -> pb.HelloReply:
        """Refused, with the difference named, if the other is not of one kind with this hub."""
        for name in ("protocol", "code"):
            ours, theirs = getattr(self, name), getattr(request, name)
            if ours != theirs and (theirs or name == "protocol"):  # who trains its own loop names no code
                raise Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{name} {theirs or 'not given'} (aedit {request.version[:32]}), and this hub has {ours}"
                    f" (aedit {self.version}): use the same sources",
                )
        return pb.HelloReply(
            protocol=self.protocol,
            code=self.code,
            version=self.version,
            run=self.run,
            term=term,
            config=self.config,
            addresses=self.addresses(),
            standby=self.standby(),
        )
