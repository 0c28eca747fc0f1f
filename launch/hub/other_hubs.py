"""Ask the other hubs of a run about its state, when a hub starts."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc

from aedit.async_sgd.hub.hub import Hub
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.client import HubClient, HubRefused, HubUnreachable
from aedit.types import UserError

log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0


class OtherHubs:
    """The hubs besides this one that may lead."""

    def __init__(self, endpoint: HubEndpoint, question: pb.HelloRequest) -> None:
        self._endpoint, self._question = endpoint, question

    def newest_term(self) -> int:
        """Return the highest term that another hub knows; 0 if there is none or none answers.

        Raises UserError if one of this part refuses this hub: it is alive and may lead.
        """
        terms = [0]
        for address, client in self._clients():
            try:
                terms.append(client.hello(self._question).term)
            except HubRefused as error:
                if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise UserError(str(error)) from error
                log.warning("not a hub of this part: %s", error)
            except HubUnreachable as error:
                log.warning("%s: another hub of the run does not answer: %s", address, error)
        return max(terms)

    def leading_term(self) -> int:
        """Return the highest term under which another hub leads; 0 if none is known."""
        terms = [0]
        for _, client in self._clients():
            try:
                hello = client.hello(self._question)
            except (HubRefused, HubUnreachable) as error:
                log.warning("asking another hub for its term: %s", error)
                continue
            terms.append(hello.term if hello.leads else 0)
        return max(terms)

    def what_is_missing(self, hub: Hub, identity: int) -> str:
        """Return a text for the operator who lets this hub lead without a vote: what may be lost."""
        state = hub.state
        lines = [
            f"--force-lead: the journal here ends {state.elapsed_s:.1f} s into the run, term {state.term}"
        ]
        newest = state.configs[-1] if state.configs else None
        if newest is not None and identity in newest.replicas:
            lines.append(
                "  it has every acknowledged push, unless the others agreed to go on without this hub"
            )
        else:
            lines.append("  it was not waited for: pushes that were acknowledged since may be lost")
        own = {member.name: member.accepted for member in state.members}
        for address, client in self._clients():
            try:
                status = json.loads(client.status(pb.StatusRequest()).json)
            except (HubUnreachable, HubRefused):
                lines.append(f"  {address} does not answer: what it has acknowledged alone is lost")
                continue
            lines.append(
                f"  {address} has {_more(status, own)} accepted pushes that are not here: they are lost"
            )
        return "\n".join(lines)

    def _clients(self) -> Iterator[tuple[str, HubClient]]:
        for address in self._endpoint.others:
            client = HubClient(address, self._endpoint.client_keys(), call_timeout_s=_TIMEOUT_S)
            try:
                yield address, client
            finally:
                client.close()


def _more(status: dict[str, Any], own: dict[str, int]) -> int:
    """Return how many more accepted pushes another hub has of each node, summed."""
    return sum(max(0, node["accepted"] - own.get(node["name"], 0)) for node in status["nodes"])
