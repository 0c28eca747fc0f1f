"""Nodes of one `torch.distributed` world: NCCL or Gloo collectives over the `sync` axis of the mesh.

All nodes must take part: a missing node fails the round on all others, at the deadline and by name.
"""

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from aedit.proto.transports.transport import ChannelNames, Mean, Once, PeersMissing, Rows
from aedit.types import PositiveFloat, checked

T = TypeVar("T")

LIMIT_S = 1800.0
"""Least time that a collective may be under way. A node that lands on arrival sends long before it waits, so
that `timeout_s` of a wait may be less."""


@checked()
class TorchTransport:
    """Transport over process groups of its own, so that no collective of the training loop can meet its own.

    Making it is a collective call of all ranks of `group`: one broadcast on that group, which is not used
    again and may be destroyed. So is `channel`, which connects groups of the channel's own.

    Args:
        group: Ranks that hold the same shard, one per node, such as `mesh.get_group("sync")`; None: the whole
            world. Its backends, Gloo or NCCL, are those of the transport's groups.
        timeout_s: Longest wait for the other nodes.
    """

    # `new_group` gives a rank that is not in it an int, which is refused by name.
    def __init__(
        self, group: dist.ProcessGroup | int | None = None, *, timeout_s: PositiveFloat = 1800.0
    ) -> None:
        if isinstance(group, int):
            raise ValueError(
                "TorchTransport: group: expected one with this rank, which is not a member of the group,"
                f" got {group}"
            )
        self.timeout_s = timeout_s
        self.name = ""
        self._backends = _backends(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        # Small rows go over Gloo where the group has it, so that no GPU is waited for.
        self._device = torch.device("cpu" if "gloo" in self._backends.values() else "cuda")
        self._notes = StoreNotes(group, timeout_s)
        self._connect()

    def channel(self, name: str | None = None) -> "TorchTransport":
        """See `Transport.channel`. Waits for all nodes; they are connected when it returns.

        Raises:
            PeersMissing: Another node has not called it within `timeout_s`.
        """
        self._check_open()
        made = copy(self)
        made.name = self._prefix + self._names.add(name)
        self._meet(len(self._names.names))
        made._connect()
        self._channels.append(made)
        return made

    def _meet(self, number: int) -> None:
        """Wait until all nodes have given channel `number` its name, and compare the names."""
        keys = [f"{self._prefix}channel {number} of {rank}" for rank in range(self._size)]
        store = self._notes.store
        store.set(keys[self._rank], self._names.names[-1])
        try:
            store.wait(keys, timedelta(seconds=self.timeout_s))
        except dist.DistStoreError as error:
            raise PeersMissing(
                f"{self._prefix}{self._names.names[-1]}: waited {self.timeout_s:g} s for all nodes to make "
                "this channel: make the same exchanges over a transport on all nodes, in the same order"
            ) from error
        self._names.compare({n: text.decode() for n, text in enumerate(store.multi_get(keys))}, self._rank)

    def _connect(self) -> None:
        """Connect process groups that nothing else uses, one for each backend.

        `torch.distributed.new_group` would not do: it names groups by how many a rank has made, which differs
        between ranks with groups of their own, and what it makes ends with the user's default group.
        """
        store = dist.PrefixStore(f"groups/{self.name}", self._notes.store)
        made = {name: self._make(name, store) for name in set(self._backends.values())}
        self._groups = {device: made[name] for device, name in self._backends.items()}
        self._names, self._channels = ChannelNames(), list[TorchTransport]()
        self._bytes_sent = 0

    def _make(self, backend: str, store: dist.Store) -> Any:
        limit = timedelta(seconds=max(LIMIT_S, self.timeout_s))
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, self._rank, self._size, timeout=limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    @property
    def _prefix(self) -> str:
        return f"{self.name}/" if self.name else ""

    @property
    def bytes_sent(self) -> int:
        """See `Transport.bytes_sent`."""
        return self._bytes_sent + sum(channel.bytes_sent for channel in self._channels)

    def gather(self, key: str, row: Tensor) -> Once[Rows]:
        """See `Transport.gather`."""
        mine = row.detach().to(self._device, torch.float64, copy=True)
        rows = mine.new_empty(self._size, mine.numel())
        work = self._group(mine).allgather([list(rows)], [mine])
        return self._under_way(key, work, mine, lambda: Rows(rows.cpu(), self._rank))

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> Once[Mean]:
        """See `Transport.weighted_mean`."""
        # The weight rides behind its value: one collective, not two.
        packed = value.new_empty(value.numel() + 1)
        flat, weighted = value.detach().reshape(-1), packed[:-1]
        if isinstance(weight, Tensor):  # on its device: nothing is waited for
            weighted.copy_(torch.where(weight > 0, flat * weight, 0.0))
        elif weight > 0:
            torch.mul(flat, weight, out=weighted)
        else:  # not 0 * nan, which would be nan
            weighted.zero_()
        packed[-1] = weight
        work = self._group(packed).allreduce([packed])

        def mean() -> Mean:
            total = packed[-1]
            return Mean(packed[:-1].div_(torch.where(total > 0, total, 1.0)).view_as(value), total)

        return self._under_way(key, work, packed, mean)

    def _group(self, sent: Tensor) -> Any:
        self._check_open()
        if sent.device.type not in self._groups:
            raise ValueError(
                f"a tensor on {sent.device} cannot be sent: the process group has backends for "
                f'{", ".join(self._groups)}; init_process_group("cpu:gloo,cuda:nccl") has both'
            )
        return self._groups[sent.device.type]

    def _check_open(self) -> None:
        if not self._groups:
            raise ValueError("this TorchTransport is closed: close it after the last `with sync:` block")

    def _under_way(self, key: str, work: dist.Work, sent: Tensor, read: Callable[[], T]) -> Once[T]:
        self._bytes_sent += sent.numel() * sent.element_size()

        def answer() -> T:
            try:
                work.wait(timedelta(seconds=self.timeout_s))
            except RuntimeError as error:  # what c10d raises for a dead peer as well as for a passed deadline
                reason = str(error).splitlines()[0]
                raise PeersMissing(
                    f"{self._prefix}{key}: waited up to {self.timeout_s:g} s for the other nodes: {reason}"
                ) from error
            return read()

        return Once(work.is_completed, answer)

    def post(self, key: str, text: str) -> None:
        """See `Transport.post`."""
        self._notes.post(self._prefix + key, text)

    def read(self, key: str) -> str | None:
        """See `Transport.read`."""
        return self._notes.read(self._prefix + key)

    def close(self) -> None:
        """See `Transport.close`. A channel closes with the transport that it was made of."""
        if not self.name:
            self._notes.close()
            self._disconnect()

    def _disconnect(self) -> None:
        for channel in self._channels:
            channel._disconnect()
        for group in set(self._groups.values()):
            group.abort()  # a collective without its peers would keep the thread that runs it
        self._groups = {}


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend that a process group has for each type of device."""
    text = str(dist.get_backend_config(group))
    found = dict(part.split(":") for part in text.split(","))
    if not torch.cuda.is_available():
        found.pop("cuda", None)
    used = {device: name for device, name in found.items() if device in ("cpu", "cuda")}
    if other := sorted(set(used.values()) - {"gloo", "nccl"}):
        raise ValueError(
            f"TorchTransport: the backend of the process group must be gloo or nccl, got {other[0]}: give a "
            'group made by torch.distributed.new_group(backend="gloo")'
        )
    return used


_WAIT = timedelta(hours=1)
"""How long to listen at a time. Long, because the store writes a warning to the log whenever it is over."""

_CLOSE_LIMIT_S = 5.0


class StoreNotes:
    """Notes of one group. Created on every rank at the same time; the group's first rank serves the store."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        leads = dist.get_rank(group) == 0
        beside_master = os.environ.get("GROUP_RANK", str(dist.get_rank())) == "0"
        host = (os.environ.get("MASTER_ADDR") if beside_master else None) or socket.gethostname()
        mine = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout) if leads else None
        host, port = _tell(group, host, mine.port if mine else 0)
        self._serves, self._size = leads, dist.get_world_size(group)
        self.store = mine or TCPStore(host, port, is_master=False, timeout=timeout)
        """Store of the group, which serves more than notes."""
        self._watch = TCPStore(host, port, is_master=False, timeout=timeout)
        self._notes: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="aedit-board", daemon=True)
        self._thread.start()
        # A thread inside the store when the interpreter ends would abort the process.
        atexit.register(self.close)

    def post(self, key: str, text: str) -> None:
        """Append a note; the first one under a key stays."""
        n = self.store.add("count", 1)
        self.store.set(f"note/{n}", f"{key}\n{text}")
        self._notes.setdefault(key, text)

    def read(self, key: str) -> str | None:
        """Return the note under `key`, if this process has it. Never blocks."""
        return self._notes.get(key)

    def close(self) -> None:
        """Stop listening. The process that serves the notes stays until all have closed, for some seconds.

        A process that ends without it calls it at its exit.
        """
        atexit.unregister(self.close)
        if self._closing.is_set():
            return
        self._closing.set()
        with suppress(RuntimeError):  # the serving process may be gone already
            self.post("closed", "")  # a last note wakes the thread
            left = self.store.add("left", 1)
            deadline = time.monotonic() + _CLOSE_LIMIT_S
            while self._serves and left < self._size and time.monotonic() < deadline:
                time.sleep(0.01)
                left = self.store.add("left", 0)
        self._thread.join(_CLOSE_LIMIT_S)

    def _follow(self) -> None:
        n = 1
        while not self._closing.is_set():
            try:
                self._watch.wait([f"note/{n}"], _WAIT)
                key, _, text = self._watch.get(f"note/{n}").decode().partition("\n")
            except dist.DistStoreError:
                continue  # a quiet hour
            except (RuntimeError, OSError):
                return  # the serving process is gone; the next collective says so by name
            self._notes.setdefault(key, text)
            n += 1


def _tell(group: dist.ProcessGroup | None, host: str, port: int) -> tuple[str, int]:
    """Broadcast the first rank's address, as bytes in a tensor: nothing is pickled."""
    device = "cpu" if "gloo" in str(dist.get_backend(group)) else "cuda"
    text = torch.zeros(256, dtype=torch.uint8, device=device)
    raw = f"{host}:{port}".encode()
    if dist.get_rank(group) == 0:
        text[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8, device=device)
    dist.broadcast(text, group_src=0, group=group)
    host, _, number = bytes(text.tolist()).rstrip(b"\0").decode().rpartition(":")
    return host, int(number)
