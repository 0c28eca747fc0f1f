"""The gRPC services of a leading hub around its state machine and journal.

- `driver`: the calls of nodes and other hubs; begin here. `push_pull`: pseudo-gradients in, anchors out.
- `request_guard`: checks of callers, terms and leadership before a call is answered.
- `hub_worker`: time, merges, snapshots and the end of the run. `hello_responder`: the first call of a peer.
- `server_directory`: rollout servers. `messages`: conversion to protocol buffers. `metrics_page`: Prometheus.

`launch.hub.leading` puts them together; `proto.rpc` calls them.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.service import messages
    from aedit.async_sgd.service.driver import CoreSwitch, Driver
    from aedit.async_sgd.service.hello_responder import HelloResponder, check_part
    from aedit.async_sgd.service.hub_worker import HubWorker
    from aedit.async_sgd.service.messages import json_line
    from aedit.async_sgd.service.metrics_page import MetricsPage
    from aedit.async_sgd.service.push_pull import Signer, tensor_norms
    from aedit.async_sgd.service.request_guard import RequestGuard, fingerprint
    from aedit.async_sgd.service.server_directory import ServerDirectory

__all__ = [
    "CoreSwitch",
    "Driver",
    "HelloResponder",
    "HubWorker",
    "MetricsPage",
    "RequestGuard",
    "ServerDirectory",
    "Signer",
    "check_part",
    "fingerprint",
    "json_line",
    "messages",
    "tensor_norms",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
