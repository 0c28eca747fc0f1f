"""Tests that a hub gives the memory of merged pushes back to the system."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path

import numpy as np

from aedit.async_sgd.service.memory import give_back_what_is_freed

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
