"""Operating-system primitives: atomic files, names in files, shared memory, death with the parent.

Standard library only, so that a hub, a node agent and the command line can import it at no cost.
"""

import contextlib
import contextvars
import ctypes
import errno
import faulthandler
import gc
import io
import json
import mmap
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent ends."""

# Loaded here, as loading a library between fork and exec can deadlock.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_a_name(text: str) -> str:
    """Return `text` as a part of a member's name, see `aedit.types.name_fault`: a dash for what it lacks."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)


def host_name() -> str:
    """Return the name of this machine as a part of a member's name."""
    return in_a_name(socket.gethostname())[:64].strip(".") or "host"


@contextmanager
def atomic_file(path: Path, *, sync: bool = True, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path`, whole and on disk, when the block ends without an error.

    sync: False for a file that a crash of the machine may take back, and that must not wait for the disk.
    mode: permissions of the file.

    After an error `path` is as it was. If several processes write at once, the last one wins. Raises OSError
    if the disk is full or the directory is missing.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.chmod(file.name, mode)  # temporary files are private to their user; the result is not
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    if sync:
        sync_directory(path.parent)


def write_atomically(path: Path, content: str | bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Replace `path` by `content` (text as UTF-8), whole and on disk, or leave it as it was.

    sync, mode: see `atomic_file`.
    """
    with atomic_file(path, sync=sync, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_if_changed(path: Path, content: str) -> None:
    """Write atomically what `path` has not yet: what has not changed needs no room on the disk."""
    try:
        has_it = path.read_text(encoding="utf-8") == content
    except (OSError, UnicodeDecodeError):
        has_it = False
    if not has_it:
        write_atomically(path, content)


def read_line(path: Path) -> str:
    """Return the text of a file without surrounding whitespace; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def file_mark(path: Path) -> tuple[int, int, int]:
    """Return a mark that changes when a file is written or replaced. Raises OSError."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_plain_name(name: str) -> bool:
    """Return whether a text is the name of one file or directory, wherever it came from."""
    if not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    return len(os.fsencode(name)) <= 255


def file_inside(folder: Path, name: object, where: str) -> Path:
    """Return the path of a file that a file of the folder names.

    Args:
        folder: Directory of both files.
        name: The name, as it was read.
        where: The file that has it and the key, for the message.

    Raises:
        ValueError: It is no plain relative name, such as `a.safetensors` or `part/a.safetensors`.
    """
    parts = name.split("/") if isinstance(name, str) and len(name) <= 1024 else [""]
    if not all(is_plain_name(part) and ":" not in part for part in parts):
        text = repr(name)
        raise ValueError(
            f"{where} names {text if len(text) <= 80 else text[:77] + '...'}: must be the relative name of a"
            " file in the same directory"
        )
    return folder.joinpath(*parts)


def check_folder(folder: Path, root: Path | None = None, *, weights: bool = True) -> None:
    """Check that no file in the folder of a model names a file outside of it that loaders would read.

    Loaders follow names of weights in an index, of vocabularies in the configuration of a tokenizer, and of
    the model to which an adapter belongs. Names of code are no matter here: it is never run.

    Args:
        folder: A directory in the form of Hugging Face.
        root: No link in the folder may lead out of this directory. None: links lead wherever the owner of
            the machine has made them lead, as those of a cache do.
        weights: False: only the tokenizer in it is loaded.

    Raises:
        ValueError: It names one. The message has file, key and name.
        OSError: A file cannot be read.
    """
    if root is not None:
        top = root.resolve()
        for directory, folders, files in os.walk(folder):
            for path in (Path(directory, name) for name in (*folders, *files)):
                if not path.resolve().is_relative_to(top):
                    raise ValueError(
                        f"{path.relative_to(folder)} is a link to outside of the allowed directory"
                    )
    adapter, tokenizer = folder / "adapter_config.json", folder / "tokenizer_config.json"
    if weights:
        for path in sorted(folder.glob("*.index.json")):
            read_index(path)
        base = _json_object(adapter).get("base_model_name_or_path") if adapter.exists() else None
        if base is not None:
            raise ValueError(
                f"{adapter.name}: base_model_name_or_path names {str(base)[:80]!r}, which is not here: merge"
                " the adapter into its model (PEFT's `merge_and_unload`), and save that"
            )
    fields = _json_object(tokenizer) if tokenizer.exists() else {}
    versions = fields.get("fast_tokenizer_files", [])
    for name in versions if isinstance(versions, list) else [versions]:
        file_inside(folder, name, f"{tokenizer.name}: fast_tokenizer_files")
    if (folder / "tokenizer.json").exists():
        return  # read instead of the following; many models have paths of other machines there
    for key, value in fields.items():
        if isinstance(value, str) and (key.endswith("_file") or key in ("vocab", "merges")):
            raise ValueError(
                f"{tokenizer.name}: {key} names {value[:80]!r}: remove the key; the files of a tokenizer have"
                " fixed names"
            )


def read_index(path: Path, root: Path | None = None) -> list[Path]:
    """Return the files of weights that an index in the form of Hugging Face names; root: see `opened_below`.

    Raises:
        ValueError: It is no index, or names a file that is not in its directory.
        OSError: It cannot be read.
    """
    names = _json_object(path, root).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{path.name}: must have an object weight_map")
    where = f"{path.name}: weight_map"
    return sorted({file_inside(path.parent, name, where) for name in names.values()})


def _json_object(path: Path, root: Path | None = None) -> dict[str, Any]:
    with opened_below(path, root) as opened:
        text = opened.read_bytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: not a JSON file: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name}: must have a JSON object")
    return found


@contextmanager
def opened_below(path: Path, root: Path | None) -> Iterator[Path]:
    """Open a file, and yield a path by which it can be read.

    On Linux it is checked after it was opened, and the path is that of the open file: links that change
    meanwhile have no effect.

    Args:
        path: The file.
        root: It must lie below this directory, all links followed; None: anywhere.

    Raises:
        ValueError: It lies elsewhere, or is no regular file.
        OSError: It cannot be opened.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # does not wait for a pipe's writer
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        opened = Path(f"/proc/self/fd/{number}") if sys.platform == "linux" else path
        if root is not None and not opened.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"{path.name} is a link to outside of the allowed directory")
        yield opened
    finally:
        os.close(number)


def sync_directory(directory: Path) -> None:
    """Flush the names in `directory` to disk, so that a crash cannot undo a creation, rename or deletion."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


T = TypeVar("T")


def call_within(limit_s: float, body: Callable[[], T]) -> T:
    """Return what `body` returns, or raise what it raises; raise TimeoutError after `limit_s`.

    It runs in a thread of its own, which goes on after the limit, but does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(body())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"did not return within {limit_s:g} s")
    return results[0]


def growing_pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause after so many failures in a row: each doubles it, up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures, 64), longest_s)


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


HUGE_PAGE_BYTES = 2 << 20
HUGE_PAGES_AT_ONCE = 8
"""As many are moved in a pass: 4 ms, or 40 where the system has to make room for each."""
"""Size of a huge page of Linux on x86, and on ARM with pages of 4 KiB."""
_MADV_COLLAPSE = 25


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Move memory of this process to huge pages, where it is read faster, and return whether that was done.

    Each huge page takes half a millisecond, or 5 ms where free memory is in pieces. Those that would hold
    other memory too are left as they are. Does nothing on systems other than Linux 6.1 or later, or if there
    are not enough huge pages.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    size = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
    if _LIBC is None or size <= 0:
        return False
    return not _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_COLLAPSE)


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


_END_S, _LOOK_S = 30.0, 1.0
"""Longest time for which a process outlives the parent that its environment names, and time between looks."""


def end_with_named_parent() -> None:
    """Do as `end_with_parent` if the environment names this process's parent, with SIGTERM.

    A process that has not ended `_END_S` after its parent, for example as it hangs, is killed.
    """
    if parent := os.environ.pop(PARENT, ""):
        end_with_parent(int(parent), signal.SIGTERM)
        threading.Thread(target=_outlive, args=(int(parent),), name="parent", daemon=True).start()


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(_END_S)
    os.kill(os.getpid(), signal.SIGKILL)


def show_stacks_on_signal() -> None:
    """Have SIGUSR1 write the stacks of all threads to stderr: where a process waits that seems to hang."""
    if hasattr(signal, "SIGUSR1") and sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # it is no file
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def end_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send this process `signal_number` when its parent ends; exit if it has ended already.

    The signal has its default effect until this process catches it, also if the parent ignores or blocks it.

    parent: process id of the expected parent. Linux only; elsewhere only the check is made.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal_number])
    if signal.getsignal(signal_number) == signal.SIG_IGN:
        signal.signal(signal_number, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    """Return whether an error says that a disk has no room."""
    return error.errno in _FULL


class _Output(io.FileIO):
    """A log on a disk, which drops what the disk has no room for."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the data, or return as if it was written."""
        try:
            return super().write(data)
        except OSError as error:
            if not is_full(error):
                raise
            return memoryview(data).nbytes


def drop_output_without_room() -> None:
    """Drop what this process prints while the disk of its stdout or stderr is full: a log must not end it.

    Only for processes whose output is a log. Streams that are no files on a disk stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            fd = stream.fileno()
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        except (AttributeError, OSError, ValueError):
            continue
        if is_file:
            stream.flush()
            output = io.BufferedWriter(_Output(fd, "w", closefd=False))
            kept = io.TextIOWrapper(output, stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, kept)


def exit_text(code: int) -> str:
    """Return the exit code of a process as text."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 2 * 2**20
_KEPT_BYTES = 4 * 2**20
_GROWN_BYTES = 32 * 2**20
_LOOK_S = 5.0


def give_back_what_is_freed() -> None:
    """Give every large array pages of its own, which are returned with it.

    By default glibc keeps freed arrays of up to 32 MiB, in an arena per thread: measured, a hub with 184 MiB
    of parameters took 180 MiB more. Small buffers, such as chunks of pushes, stay with glibc for reuse, in
    one arena; see `keep_one_arena`. Does nothing with another C library.
    """
    keep_one_arena()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        threading.Thread(target=_trim, name="trim", daemon=True).start()


def keep_one_arena() -> None:
    """Let all threads take memory from one arena.

    The arenas of many threads are never full and never empty: with one per thread, a hub that was sent
    100,000 calls of every kind grew by half, and a rollout server by 2 KiB per request without an end. Does
    nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


class Trimmer:
    """Returns free pages between what is in use, when there are many more than after the last time.

    Chunks of a thousand pushes are small buffers, and the last one of them would hold all that were before.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._free = getattr(self._libc, "mallinfo2", None)
        if self._free is not None:
            self._free.restype = _MallInfo
        self._known_bytes = self._measured()

    def look(self) -> bool:
        """Return free pages if that is worthwhile, and whether it was."""
        found = self._measured()
        if found > self._known_bytes + _GROWN_BYTES:
            self._libc.malloc_trim(0)
            self._known_bytes = self._measured()
            return True
        self._known_bytes = min(self._known_bytes, found)
        return False

    def _measured(self) -> int:
        """Return the bytes that are free inside the C library, which counts returned pages too.

        Of a C library that does not tell, the resident memory.
        """
        return int(self._free().fordblks) if self._free is not None else _resident_bytes()


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _trim() -> None:
    trimmer = Trimmer()
    while True:
        time.sleep(_LOOK_S)
        trimmer.look()


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
