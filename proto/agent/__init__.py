"""The node agent: the process that owns a node's connections, transfers and watchdog. Imports no torch."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.agent.agent_link import AgentLink, AgentLost, NodeRefused, attach, start_agent
    from aedit.proto.agent.leases import Leases
    from aedit.proto.agent.link import Answer, Link, Progress
    from aedit.proto.agent.plan import AgentPlan
    from aedit.proto.agent.rejoin import rejoin_secret
    from aedit.proto.agent.replica_finder import replicas_of_parts

__all__ = [
    "AgentLink",
    "AgentLost",
    "AgentPlan",
    "Answer",
    "Leases",
    "Link",
    "NodeRefused",
    "Progress",
    "attach",
    "rejoin_secret",
    "replicas_of_parts",
    "start_agent",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
