"""Answers of a peer to those who join the run or look at it: its configuration, and the state of parts."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import aedit
from aedit.async_sgd.service import HelloResponder
from aedit.launch.config import RunConfig, difference, method, to_toml
from aedit.proto.rpc import (
    PROTOCOL,
    ClientKeys,
    HubClient,
    HubRefused,
    HubUnreachable,
    Limits,
    Service,
    run_services,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import ReplicasFile

_ASK_S = 2.0


class PeerService:
    """Hello and Status of a peer. Any thread may call."""

    def __init__(
        self,
        config: RunConfig,
        replicas: ReplicasFile,
        keys: ClientKeys,
        peers: Callable[[], Sequence[dict[str, object]]],
        troubles: Callable[[], Sequence[str]],
    ) -> None:
        """Answer for the run.

        Args:
            config: Of the run.
            replicas: Where the replicas of each part are.
            keys: For calls to their owners.
            peers: Returns the live peers.
            troubles: Returns what is wrong with each part, or became of it; "" if all is as it was.
        """
        self._config, self._replicas, self._keys = config, replicas, keys
        self._peers, self._troubles = peers, troubles
        self._responder = HelloResponder(
            protocol=PROTOCOL,
            method=(own := method(config)),
            difference=partial(difference, own),
            version=aedit.__version__,
            run=config.name,
            config=to_toml(config, defaults=False),
            addresses=lambda: tuple(part.owner for part in replicas.parts()),
            standby=lambda: "",
        )

    def services(self) -> tuple[Service, ...]:
        """Return the services, to be served beside the exchange of cards."""
        return run_services(self.hello, self.status, Limits())

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Return the run's configuration."""
        return self._responder.reply(request, 0)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Return as JSON the live peers, and the status of each part as its owner gives it."""
        parts = [self._of_part(part.owner, request) for part in self._replicas.parts()]
        said: dict[str, Any] = {"run": self._config.name, "peers": list(self._peers()), "parts": parts}
        said["troubles"] = list(self._troubles())
        return pb.StatusReply(json=json.dumps(said))

    def _of_part(self, owner: str, request: pb.StatusRequest) -> dict[str, Any] | None:
        """Return the status of a part, None while it has no owner that gives one."""
        if not owner:
            return None
        client = HubClient(owner, self._keys, call_timeout_s=_ASK_S)
        try:
            found = json.loads(client.status(request, _ASK_S).json)
            leads = isinstance(found, dict) and "follows" not in found
            return found | {"owner": owner} if leads else None
        except (HubUnreachable, HubRefused, ValueError, RecursionError):
            return None
        finally:
            client.close()
