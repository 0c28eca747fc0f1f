"""Operating-system primitives: atomic files, memory shared between processes, death with the parent.

Standard library only, so that a hub, a node agent and the command line can import it at no cost.
"""

import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent ends."""

# Loaded here, as loading a library between fork and exec can deadlock.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def atomic_file(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path`, whole and on disk, when the block ends without an error.

    sync: False for a file that a crash of the machine may take back, and that must not wait for the disk.

    After an error `path` is as it was. If several processes write at once, the last one wins. Raises OSError
    if the disk is full or the directory is missing.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # temporary files are private to their user; the result is not
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    if sync:
        sync_directory(path.parent)


def write_atomically(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Replace `path` by `content` (text as UTF-8), whole and on disk, or leave it as it was.

    sync: see `atomic_file`.
    """
    with atomic_file(path, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_directory(directory: Path) -> None:
    """Flush the names in `directory` to disk, so that a crash cannot undo a creation, rename or deletion."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def no_collections() -> Iterator[None]:
    """Suspend garbage collection for a block of large imports.

    What imports allocate stays, and searching it for garbage again and again takes a fifth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def memory_fence() -> None:
    """Order memory: this thread's accesses before the call are seen before those after it.

    x86 keeps stores in order by itself; ARM does not. Releasing a lock is a store-release that no earlier
    access passes; acquiring it again is a load-acquire that no later access passes; and ARM keeps a
    load-acquire behind an earlier store-release (RCsc). Two acquisitions of one lock are therefore a full
    barrier. One would not be: accesses from both sides could move inside.
    """
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def anonymous_memory(name: str, num_bytes: int) -> int:
    """Return a file descriptor of `num_bytes` zeros that have no name in the file system.

    The memory is freed when the last process that holds it ends, however it ends. name: shown by tools such
    as `lsof`.
    """
    if sys.platform == "linux":
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        os.unlink(path)
    os.ftruncate(fd, num_bytes)
    return fd


PARENT = "AEDIT_PARENT"
"""Environment variable with the id of the process with which an `aedit` command ends."""


def end_with_named_parent() -> None:
    """Do as `end_with_parent` if the environment names this process's parent, with SIGTERM."""
    if parent := os.environ.pop(PARENT, ""):
        end_with_parent(int(parent), signal.SIGTERM)


def end_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send this process `signal_number` when its parent ends; exit if it has ended already.

    parent: process id of the expected parent. Linux only; elsewhere only the check is made.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)
