"""Transports of the barrier path: means of tensors among nodes, and notes that all of them see.

- `transport`: the interface; begin here
- `memory`: nodes as threads of one process, in real or in virtual time
- `c10d`: `torch.distributed`

Called by `edit` and `launch`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.transports.c10d import TorchTransport
    from aedit.proto.transports.memory import MemoryWorld, VirtualTransport
    from aedit.proto.transports.transport import Mean, PeersMissing, Pending, Rows, Transport, then

__all__ = [
    "Mean",
    "MemoryWorld",
    "PeersMissing",
    "Pending",
    "Rows",
    "TorchTransport",
    "Transport",
    "VirtualTransport",
    "then",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
