"""A disk that refuses writes: for folders of this process, and for another process as a whole."""

import errno
import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock


@contextmanager
def full_disk(folder):
    """Let no file below `folder` be written or begun by this process, as on a disk without room."""
    folder = Path(folder).resolve()
    write, begin = os.pwrite, tempfile.NamedTemporaryFile

    def check(path):
        if Path(path).resolve().is_relative_to(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwrite(fd, *args):
        check(os.readlink(f"/proc/self/fd/{fd}"))
        return write(fd, *args)

    def named(*args, **kwargs):
        check(kwargs["dir"])
        return begin(*args, **kwargs)

    with mock.patch.object(os, "pwrite", pwrite), mock.patch.object(tempfile, "NamedTemporaryFile", named):
        yield


@contextmanager
def small_files(num_bytes):
    """Let no file of this process grow beyond this, as on a disk without room."""
    here = SimpleNamespace(pid=os.getpid())
    limit_files(here, num_bytes)
    try:
        yield
    finally:
        limit_files(here)


def limit_files(process, num_bytes=resource.RLIM_INFINITY):
    """Let no file of a process grow beyond this from now on, as on a disk without room."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
