"""The part of an `Exchange` that compares and averages values between nodes."""

from typing import Protocol

from torch import Tensor

from aedit.proto.transports import Pending, Rows


class Peers(Protocol):
    """The other nodes that take part in exchanges. A node of a hub has none."""

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return one small float64 row per node, as `Transport.gather` does; without peers, only its own."""

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Return the weighted mean over nodes of an fp32 vector. A value of weight 0 is not sent."""
