"""The node agent: the process that owns a node's connections, transfers and watchdog. Imports no torch.

- `link`: the interface for trainers; begin here. `agent_link`: its implementation, which starts the agent
- `plan`: the agent's configuration. `mailbox`: the memory that ranks and agent share, and the wakeups
- `agent_main`, `agent`: the process, and its loop. `joining`: the first anchors
- `membership`: join, heartbeats, failover, votes; where the hubs of a part are
- `unit_transfers`: push and pull of a unit. `leases`: leased samples, speed, watchdog
- `connections`: clients, and the server that gives anchors to other nodes

Called by `edit`, `async_sgd` and `launch`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.agent.agent_link import AgentLink, AgentLost, NodeRefused, attach_agent, start_agent
    from aedit.proto.agent.leases import Leases
    from aedit.proto.agent.link import Answer, Link, Progress
    from aedit.proto.agent.membership import replicas_of_parts
    from aedit.proto.agent.plan import STREAMS, AgentPlan, rejoin_secret

__all__ = [
    "STREAMS",
    "AgentLink",
    "AgentLost",
    "AgentPlan",
    "Answer",
    "Leases",
    "Link",
    "NodeRefused",
    "Progress",
    "attach_agent",
    "rejoin_secret",
    "replicas_of_parts",
    "start_agent",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
