"""The journal of a hub: what it decides is written down before it happens; snapshots and recovery."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.journal.frames import Damaged, File
    from aedit.async_sgd.journal.journal import Journal, JournalBroken, Mark, NoSpace, Position, segment_path
    from aedit.async_sgd.journal.ledger import Ledger, Unconfirmed
    from aedit.async_sgd.journal.mirror import Mirror
    from aedit.async_sgd.journal.norms import tensor_norms
    from aedit.async_sgd.journal.partial import pieces
    from aedit.async_sgd.journal.payload import Payload
    from aedit.async_sgd.journal.receipts import Unproven
    from aedit.async_sgd.journal.store import (
        Store,
        batches,
        begin_after,
        check_gapless,
        check_payloads,
        segment_numbers,
        snapshot_path,
    )

__all__ = [
    "Damaged",
    "File",
    "Journal",
    "JournalBroken",
    "Ledger",
    "Mark",
    "Mirror",
    "NoSpace",
    "Payload",
    "Position",
    "Store",
    "Unconfirmed",
    "Unproven",
    "batches",
    "begin_after",
    "check_gapless",
    "check_payloads",
    "pieces",
    "segment_numbers",
    "segment_path",
    "snapshot_path",
    "tensor_norms",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
