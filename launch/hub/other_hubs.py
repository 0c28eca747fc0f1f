"""Calls to the other hubs of a run: which one leads, what it has, and requests for votes."""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import grpc

from aedit.async_sgd.hub import Hub
from aedit.async_sgd.replication import Leadership
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.proto.rpc import (
    Answer,
    HubClient,
    HubRefused,
    HubUnreachable,
    PortClosed,
    Proposal,
    answer_in,
    proposal_out,
    sign_request,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError

log = logging.getLogger(__name__)
_TIMEOUT_S, _LOOK_S = 3.0, 0.1
_SEARCH_TIMEOUT_S = 1.0
"""Of such a question in a swarm: while it is not known which replica leads, the part stands still."""
_ENDED_TIMEOUT_S = 0.5
_TELL_TIMEOUT_S = 60.0
Hello = pb.HelloReply | HubRefused | HubUnreachable
"""Answer of a hub, or the error in its place."""
_EVERY_S = 0.2
_CALL_TIMEOUT_S = 1.0
"""Interval and time limit of requests for votes."""


class OtherHubs:
    """The hubs besides this one that may lead."""

    def __init__(self, endpoint: HubEndpoint, question: Callable[[], pb.HelloRequest]) -> None:
        """Create them. question: returns the Hello of this hub."""
        self.endpoint, self._question = endpoint, question

    def newest_term(self) -> int:
        """Return the highest term that another hub knows; 0 if there is none or none answers.

        Raises UserError if one of this part refuses this hub: it is alive and may lead.
        """
        terms = [0]
        for address, answer in self._hellos(limit_s=self._limit_s):
            if isinstance(answer, pb.HelloReply):
                terms.append(answer.term)
            elif isinstance(answer, HubUnreachable):
                log.warning("%s: another hub of the run does not answer: %s", address, answer)
            elif answer.code is grpc.StatusCode.FAILED_PRECONDITION:
                log.warning("not a hub of this part: %s", answer)
            else:
                raise UserError(str(answer)) from answer
        return max(terms)

    def terms(self) -> tuple[int, int]:
        """Return the highest term under which another hub leads, and the highest that one has promised.

        0 stands for none that is known.
        """
        answers = [answer for _, answer in self._hellos() if isinstance(answer, pb.HelloReply)]
        leads = max((answer.term for answer in answers if answer.leads), default=0)
        return leads, max((answer.promised for answer in answers), default=0)

    def leader(
        self, least_term: int, stopping: threading.Event, *, without: str = ""
    ) -> tuple[str, int] | None:
        """Return the address and term of the first hub to answer that it leads; None if none does.

        Args:
            least_term: Leaders of lower terms do not count.
            stopping: Ends the search once it is set.
            without: Address of a hub that is not asked.
        """
        for address, answer in self._hellos(stopping, self._limit_s, without):
            if isinstance(answer, pb.HelloReply) and answer.leads and answer.term >= least_term:
                return address, answer.term
        return None

    def has_ended(self, address: str) -> bool:
        """Return whether no process listens at an address any more, though its machine answers."""
        return isinstance(self._hello(address, _ENDED_TIMEOUT_S), PortClosed)

    def tell(self, term: int) -> None:
        """Tell the other hubs that this one leads under `term`: a former leader that is alive must stop."""
        for address in self.endpoint.others:
            client = HubClient(address, self.endpoint.client_keys(), call_timeout_s=_TELL_TIMEOUT_S)
            try:
                client.confirm(pb.ConfirmRequest(term=term))
            except (HubUnreachable, HubRefused) as error:
                log.warning("telling %s the new term: %s", address, error)
            finally:
                client.close()

    def check_leader(self, address: str, event: Callable[..., None]) -> None:
        """Raise HubRefused if there is proof against the leader's peer: it is as one that leads no more."""
        if self.endpoint.is_shut_out(address):
            event("owner_shut_out", owner=address)
            text = f"there is proof that the owner at {address} gives nodes different anchors"
            raise HubRefused(grpc.StatusCode.FAILED_PRECONDITION, text)

    @property
    def _limit_s(self) -> float:
        return _TIMEOUT_S if self.endpoint.replicas is None else _SEARCH_TIMEOUT_S

    def _hellos(
        self, stopping: threading.Event | None = None, limit_s: float = _TIMEOUT_S, without: str = ""
    ) -> Iterator[tuple[str, Hello]]:
        """Ask all at once, and yield their answers as they come: one that is silent delays no other."""
        addresses = [address for address in self.endpoint.others if address != without]
        stopping = stopping or threading.Event()
        pool = ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="hello")
        try:
            asked = {pool.submit(self._hello, address, limit_s): address for address in addresses}
            waiting = set(asked)
            while waiting and not stopping.is_set():
                done, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
                yield from ((asked[one], one.result()) for one in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _hello(self, address: str, limit_s: float) -> Hello:
        keys = self.endpoint.client_keys()
        client = HubClient(address, keys, call_timeout_s=limit_s, until_it_listens=False)
        try:
            return client.hello(self._question())
        except (HubRefused, HubUnreachable) as error:
            log.info("asking another hub for its term: %s", error)
            return error
        finally:
            client.close()

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
        for address in self.endpoint.others:
            client = HubClient(address, self.endpoint.client_keys(), call_timeout_s=_TIMEOUT_S)
            try:
                yield address, client
            finally:
                client.close()


def _more(status: dict[str, Any], own: dict[str, int]) -> int:
    """Return how many more accepted pushes another hub has of each node, summed."""
    return sum(max(0, node["accepted"] - own.get(node["name"], 0)) for node in status["nodes"])


class VoteRequests:
    """Threads that send what `leadership` proposes to the other hubs, and pass the answers to `count`."""

    def __init__(
        self, endpoint: HubEndpoint, leadership: Leadership, count: Callable[[Answer], None]
    ) -> None:
        self._endpoint, self._leadership, self._count = endpoint, leadership, count
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name="request_votes", daemon=True)
            for index in range(endpoint.num_others)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads; a call that is on its way ends within a second."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self, index: int) -> None:
        for turn in itertools.count():
            if self._stopping.wait(_EVERY_S):
                return
            if (asks := self._leadership.asks()) is None:
                continue
            # There may be more addresses than threads: cards of a swarm may lie.
            if mine := self._endpoint.others[index :: len(self._threads)]:
                self._ask(mine[turn % len(mine)], asks)

    def _ask(self, address: str, asks: Proposal) -> None:
        keys = self._endpoint.client_keys()
        client = HubClient(address, keys, call_timeout_s=_CALL_TIMEOUT_S, until_it_listens=False)
        request = pb.ProposeRequest(
            run=self._endpoint.config.name, proposal=proposal_out(asks), part=self._endpoint.part_asked
        )
        if (key := self._endpoint.signing_key()) is not None:
            sign_request(request, key)
        try:
            self._count(answer_in(client.propose(request, _CALL_TIMEOUT_S)))
        except (HubUnreachable, HubRefused) as error:
            log.info("no answer to a proposal: %s", error)
        finally:
            client.close()
