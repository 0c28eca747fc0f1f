"""The journal of a hub: what it decides is written down before it is applied; snapshots and recovery.

- `ledger`: state machine and journal behind one lock; begin here.
- `journal`: segments, appended and flushed. `frames`: their format, with checksums and the chain of hashes.
- `encoding`: records as JSON, payloads of pushes in the file. `snapshot`: the whole state in one file.
- `store`: the folder: recovery, pruning. `receipts`: proofs of what was acknowledged.

`service` commits through the ledger; `replication` copies journals to standbys.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.journal.encoding import Payload, decode_records
    from aedit.async_sgd.journal.frames import (
        FILE_BYTES,
        RECORDS,
        Chain,
        Damaged,
        File,
        Frame,
        chain_of,
        frame_at,
        read_head,
    )
    from aedit.async_sgd.journal.journal import (
        NOTE,
        Journal,
        JournalBroken,
        NoSpace,
        Position,
        segment_path,
    )
    from aedit.async_sgd.journal.ledger import Ledger, Unconfirmed
    from aedit.async_sgd.journal.snapshot import read_snapshot
    from aedit.async_sgd.journal.store import (
        Store,
        batches,
        begin_after,
        check_gapless,
        check_payloads,
        delete_after,
        move_aside,
        moved_aside,
        records_after,
        segment_numbers,
        snapshot_path,
    )

__all__ = [
    "FILE_BYTES",
    "NOTE",
    "RECORDS",
    "Chain",
    "Damaged",
    "File",
    "Frame",
    "Journal",
    "JournalBroken",
    "Ledger",
    "NoSpace",
    "Payload",
    "Position",
    "Store",
    "Unconfirmed",
    "batches",
    "begin_after",
    "chain_of",
    "check_gapless",
    "check_payloads",
    "decode_records",
    "delete_after",
    "frame_at",
    "move_aside",
    "moved_aside",
    "read_head",
    "read_snapshot",
    "records_after",
    "segment_numbers",
    "segment_path",
    "snapshot_path",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
