"""The hub that `benchmarks.hub` measures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hub_parts.member import RUN
from benchmarks.kit.processes import HubProcess, hub

TOML = """
name = "{run}"
dir = "{directory}"
[train]
steps = 1000000000
[edit]
every = 64
landing = "arrival"
[hub]
address = "127.0.0.1:0"
{settings}
"""


@contextmanager
def hub_process(settings: str) -> Iterator[HubProcess]:
    """Start a hub with an empty journal; it is gone afterwards. settings: what `[hub]` has besides, and the
    tables after it."""
    with (
        TemporaryDirectory(prefix="aedit-") as name,
        hub(Path(name), TOML.format(run=RUN, directory=name, settings=settings)) as process,
    ):
        yield process


def memory_bytes(pid: int, name: str) -> int:
    """Return a line of a process's status file: `VmHWM`, the most it has ever had, `RssAnon`, ..."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
