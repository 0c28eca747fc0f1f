"""Leadership of a run and copies of its journal: elections, configurations, what may be acknowledged.

- `replica`: the rules as a state machine without clock, socket or file; begin here, with "Failover" in
  `docs/protocol.md`.
- `leadership`: one hub process: the rules with a clock, votes on disk and records in the journal.
- `journal_stream`: the leader streams its journal. `mirror`: the follower's copy, byte for byte.

`launch.hub` runs leaders and standbys; swarms use the same classes for each part.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.replication.journal_stream import stream_journal
    from aedit.async_sgd.replication.leadership import LEASE_S, Leadership, twin_text
    from aedit.async_sgd.replication.mirror import Mirror
    from aedit.async_sgd.replication.replica import Replica, placed_replicas

__all__ = [
    "LEASE_S",
    "Leadership",
    "Mirror",
    "Replica",
    "placed_replicas",
    "stream_journal",
    "twin_text",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
