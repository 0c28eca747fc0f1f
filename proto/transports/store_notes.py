"""Notes that every process of a `torch.distributed` group sees, such as "round 12 is due" or "stop".

The notes are a list that only grows, in a store of its own. A thread per process waits for the next one, so
that reading is a dictionary look-up and no training step uses the network.
"""

import atexit
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

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
