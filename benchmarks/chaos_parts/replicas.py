"""A hub and its standbys as processes, each under a supervisor that starts the plain command again."""

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kit.cluster import free_port
from benchmarks.kit.netns import Place, set_link
from benchmarks.kit.processes import end, start

FOLLOW = "another hub leads this run under"
"""In the last words of a hub that was replaced: its operator shall start it as a standby."""


@dataclass(slots=True)
class Replica:
    """One hub of the run: its place, command and process."""

    directory: Path
    address: str
    words: tuple[str, ...]
    """Further words of its command, after configuration and folder."""
    place: Place | None
    process: "subprocess.Popen[str] | None" = None
    follows: bool = False
    """True if its last message named the command that starts it next."""
    due_s: float = 0.0
    """Time at which its supervisor starts it again."""
    is_killed: bool = False

    @property
    def log(self) -> Path:
        """Return the file with what its processes have said."""
        return Path(f"{self.directory}.log")


@dataclass(slots=True)
class Replicas:
    """All hubs of a run. The caller calls `supervise` again and again."""

    toml: Path
    hubs: list[Replica]
    back_after_s: float = 1.0
    starts: int = 0
    failed: list[str] = field(default_factory=list)
    """Last words of hubs that ended for another reason than a fault or a successor."""

    def supervise(self) -> None:
        """Start every hub that has ended and whose time has come."""
        for hub in self.hubs:
            if hub.process is not None and hub.process.poll() is not None:
                self._ended(hub, hub.process.returncode)
            if hub.process is None and time.monotonic() >= hub.due_s:
                self._start(hub)

    def pause(self, until_s: float) -> None:
        """Supervise until this time of the monotonic clock."""
        while (left_s := until_s - time.monotonic()) > 0:
            self.supervise()
            time.sleep(min(0.1, left_s))

    def kill(self, hub: Replica, back_after_s: float) -> None:
        """Kill a hub with SIGKILL; it is started again after so long."""
        if hub.process is not None and hub.process.poll() is None:
            hub.is_killed = True
            hub.process.kill()
            hub.process.wait(10)
            self._ended(hub, hub.process.returncode)
        hub.due_s = time.monotonic() + back_after_s

    def stop(self, hub: Replica, number: signal.Signals) -> None:
        """Send SIGSTOP or SIGCONT to a hub, if it runs."""
        if hub.process is not None:
            hub.process.send_signal(number)

    def cut(self, hub: Replica, state: str) -> None:
        """Set the link of a hub "down" or "up"."""
        assert hub.place is not None
        set_link(hub.place, state)

    def at(self, address: str) -> Replica | None:
        """Return the hub at `address`."""
        return next((hub for hub in self.hubs if hub.address == address), None)

    def heal(self) -> None:
        """Let all hubs go on, be reached and be started."""
        for hub in self.hubs:
            self.stop(hub, signal.SIGCONT)
            hub.due_s = 0.0
            if hub.place is not None:
                set_link(hub.place, "up")

    def end(self, first: Replica) -> None:
        """End all hubs with SIGTERM, the leading one first: it writes its snapshot."""
        for hub in (first, *(hub for hub in self.hubs if hub is not first)):
            if hub.process is not None:
                hub.process.terminate()
                hub.process.wait(30)

    def kill_all(self) -> None:
        """Kill what is left."""
        end(hub.process for hub in self.hubs if hub.process is not None)

    def _start(self, hub: Replica) -> None:
        place = ("--standby", f"--address={hub.address}") if hub.follows else hub.words
        words = ("hub", str(self.toml), f"--directory={hub.directory}", "--insecure", *place)
        with hub.log.open("a") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            hub.process = start("aedit.launch.cli", *words, place=hub.place, **pipes)
        self.starts += 1
        hub.is_killed = hub.follows = False

    def _ended(self, hub: Replica, code: int) -> None:
        said = hub.log.read_text(errors="replace").strip().rpartition("\n")[2] if hub.log.exists() else ""
        hub.follows = code == 2 and FOLLOW in said and "--standby" not in hub.words
        if not hub.is_killed and not (code == 2 and FOLLOW in said):
            self.failed.append(f"{hub.directory.name}: exit code {code}: {said[-300:]}")
        hub.process, hub.due_s = None, time.monotonic() + self.back_after_s


def replicas(directory: Path, toml: Path, addresses: Sequence[str], places: Sequence[Place]) -> Replicas:
    """Return the hub at the first of `addresses`, and its standbys at the others; none is started yet."""
    hubs = []
    for k, address in enumerate(addresses):
        words = ("--standby", f"--standby-number={k}") if k else ()
        name = "hub" if k == 0 else f"standby_{k}"
        place = places[k] if places else None
        hubs.append(Replica(directory / name, address, words, place))
    return Replicas(toml, hubs)


def addresses_of(number: int, places: Sequence[Place]) -> list[str]:
    """Return so many addresses for hubs: of their places, or on loopback without places."""
    if places:
        return [f"{place.address}:7000" for place in places[:number]]
    return [f"127.0.0.1:{free_port()}" for _ in range(number)]
