"""Peak of the resident memory of this process, of all its threads."""

import ctypes
from pathlib import Path


def peak_bytes(act):
    """Return the most bytes of memory that `act()` took at a time beyond those before it (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and kept would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
