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
    of parameters took 180 MiB more. Small buffers, such as chunks of pushes, stay with glibc for reuse; but
    in one arena, as those of many threads are never full and never empty: a hub that was sent 100,000 calls
    of every kind grew by half with one per thread. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)
        threading.Thread(target=_trim, name="trim", daemon=True).start()


def _trim() -> None:
    """Return free pages between what is in use, whenever the process has grown.

    Chunks of a thousand pushes are small buffers, and the last one of them would hold all that were before.
    """
    libc = ctypes.CDLL(None)
    after = _resident_bytes()
    while True:
        time.sleep(_LOOK_S)
        if _resident_bytes() > after + _GROWN_BYTES:
            libc.malloc_trim(0)
            after = _resident_bytes()
        after = min(after, _resident_bytes())


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
