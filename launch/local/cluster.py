"""All processes of a local run with a hub, with the interface of one child.

Hubs, standby, and torchrun per node.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from aedit.launch.config.config import RunConfig
from aedit.launch.config.placement import NODE_PROGRAM, JoinOptions, Placement, torchrun_words
from aedit.launch.hub.folder import of_standby
from aedit.launch.local.child import Child
from aedit.types import UserError

HUB_START_LIMIT_S = 60.0
NODE_LEAVE_LIMIT_S = 60.0
"""Longest time of a node for its last evaluation and checkpoint after it has left the hub."""

HUB_LEAVE_LIMIT_S = 30.0
"""Longest time of a hub for its snapshot after the last node has ended."""

POLL_S = 0.05


@dataclass(slots=True)
class HubProcess:
    """One hub of the run, restarted if it fails."""

    words: list[str]
    directory: Path
    log: Path
    restarts: int
    child: Child | None = None

    def start(self) -> None:
        """Start the hub."""
        (self.directory / "address").unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.child = Child(self.words, self.log)

    def address(self) -> str:
        """Return the address it listens at, once it has started. Raises UserError if it cannot start."""
        assert self.child is not None
        deadline = time.monotonic() + HUB_START_LIMIT_S
        while not (text := _read(self.directory / "address")):
            if not self.child.running() or time.monotonic() > deadline:
                raise UserError(_last_line(self.child.output()) or f"the hub did not start: see {self.log}")
            time.sleep(POLL_S)
        return text

    @property
    def is_over(self) -> bool:
        """Return whether it ended without error: the run is over, and no members were left."""
        assert self.child is not None
        return not self.child.running() and self.child.exit_code() == 0

    def mend(self) -> None:
        """Restart it if it has failed; it continues its journal at the same address."""
        assert self.child is not None
        if self.child.running() or not self.restarts or self.child.exit_code() in (0, 2):
            return
        self.restarts -= 1
        self.child.kill()
        self.child = Child(self.words, self.log)


class Cluster:
    """Processes of one run on this machine, which end with the block.

    A failed node does not stop the others, which do not depend on it.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        run_dir: Path,
        attempt: int,
        program: tuple[str, ...] = NODE_PROGRAM,
    ) -> None:
        self.nodes: list[Child] = []
        self.address = ""
        """HOST:PORT of the hub; several, separated by commas, split the units."""
        self._over_since: float | None = None
        self._late: set[int] = set()
        """Nodes that were restarted after the run was over."""
        self._hubs = _hubs(config, run_dir)
        try:
            for hub in self._hubs:
                hub.start()
            addresses = [hub.address() for hub in self._hubs]
            num_parts = len(config.hub.addresses)
            self.address = ",".join(addresses[:num_parts])
            for i in range(placement.nodes):
                member = JoinOptions(
                    hub=self.address,
                    standby=",".join(addresses[num_parts:]),
                    name=f"local-{i}",
                    prefers=i,
                )
                words = torchrun_words(run_dir / "run.toml", config, placement, attempt, program, member)
                self.nodes.append(Child(words, run_dir / f"launch_{i}.log", _shared(config, placement)))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def running(self) -> bool:
        """Return whether any node runs. Once none does, the hubs are asked to end."""
        if sum(
            node.running() for node in self.nodes
        ):  # no early exit: each call also looks for new processes
            for hub in self._hubs:
                hub.mend()
            self._end_the_late()
            return True
        self._end_hubs()
        return False

    def failed(self) -> int | None:
        """Return the index of the first node that failed before the run was over, None if none did."""
        codes = [node.exit_code() for node in self.nodes]
        return next((i for i, code in enumerate(codes) if code != 0 and i not in self._late), None)

    def exit_code(self) -> int:
        """Return 0 if all nodes ended without error.

        Only after `running` returned False or `kill` was called.
        """
        failed = self.failed()
        return 0 if failed is None else self.nodes[failed].exit_code()

    def output(self) -> str:
        """Return the output of all nodes."""
        return "".join(node.output() for node in self.nodes)

    def workers(self) -> list[psutil.Process]:
        """Return the live processes of the nodes."""
        return [worker for node in self.nodes for worker in node.workers()]

    def terminate(self) -> None:
        """Ask the nodes to end."""
        for node in self.nodes:
            node.terminate()

    def kill(self) -> None:
        """Kill all processes and wait for their end."""
        for node in self.nodes:
            node.kill()
        for hub in self._hubs:
            if hub.child is not None:
                hub.child.kill()

    def _end_the_late(self) -> None:
        """Stop nodes that were restarted after the hub had ended with the run: they wait for it in vain."""
        if not all(hub.is_over for hub in self._hubs):
            return
        self._over_since = self._over_since or time.monotonic()
        if time.monotonic() > self._over_since + NODE_LEAVE_LIMIT_S:
            self._late.update(i for i, node in enumerate(self.nodes) if node.running())
            self.terminate()

    def _end_hubs(self) -> None:
        hubs = [hub.child for hub in self._hubs if hub.child is not None]
        for hub in hubs:
            hub.terminate()
        deadline = time.monotonic() + HUB_LEAVE_LIMIT_S
        while sum(hub.running() for hub in hubs) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _shared(config: RunConfig, placement: Placement) -> dict[str, str]:
    """Return the environment of nodes that share the cores of this machine.

    torchrun limits each process to one thread, but not if it starts a single one; without a limit each such
    node would use all cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // (placement.nodes * config.local.ranks))
    return {"OMP_NUM_THREADS": str(threads)} | os.environ


def _hubs(config: RunConfig, run_dir: Path) -> list[HubProcess]:
    """Return the hubs that split the units, then the standbys of the first one."""
    parts = len(config.hub.addresses)
    places = [(k, run_dir / (f"hub_{k}" if parts > 1 else "hub"), 0) for k in range(parts)]
    numbers = range(1, 1 + len(config.hub.standbys_of(0)))
    places += [(0, run_dir / of_standby(number), number) for number in numbers]
    words = [sys.executable, "-m", "aedit.launch.cli", "hub", str(run_dir / "run.toml")]
    return [
        HubProcess(
            [*words, f"--part={k}/{parts}", f"--directory={directory}", *_as_standby(number)],
            directory,
            run_dir / f"{directory.name}.log",
            config.restarts,
        )
        for k, directory, number in places
    ]


def _as_standby(number: int) -> list[str]:
    """Return the options of standby `number`; none for 0, a hub that leads."""
    return ["--standby", f"--standby-number={number}"] if number else []


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("aedit: ")]
    return lines[-1].removeprefix("aedit: ") if lines else ""
