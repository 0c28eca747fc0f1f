"""Leadership of a run: elections, configurations, what may be acknowledged. No clock, socket or file."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.replication.placed import placed_replicas
    from aedit.async_sgd.replication.replica import Replica

__all__ = [
    "Replica",
    "placed_replicas",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
