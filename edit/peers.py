"""What comparing and averaging anything between nodes needs of an `Exchange`."""

from typing import Protocol

from torch import Tensor

from aedit.proto.transports.transport import Pending, Rows


class Peers(Protocol):
    """The other nodes, as far as they meet. A node of a hub meets nobody."""

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return one small float64 row per node, as `Transport.gather` does; only its own if it meets
        nobody."""

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Return the weighted mean over nodes of an fp32 vector. A value of weight 0 never leaves its
        node."""
