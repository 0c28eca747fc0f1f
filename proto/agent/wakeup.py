"""A pipe by which a trainer wakes its agent; its end tells the agent that the trainer has ended."""

import os
import select
import threading
from contextlib import suppress

RING = b"!"


class WakeSender:
    """The trainer's end. Never blocks: a full pipe has woken the agent already."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the agent."""
        with self._lock, suppress(BlockingIOError, BrokenPipeError):
            if self._fd >= 0:
                os.write(self._fd, RING)

    def close(self) -> None:
        """Close the pipe: the agent ends. May be called repeatedly."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


class WakeReceiver:
    """The agent's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wakeup or the timeout; return False if the trainer has ended."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        return not ready or len(os.read(self._fd, 65536)) > 0

    def close(self) -> None:
        """Close this end."""
        os.close(self._fd)
