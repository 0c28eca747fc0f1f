"""Return the memory of freed arrays to the operating system."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 2 * 2**20
_KEPT_BYTES = 4 * 2**20


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
