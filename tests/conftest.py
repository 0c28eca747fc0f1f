"""Fixtures shared by all tests: workers for torch.distributed, and a check that no process is left behind."""

import os
import uuid

import psutil
import pytest
from kit.distributed import World

MARK = "AEDIT_TEST_SESSION"
# Lives until its owner, the test process, ends; Python offers no way to end it earlier.
ALLOWED = "multiprocessing.resource_tracker"


@pytest.fixture(scope="session")
def world():
    """Return worker processes that run functions in a Gloo process group; see tests/kit/distributed.py."""
    made = World()
    yield made
    made.close()


def pytest_configure():
    os.environ[MARK] = uuid.uuid4().hex


def pytest_sessionfinish(session):
    """Fail the session when a process it started still runs, even one that has lost its parent."""
    _, left = psutil.wait_procs(_started_here(), timeout=5)
    if not left:
        return
    for process in left:
        command = " ".join(process.cmdline()) if process.is_running() else "?"
        print(f"\nleft behind by the tests: process {process.pid}: {command}")
        process.kill()
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _started_here():
    found = [process for process in psutil.process_iter() if _is_ours(process)]
    return [process for process in found if process.pid != os.getpid()]


def _is_ours(process):
    # Children inherit the mark, and keep it when their parent goes and init takes them over.
    try:
        marked = process.environ().get(MARK) == os.environ[MARK]
        return marked and ALLOWED not in " ".join(process.cmdline())
    except psutil.Error:
        return False
