"""Policy versions on their way: from the rank's shared memory to the store, and from there to one server."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.proto.rpc import HubRefused, HubUnreachable
from aedit.proto.versions import PATTERNS, LineUnknown, Patterns, VersionLayout, VersionsClient, VersionStore
from aedit.spec_rollout.training import ArrayReader
from aedit.types import Layout

DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}
AGAIN_S = 1.0
"""Pause after a transfer that has failed."""
TORN_S = 0.002
"""Pause after a publication that was replaced while it was read."""


@dataclass(frozen=True, slots=True)
class VersionGiven:
    """A server has a version, or could not be given it."""

    version: int
    num_bytes: int
    seconds: float
    error: str = ""
    is_final: bool = False
    """It has refused: another try would end the same way."""


def version_layout(specs: Sequence[Sequence[Any]], layout: Layout, dtype: str = "") -> VersionLayout:
    """Return units and dtype of the versions of a rank.

    Args:
        specs: Name, shape and dtype of each tensor in the shared memory.
        layout: The sync units of the model.
        dtype: Of the versions; empty: that of the tensors.

    Raises:
        ValueError: A tensor of a unit is missing or has another shape, or the dtypes differ.
    """
    found = {name: (tuple(shape), dtype) for name, shape, dtype in specs}
    dtypes = set()
    for unit in layout.units:
        for tensor in unit.tensors:
            shape, kind = found.get(tensor.name, ((), "missing"))
            if shape != tensor.shape:
                raise ValueError(
                    f"tensor {tensor.name} of unit {unit.name} is {shape} ({kind}), expected {tensor.shape}"
                )
            dtypes.add(kind)
    if len(dtypes) != 1 or not dtypes <= {*DTYPES}:
        raise ValueError(
            f"the policy has tensors of {', '.join(sorted(dtypes))}: expected one of {', '.join(DTYPES)}"
        )
    found_dtype = DTYPES[dtypes.pop()]
    wanted = dtype or found_dtype
    if (found_dtype, wanted) not in {("fp64", "fp32"), (found_dtype, found_dtype)}:
        raise ValueError(f"the policy is {found_dtype} in the workers: its versions cannot be {wanted}")
    return VersionLayout(layout, wanted)


def in_dtype(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return bit patterns in the dtype of the versions, without loss.

    Raises:
        ValueError: They are fp64 and not those of fp32 values, as trained parameters are.
    """
    if dtype != "fp32" or values.dtype.itemsize == PATTERNS["fp32"].itemsize:
        return values
    wide = values.view(np.float64)
    short = wide.astype(np.float32)
    if not np.array_equal(short.astype(np.float64).view(values.dtype), values):
        raise ValueError("the weights are fp64 and have no equal in fp32, the dtype of policy versions")
    return short.view(PATTERNS["fp32"])


def tensors_of(layout: Layout, units: Mapping[str, Patterns]) -> dict[str, Patterns]:
    """Return copies of the tensors in the units of a version, by name."""
    found = {}
    for unit in layout.units:
        start = 0
        for tensor in unit.tensors:
            end = start + prod(tensor.shape)
            found[tensor.name] = units[unit.name][start:end].reshape(tensor.shape).copy()
            start = end
    return found


class VersionSource:
    """Moves publications from the shared memory to the store, in a thread of its own."""

    def __init__(
        self,
        reader: ArrayReader,
        store: VersionStore,
        line: str,
        stored: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        """Start the thread.

        Args:
            reader: Of the shared memory.
            store: For the versions.
            line: Their line.
            stored: Called with a version that is in the store.
            failed: Called with the error for which no version follows.
        """
        self._reader, self._store, self._line = reader, store, line
        self._stored, self._failed = stored, failed
        self._wanted = 0
        self._changed = threading.Condition()
        store.open(line)
        threading.Thread(target=self._work, name="versions", daemon=True).start()

    def publish(self, version: int) -> None:
        """Note that this version, or a newer one, is in the shared memory."""
        with self._changed:
            self._wanted = max(self._wanted, version)
            self._changed.notify()

    def _work(self) -> None:
        try:
            self._store_all()
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")

    def _store_all(self) -> None:
        stored = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > stored)  # noqa: B023
            found = self._reader.newest()
            if found is None or found.version < self._wanted:
                time.sleep(TORN_S)
                continue
            units = {
                unit.name: in_dtype(
                    np.concatenate([found.arrays[each.name].reshape(-1) for each in unit.tensors]),
                    self._store.layout.dtype,
                )
                for unit in self._store.layout.layout.units
            }
            self._store.publish(self._line, found.version, units)
            stored = found.version
            self._stored(stored)


class VersionSender:
    """Gives one server the newest version again and again, in a thread of its own."""

    def __init__(
        self,
        client: VersionsClient,
        store: VersionStore,
        line: str,
        secret: str,
        post: Callable[[VersionGiven], None],
    ) -> None:
        """Start the thread. secret: by which this server knows the author of the line."""
        self.offered: set[int] = set()
        """Versions that the server was offered."""
        self._client = client
        self._store, self._line, self._secret, self._post = store, line, secret, post
        self._wanted, self._closed = 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=f"versions {client.address}", daemon=True).start()

    def want(self, version: int) -> None:
        """Give the server this version, instead of an older one that has not begun."""
        with self._changed:
            self._wanted = max(self._wanted, version)
            self._changed.notify()

    def close(self) -> None:
        """End a transfer without waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._client.close()

    def _work(self) -> None:
        given = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted > given)  # noqa: B023
                if self._closed:
                    return
                version = self._wanted
            done = self._give(version)
            if not self._closed:
                self._post(done)
            if not done.error:
                given = version
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, AGAIN_S)

    def _give(self, version: int) -> VersionGiven:
        began_s = time.monotonic()
        self.offered.add(version)
        try:
            num_bytes = self._client.give(self._store, self._line, version, self._secret)
        except LineUnknown:  # a newer version has replaced it meanwhile
            return VersionGiven(version, 0, time.monotonic() - began_s, "it was replaced meanwhile")
        except HubUnreachable as error:
            return VersionGiven(version, 0, time.monotonic() - began_s, str(error))
        except HubRefused as error:
            return VersionGiven(version, 0, time.monotonic() - began_s, str(error), is_final=True)
        return VersionGiven(version, num_bytes, time.monotonic() - began_s)
