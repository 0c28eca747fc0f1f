"""Receipts: what a hub has acknowledged, in a form that a node can show later.

A receipt names a position of the journal before which everything is durable, and the chain up to there. The
hub signs it with the journal's seed, so that a node cannot invent one. Nodes show their newest receipt; a hub
whose journal ends earlier, or has other records there, has lost something that was acknowledged.
"""

import hmac
import secrets
import struct

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.journal.frames import Damaged, File, chain_of
from aedit.async_sgd.journal.journal import DurableEnd, Journal, Position, segment_path
from aedit.proto.rpc import hub_pb2 as pb

_SIGNED = struct.Struct("<QQQ32s")
_MOST_CHECKED = 4096


class Receipts:
    """Gives receipts for a journal and checks them. Any thread may call."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._process = secrets.randbits(63) | 1
        """Random number of this process. Its own receipts need no check: its journal has their records."""
        self._checked: set[bytes] = set()

    def give(self, end: DurableEnd) -> pb.Receipt:
        """Return the receipt for everything before `end`."""
        (segment, offset), chain = end
        receipt = pb.Receipt(
            epoch=self._journal.epoch,
            process=self._process,
            segment=segment,
            offset=offset,
            chain=chain,
        )
        receipt.mac = self._mac(receipt)
        return receipt

    def lacks(self, receipt: pb.Receipt) -> bool:
        """Return whether the journal has lost what the receipt is for.

        Raises Denied if the receipt is of another journal, or was not given by a hub of this one.
        """
        own = self._journal.epoch
        if not receipt.epoch or (receipt.epoch == own and receipt.process == self._process):
            return False
        if receipt.epoch != own:
            raise Denied(
                "different",
                f"this node has trained with the journal {receipt.epoch[:16]!r}, and this hub has {own!r}:"
                " start the node again to take this hub's anchors, or copy the journal back to the hub",
            )
        if receipt.mac in self._checked:
            return False
        if not hmac.compare_digest(receipt.mac, self._mac(receipt)):
            raise Denied("different", "this node shows a receipt that no hub of this run has given")
        if not self.has((receipt.segment, receipt.offset), receipt.chain):
            return True
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(receipt.mac)
        return False

    def has(self, position: Position, chain: bytes) -> bool:
        """Return whether the records before a position are those of this chain.

        Those of a segment that was deleted are in a snapshot: this cannot tell them from others.
        """
        if position > self._journal.position:
            return False
        if (known := self._journal.chain_at(position)) is not None:
            return known == chain
        try:
            file = File(segment_path(self._journal.directory, position[0]))
            return chain_of(file, position[1]).digest == chain
        except FileNotFoundError:
            return True
        except Damaged:
            return False

    def _mac(self, receipt: pb.Receipt) -> bytes:
        chain = receipt.chain[:32]
        return self._journal.mac(_SIGNED.pack(receipt.process, receipt.segment, receipt.offset, chain))
