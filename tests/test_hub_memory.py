"""Tests that a hub gives the memory of merged pushes back to the system."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path

import numpy as np

from aedit.system import give_back_what_is_freed

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

if sys.argv[1] == "given back":
    give_back_what_is_freed()
size = 12 * 2**20
del_first = np.ones(size, np.uint8)
del del_first  # from now on glibc would keep arrays of this size
before = own_bytes()
arrays = [np.ones(size, np.uint8) for _ in range(4)]
small = [bytes(100_000) for _ in range(20)]  # lies above them
del arrays
print(own_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_arrays_go_back_to_the_system():
    kept = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=True
            ).stdout
        )
        for how in ("left alone", "given back")
    }
    assert kept["left alone"] > 36 * 2**20, "the test shows nothing"
    assert kept["given back"] < 8 * 2**20


HELD = """
import sys
from pathlib import Path

from aedit.system import Trimmer, give_back_what_is_freed

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

give_back_what_is_freed()
trimmer, before = Trimmer(), own_bytes()
chunks = [b"x" * (100_000 + n) for n in range(1000)]
first = trimmer.look()  # nothing is free yet
last = chunks[-1]  # lies above the others
del chunks
trimmer.look()
again = [trimmer.look() for _ in range(3)]
print(own_bytes() - before, first, again)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_freed_long_after_the_memory_has_grown_goes_back_too():
    """Found: what was in use when the hub looked after a burst, and freed later, stayed."""
    command = [sys.executable, "-c", HELD]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    kept, seen = said.split(" ", 1)
    assert int(kept) < 16 * 2**20
    assert seen == "False [False, False, False]\n"
