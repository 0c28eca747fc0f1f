"""Return the memory of freed arrays to the operating system."""

import ctypes
import mmap
import threading
import time
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 2 * 2**20
_KEPT_BYTES = 4 * 2**20
_GROWN_BYTES = 32 * 2**20
_LOOK_S = 5.0


def give_back_what_is_freed() -> None:
    """Give every large array pages of its own, which are returned with it.

    By default glibc keeps freed arrays of up to 32 MiB, in an arena per thread: measured, a hub with 184 MiB
    of parameters took 180 MiB more. Small buffers, such as chunks of pushes, stay with glibc for reuse, in
    one arena; see `keep_one_arena`. Does nothing with another C library.
    """
    keep_one_arena()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        threading.Thread(target=_trim, name="trim", daemon=True).start()


def keep_one_arena() -> None:
    """Let all threads take memory from one arena.

    The arenas of many threads are never full and never empty: with one per thread, a hub that was sent
    100,000 calls of every kind grew by half, and a rollout server by 2 KiB per request without an end. Does
    nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


class Trimmer:
    """Returns free pages between what is in use, when there are many more than after the last time.

    Chunks of a thousand pushes are small buffers, and the last one of them would hold all that were before.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._free = getattr(self._libc, "mallinfo2", None)
        if self._free is not None:
            self._free.restype = _MallInfo
        self._known_bytes = self._measured()

    def look(self) -> bool:
        """Return free pages if that is worthwhile, and whether it was."""
        found = self._measured()
        if found > self._known_bytes + _GROWN_BYTES:
            self._libc.malloc_trim(0)
            self._known_bytes = self._measured()
            return True
        self._known_bytes = min(self._known_bytes, found)
        return False

    def _measured(self) -> int:
        """Return the bytes that are free inside the C library, which counts returned pages too.

        Of a C library that does not tell, the resident memory.
        """
        return int(self._free().fordblks) if self._free is not None else _resident_bytes()


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _trim() -> None:
    trimmer = Trimmer()
    while True:
        time.sleep(_LOOK_S)
        trimmer.look()


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
