import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers such as world.py are plain modules


@pytest.fixture(scope="session")
def world():
    from world import World

    world = World()
    yield world
    world.close()


@pytest.fixture(scope="session", autouse=True)
def nobody_is_left_behind():
    """Every process that a test starts, it ends."""
    yield
    left = [
        p
        for p in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(p.cmdline())
    ]
    assert not left, f"processes left behind: {[p.cmdline() for p in left]}"
