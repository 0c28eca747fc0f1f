"""Client of `Versions`: follows a line, fetches versions, and gives versions to servers."""

from functools import partial

import grpc

from aedit.proto.rpc import (
    Calls,
    HubRefused,
    Patience,
    TransferBroken,
    author_metadata,
    frames,
)
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions.manifest import Manifest
from aedit.proto.versions.receiving import Receiving, TransferRefused
from aedit.proto.versions.store import VersionStore

_ANSWERS_WITHIN_S = 10.0
"""Beyond the time that `Newest` waits."""


class VersionsClient(Calls):
    """Open connections to one process that serves versions. Any thread may call.

    Every method raises HubUnreachable after its deadline, and HubRefused if the other side refuses.
    """

    def newest(self, line: str, *, after: int = 0, wait_s: float = 0.0) -> Manifest | None:
        """Return the newest manifest of a line, after at most `wait_s` if none is newer than `after`.

        None if the line is unknown there or has no version yet. Raises ValueError for a wrong manifest.
        """
        request = pb.NewestRequest(line=line, after=after, wait_s=wait_s)
        try:
            ask = self.call_late if wait_s > 0 else self.call
            reply = ask("Versions/Newest", request, pb.Manifest, wait_s + _ANSWERS_WITHIN_S)
        except HubRefused as refused:
            if refused.code is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        manifest = Manifest.from_message(reply)
        if manifest.line != line:
            raise ValueError(f"{self.address} sent a version of line {manifest.line}, not of {line}")
        return manifest

    def fetch(self, receiving: Receiving) -> None:
        """Fetch all units that `receiving` lacks; what has arrived from others is not fetched again.

        Raises HubRefused, also if what was sent does not make the units: then ask another sender.
        """
        for missing in receiving.missing:
            self.retried(
                f"get unit {missing.unit}",
                partial(self._get, receiving, missing.unit),
                self.patience(receiving.manifest.unit(missing.unit).num_bytes),
            )

    def give(self, store: VersionStore, line: str, serial: int, secret: str = "") -> int:
        """Give the other side a version of a line that it knows to be this node's; return the bytes sent.

        secret: By which the other side knows the author of the line, see proto/rpc/identity.py.

        Raises LineUnknown if the store does not have the version any more.
        """
        manifest = store.manifest(line, serial)
        request = pb.OfferRequest(manifest=manifest.message)
        author = author_metadata(secret) if secret else ()

        def once(patience: Patience) -> int:
            num_missing, num_bytes = len(manifest.units) + 1, 0
            while missing := self.call("Versions/Offer", request, pb.OfferReply, metadata=author).missing:
                if len(missing) >= num_missing:
                    raise TransferBroken(f"{len(missing)} units are missing, although they were sent")
                num_missing = len(missing)
                for each in missing:
                    head, data = store.transfer(line, each.unit, each.base, serial)
                    offset = each.offset if each.transfer == head.sha256 else 0
                    first, view = head.SerializeToString(), memoryview(data)
                    self.send_array("Versions/Put", first, view, patience, offset=offset, metadata=author)
                    num_bytes += len(data) - offset
            return num_bytes

        what = f"take version {serial} of line {line}"
        return self.retried(what, once, self.patience(manifest.num_bytes))

    def _get(self, receiving: Receiving, unit: str, patience: Patience) -> None:
        wanted = next((each for each in receiving.missing if each.unit == unit), None)
        if wanted is None:
            return
        request = pb.GetRequest(
            line=receiving.manifest.line,
            serial=receiving.manifest.serial,
            unit=unit,
            base=wanted.base,
            offset=wanted.offset,
            transfer=wanted.transfer,
        )
        with self.receive_array("Versions/Get", request, patience) as (messages, moved):
            try:
                receiving.take(messages, moved, unit=unit)
            except TransferRefused as error:
                if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                    raise HubRefused(grpc.StatusCode.DATA_LOSS, str(error)) from error
                raise TransferBroken(str(error)) from error
            except (frames.ChunkDamaged, frames.ArrayIncomplete) as error:
                raise TransferBroken(str(error)) from error
            except ValueError as error:
                raise HubRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
