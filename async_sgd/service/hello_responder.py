"""The answer of a hub to Hello, the first call of every peer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from aedit.proto.rpc import Refusal
from aedit.proto.rpc import hub_pb2 as pb

_SHOWN = 64
"""Characters of a text from an unknown peer that go into an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloResponder:
    """The content of HelloReply, which is public; the term is the hub's own."""

    protocol: int
    method: Mapping[str, str]
    """The settings that decide the result and are not at their default, by dotted name, as TOML."""
    difference: Callable[[Mapping[str, str]], tuple[str, str, str] | None]
    """The first setting that another method has otherwise: its name, its value here and there."""
    version: str
    run: str
    config: str
    """The run's TOML."""
    addresses: Callable[[], tuple[str, ...]]
    standby: Callable[[], str]
    """Empty: no other hub could lead."""
    part: int = 0
    """In a swarm the part that this hub keeps, counted from 1; 0: there is nothing to confuse."""

    def question(self, promised: int = 0) -> pb.HelloRequest:
        """Return the Hello that this hub sends to another one of its run, which must have the same method.

        promised: highest term that this hub has promised to support.
        """
        return pb.HelloRequest(
            protocol=self.protocol,
            version=self.version,
            method=pb.Method(settings=dict(self.method)),
            part=self.part,
            promised=promised,
        )

    def reply(
        self,
        request: pb.HelloRequest,
        term: int,
        *,
        leads: bool = False,
        promise: pb.Answer | None = None,
    ) -> pb.HelloReply:
        """Return the reply. Raises Refusal, with the difference named, for another protocol or method.

        promise: the highest term that this hub has promised to support, signed.
        """
        theirs = f"aedit {request.version[:_SHOWN]}"
        if request.protocol != self.protocol:
            raise _refusal(
                f"protocol {request.protocol} ({theirs}), and this hub has {self.protocol}"
                f" (aedit {self.version}): install a version with the hub's protocol"
            )
        differs = self.difference(request.method.settings) if request.HasField("method") else None
        if differs is not None:
            name, here, there = (text[:_SHOWN] for text in differs)
            raise _refusal(
                f"{name} is {here} at this hub (aedit {self.version}) and {there} here ({theirs}): set it as"
                " the hub has it, or join with `aedit join`, which takes the hub's configuration"
            )
        check_part(request.part, self.part)
        return pb.HelloReply(
            protocol=self.protocol,
            version=self.version,
            run=self.run,
            term=term,
            config=self.config,
            addresses=self.addresses(),
            standby=self.standby(),
            leads=leads,
            promise=promise,
        )


def check_part(asked: int, own: int) -> None:
    """Raise Refusal for a call that is for the hub of another part; 0: the caller, or this hub, has none.

    A peer may name this hub's address for a part that it does not keep, or the port was another hub's before.
    """
    if asked and own and asked != own:
        text = f"this hub keeps part {own - 1}, and part {asked - 1} is asked for: ask another one"
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)


def _refusal(text: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
