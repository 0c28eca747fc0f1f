"""Ask the other hubs of a run for their votes, for as long as this one has something to ask."""

import itertools
import logging
import threading
from collections.abc import Callable

from aedit.async_sgd.service import Leadership
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.proto.rpc import (
    Answer,
    HubClient,
    HubRefused,
    HubUnreachable,
    Proposal,
    answer_in,
    proposal_out,
    sign_request,
)
from aedit.proto.rpc import hub_pb2 as pb

log = logging.getLogger(__name__)

_EVERY_S = 0.2
_CALL_TIMEOUT_S = 1.0


class Canvass:
    """Threads that ask the other hubs what `leadership` asks, and hand the answers to `count`."""

    def __init__(
        self, endpoint: HubEndpoint, leadership: Leadership, count: Callable[[Answer], None]
    ) -> None:
        self._endpoint, self._leadership, self._count = endpoint, leadership, count
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name="canvass", daemon=True)
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
