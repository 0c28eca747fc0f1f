"""Client of `Versions`: follows a line, fetches versions, and gives versions to servers."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc

from aedit.proto.rpc import (
    Calls,
    HubRefused,
    Metadata,
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
            reply = self.call("Versions/Newest", request, pb.Manifest, wait_s + _ANSWERS_WITHIN_S)
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
        what = f"take version {serial} of line {line}"
        return self.retried(
            what,
            partial(self._give, store, manifest, author_metadata(secret) if secret else ()),
            self.patience(manifest.num_bytes),
        )

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
        with self.watched() as (stream, calls):

            def moved(num_bytes: int) -> None:
                stream.moved(num_bytes)
                patience.moved(num_bytes)

            asked: Any = self.bulk.unary_stream("/aedit.v1.Versions/Get")
            calls.append(asked(request.SerializeToString(), timeout=patience.left_s))
            try:
                receiving.take(calls[0], moved, unit=unit)
            except TransferRefused as error:
                if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                    raise HubRefused(grpc.StatusCode.DATA_LOSS, str(error)) from error
                raise TransferBroken(str(error)) from error
            except (frames.ChunkDamaged, frames.ArrayIncomplete) as error:
                raise TransferBroken(str(error)) from error
            except ValueError as error:
                raise HubRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def _give(self, store: VersionStore, manifest: Manifest, author: Metadata, patience: Patience) -> int:
        num_missing, num_bytes = len(manifest.units) + 1, 0
        request = pb.OfferRequest(manifest=manifest.message)
        while missing := self.call("Versions/Offer", request, pb.OfferReply, metadata=author).missing:
            if len(missing) >= num_missing:
                raise TransferBroken(f"{len(missing)} units are missing, although they were sent")
            num_missing = len(missing)
            for each in missing:
                made = store.transfer(manifest.line, each.unit, each.base, manifest.serial)
                num_bytes += self._put(made, each, author, patience)
        return num_bytes

    def _put(
        self,
        made: tuple[pb.TransferHead, bytes],
        wanted: pb.Missing,
        author: Metadata,
        patience: Patience,
    ) -> int:
        offset = wanted.offset if wanted.transfer == made[0].sha256 else 0
        head, data = made[0].SerializeToString(), memoryview(made[1])
        with self.watched() as (stream, calls):

            def messages() -> Iterator[bytes]:
                for chunk in frames.chunks(head, data, offset=offset):
                    yield frames.pack_chunk(chunk)
                    stream.moved(len(chunk.data))
                    patience.moved(len(chunk.data))

            put: Any = self.bulk.stream_unary("/aedit.v1.Versions/Put")
            calls.append(put.future(messages(), timeout=patience.left_s, metadata=author))
            calls[0].result()
        return len(data) - offset
