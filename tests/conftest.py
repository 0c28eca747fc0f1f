"""Fixtures shared by all tests: workers for torch.distributed, and a check that no process is left behind."""

import gc
import os
import uuid
from contextlib import suppress

import psutil
import pytest
from kit import commands
from kit.distributed import World

os.environ["HF_HUB_OFFLINE"] = "1"  # before `datasets` is imported: nothing is looked up on a network
MARK = "AEDIT_TEST_SESSION"
END_S = 5.0
# They live until their owner, the test process, ends; Python offers no way to end them earlier.
ALLOWED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.fixture(scope="session")
def world():
    """Return worker processes that run functions in a Gloo process group; see tests/kit/distributed.py."""
    made = World()
    yield made
    made.close()


def pytest_configure():
    os.environ[MARK] = uuid.uuid4().hex


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage during imports, nor later among the millions of objects that they leave."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put the files that use `world` first, so that one of several test processes runs them all.

    The server that forks its workers imports torch and transformers, once in each test process that uses it.
    """
    first = {item.path for item in items if "world" in item.fixturenames}
    items.sort(key=lambda item: item.path not in first)


def pytest_sessionfinish(session):
    """Fail the session when a process it started still runs, even one that has lost its parent."""
    commands.close()
    _, left = psutil.wait_procs(_started_here(), timeout=END_S)
    if not left:
        return
    for process in left:
        print(f"\nleft behind by the tests: process {process.pid}: {_command(process)}")
        with suppress(psutil.Error):
            process.kill()
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _command(process):
    # A zombie has none: it has ended, and this process has not waited for it.
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return f"{process.name()}, ended and not waited for"
    except psutil.Error:
        return "?"


def _started_here():
    found = [process for process in psutil.process_iter() if _is_ours(process)]
    return [process for process in found if process.pid != os.getpid()]


def _is_ours(process):
    # Children inherit the mark, and keep it when their parent goes and init takes them over.
    try:
        marked = process.environ().get(MARK) == os.environ[MARK]
        return marked and not (process.ppid() == os.getpid() and _is_allowed(process))
    except psutil.Error:
        return False


def _is_allowed(process):
    # What the fork server has forked has its command line, but another parent.
    command = " ".join(process.cmdline())
    return any(name in command for name in ALLOWED)
