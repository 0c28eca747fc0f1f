"""A simulated disk below the production code: files in memory, with what a crash may take back.

`System` stands in for the module `os` (and `tempfile`, `mmap`, `shutil`) of the modules that write journals,
snapshots and votes, so that the calls are those of production, one by one. `SimPath` stands in for `Path`.
"""

import errno
import os
import shutil
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import SimpleNamespace


def error(number, name=""):
    return OSError(number, os.strerror(number), str(name))


class Inode:
    """The content of a file: in the cache of the kernel, and on the disk."""

    count = 0

    def __init__(self):
        Inode.count += 1
        self.number = Inode.count
        self.data, self.stable = bytearray(), bytearray()
        self.writes = []
        """(offset, data), or (length, None) for a change of the length, since the content was flushed."""

    def copy(self):
        made = Inode()
        made.data, made.stable, made.writes = self.data[:], self.stable[:], self.writes[:]
        return made

    def write(self, offset, data):
        _put(self.data, offset, data)
        self.writes.append((offset, data))

    def flush(self):
        for offset, data in self.writes:
            _put(self.stable, offset, data)
        self.writes.clear()

    def crash(self, chance):
        """Keep of the last writes what the disk has: the first and a part of the next, or any of them."""
        if not self.writes:
            return
        data, any_order = self.stable[:], chance.random() < 0.3
        kept = chance.randint(0, len(self.writes))
        for at, (offset, written) in enumerate(self.writes):
            if any_order and written is not None and chance.random() < 0.5:
                continue
            if not any_order and at == kept and written:
                _put(data, offset, written[: chance.randrange(len(written))])
            if not any_order and at >= kept:
                break
            _put(data, offset, written)
        self.data, self.stable, self.writes = data, data[:], []


def _put(data, offset, written):
    if written is None:
        if offset < len(data):
            del data[offset:]
        else:
            data.extend(bytes(offset - len(data)))
        return
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


@dataclass(eq=False)
class Disk:
    """The disk of one machine: one file system, whose changes of names are journaled in order."""

    random: object
    names: dict = field(default_factory=dict)
    stable: dict = field(default_factory=dict)
    changes: list = field(default_factory=list)
    """(name, file or None) since the names were last flushed."""
    full: bool = False
    failing: int = 0
    """Writes until one fails with EIO; 0: none does."""
    removes: object = None
    """Called with the name of a file before it is removed or cut off."""

    def check(self, path=""):
        """Raise what a write finds at a failing disk."""
        if self.failing:
            self.failing -= 1
            if not self.failing:
                raise error(errno.EIO, path)

    def room(self, path=""):
        self.check(path)
        if self.full:
            raise error(errno.ENOSPC, path)

    def link(self, name, inode):
        if inode is None:
            self.names.pop(name, None)
        else:
            self.names[name] = inode
        self.changes.append((name, inode))

    def flush_names(self):
        if self.changes:
            self.stable, self.changes = dict(self.names), []

    def crash(self):
        """Lose a part of what was not flushed, as a machine without power does."""
        names = dict(self.stable)
        for name, inode in self.changes[: self.random.randint(0, len(self.changes))]:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
        for inode in names.values():
            inode.crash(self.random)
        self.names, self.stable, self.changes = names, dict(names), []

    def copied(self):
        """Return a copy of all files, by name."""
        return {name: inode.copy() for name, inode in self.names.items()}

    def put_back(self, files, but=()):
        """Replace all files by a copy, except for some."""
        kept = {name: inode for name, inode in self.names.items() if name.rpartition("/")[2] in but}
        files = {name: inode for name, inode in files.items() if name.rpartition("/")[2] not in but}
        self.names = {name: inode.copy() for name, inode in files.items()} | kept
        for inode in self.names.values():
            inode.flush()
        self.stable, self.changes = dict(self.names), []


DISKS = {}
"""Disks of the simulation that runs, by the first part of a path."""


class SimPath:
    """A path on a simulated disk: the part of `Path` that production uses there."""

    __slots__ = ("text",)

    def __init__(self, path):
        self.text = str(path)

    def __str__(self):
        return self.text

    def __truediv__(self, name):
        return SimPath(f"{self.text}/{name}")

    @property
    def name(self):
        return self.text.rpartition("/")[2]

    @property
    def parent(self):
        return SimPath(self.text.rpartition("/")[0])

    def with_name(self, name):
        return self.parent / name

    @property
    def disk(self):
        return DISKS[self.text.split("/", 2)[1]]

    @property
    def inode(self):
        found = self.disk.names.get(self.text)
        if found is None:
            raise error(errno.ENOENT, self.text)
        return found

    def exists(self):
        return self.text in self.disk.names or self.is_dir()

    def is_dir(self):
        start = f"{self.text}/"
        return self.text.count("/") == 1 or any(name.startswith(start) for name in self.disk.names)

    def glob(self, pattern):
        start = f"{self.text}/"
        inside = (name[len(start) :] for name in self.disk.names if name.startswith(start))
        found = {name.partition("/")[0] for name in inside}
        return [self / name for name in sorted(found) if fnmatchcase(name, pattern)]

    def iterdir(self):
        return iter(self.glob("*"))

    def stat(self):
        return _stat(self.inode)

    def read_text(self, encoding=""):
        return bytes(self.inode.data).decode()

    def read_bytes(self):
        return bytes(self.inode.data)

    def unlink(self, missing_ok=False):
        if missing_ok and self.text not in self.disk.names:
            return
        self.inode  # noqa: B018 - raises if there is none
        self.disk.check(self)
        if self.disk.removes:
            self.disk.removes(self.name)
        self.disk.link(self.text, None)

    def rename(self, to):
        inode = self.inode
        self.disk.check(self)
        self.disk.link(str(to), inode)
        self.disk.link(self.text, None)

    def mkdir(self, mode=0o777, parents=False, exist_ok=False):
        self.disk.room(self)

    def open(self, mode):
        return Opened(self, create="w" in mode)


def _stat(inode):
    return SimpleNamespace(st_size=len(inode.data), st_dev=1, st_ino=inode.number, st_mtime_ns=0)


@dataclass(eq=False)
class Handle:
    """An open file, or folder: then without an inode."""

    disk: Disk
    inode: Inode | None
    path: str

    def __bool__(self):
        return False  # it needs not be closed


class Opened:
    """A file object, as `open` and `NamedTemporaryFile` return it."""

    def __init__(self, path, *, create):
        self.name, self.at = path, 0
        self.handle = SYSTEM.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC) * create)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def seek(self, at):
        self.at = at

    def read(self, count=-1):
        data = self.handle.inode.data
        end = len(data) if count < 0 else self.at + count
        found, self.at = bytes(data[self.at : end]), min(end, len(data))
        return found

    def write(self, data):
        self.at += SYSTEM.pwrite(self.handle, data, self.at)

    def flush(self):
        pass

    def fileno(self):
        return self.handle


class System:
    """The calls of `os` on simulated paths and open files; all others are those of the real module."""

    def __getattr__(self, name):
        return getattr(os, name)

    random = None

    def urandom(self, count):
        return self.random.randbytes(count)

    def open(self, path, flags, mode=0):
        disk, name = path.disk, str(path)
        inode = disk.names.get(name)
        if inode is None:
            if not flags & os.O_CREAT and path.is_dir():
                return Handle(disk, None, name)
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            disk.room(path)
            inode = Inode()
            disk.link(name, inode)
        elif flags & os.O_TRUNC and inode.data:
            disk.check(path)
            inode.write(0, None)
        return Handle(disk, inode, name)

    def close(self, handle):
        pass

    def fstat(self, handle):
        return _stat(handle.inode)

    def stat(self, path):
        return path.stat()

    def pread(self, handle, length, offset):
        return bytes(handle.inode.data[offset : offset + length])

    def preadv(self, handle, views, offset):
        (view,) = views
        data = handle.inode.data[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def pwrite(self, handle, data, offset):
        data, inode, disk = bytes(data), handle.inode, handle.disk
        if offset + len(data) > len(inode.data):
            try:
                disk.room(handle.path)
            except OSError:
                if len(data) > 1 and disk.random.random() < 0.5:  # a part had room
                    inode.write(offset, data[: disk.random.randrange(1, len(data))])
                raise
        inode.write(offset, data)
        return len(data)

    def ftruncate(self, handle, length):
        if length > len(handle.inode.data):
            handle.disk.room(handle.path)
        else:
            handle.disk.check(handle.path)
        if length < len(handle.inode.data) and handle.disk.removes:
            handle.disk.removes(handle.path.rpartition("/")[2])
        handle.inode.write(length, None)

    def truncate(self, path, length):
        self.ftruncate(self.open(path, os.O_RDWR), length)

    def fsync(self, handle):
        try:
            handle.disk.check(handle.path)
        except OSError:
            if handle.inode is not None:
                handle.inode.writes.clear()  # a second try would succeed without them, as with a real kernel
            raise
        if handle.inode is None:
            handle.disk.flush_names()
        else:
            handle.inode.flush()

    fdatasync = fsync

    def replace(self, source, to):
        SimPath(source).rename(to)

    def chmod(self, path, mode):
        pass


SYSTEM = System()


def _temporary(dir, prefix, delete):
    # Of a node that starts nothing is drawn: seeds were found before it saved its register then.
    is_drawn = not str(dir).startswith("/n") or (dir / "votes.json").exists()
    drawn = SYSTEM.random.getrandbits(32) if is_drawn else 0
    return Opened(dir / f"{prefix}{drawn:08x}", create=True)


def _mapped(handle, length, access, offset):
    data = bytes(handle.inode.data[offset : offset + length])
    if len(data) < length:
        raise ValueError("mmap length is greater than file size")
    return data


def _rmtree(path, ignore_errors):
    for one in path.iterdir():
        one.disk.link(str(one), None)


TEMPFILE = SimpleNamespace(NamedTemporaryFile=_temporary)
MMAP = SimpleNamespace(mmap=_mapped, ACCESS_READ=0, ALLOCATIONGRANULARITY=1)
SHUTIL = SimpleNamespace(copyfileobj=shutil.copyfileobj, rmtree=_rmtree)
