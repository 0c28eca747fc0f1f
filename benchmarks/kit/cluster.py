"""A hub and paced nodes as real processes, optionally each in a network namespace of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from aedit.proto.rpc import HubClient, HubRefused, HubUnreachable, StatusRequest
from benchmarks.kit.netns import Place, set_link
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import end, start, start_hub

TOML = """
name = "paced"
dir = "{directory}"
[train]
steps = 1000000000
[edit]
every = {every}
landing = "arrival"
penalty = {{ clip = "none" }}
[outer]
kind = "average"
lr = 1.0
[hub]
address = "{address}"
weights = "uniform"
grace = 0
codec = "fp32"
heartbeat_s = 0.25
expire_s = {expire_s}
lease_samples = {lease_samples}
{more}
[hub.staleness]
rule = "constant"
cutoff = 1000000
[hub.push_filter]
threshold = 1e9
clip = "none"
cosine = false
"""
"""An anchor that is the sum of the shares of what has been merged: rate 1, every arrival, equal weights, no
screens."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Answered push, from its node's ledger."""

    node: int
    unit: int
    steps: int
    verdict: str


class Field:
    """Processes of one run. Leaving the block ends all that are left."""

    def __init__(
        self,
        directory: Path,
        plan: PacedNode,
        *,
        places: Sequence[Place] = (),
        more: str = "",
        program: str = "benchmarks.kit.paced_node",
        address: str = "",
    ) -> None:
        """Set up the run in `directory`.

        plan: of every node; its hub, name and ledger are set here. places: the hub's, then the nodes'.
        more: lines of the table [hub]. program: module that runs a node.
        address: of the hub; by default in its place, or at a free port of loopback.
        """
        self.directory, self.places, self.program = directory, list(places), program
        if not address:
            address = f"{self.places[0].address}:7000" if self.places else f"127.0.0.1:{free_port()}"
        self.plan = replace(plan, hub=address)
        self.toml = directory / "run.toml"
        settings = {
            "every": plan.every,
            "expire_s": plan.expire_s,
            "lease_samples": plan.lease_samples,
            "more": more,
        }
        self.toml.write_text(TOML.format(directory=directory, address=address, **settings))
        self.hub: subprocess.Popen[str] | None = None
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self.log = (directory / "output.log").open("a")

    def __enter__(self) -> "Field":
        return self

    def __exit__(self, *_: object) -> None:
        end(process for process in (self.hub, *self.nodes.values()) if process is not None)
        self.log.close()

    # -- the hub

    def start_hub(self) -> float:
        """Start the hub and wait until its folder says that it serves; return the seconds that took."""
        place = self.places[0] if self.places else None
        self.hub, _, seconds = start_hub(self.toml, self.log, place)
        return seconds

    def kill_hub(self) -> None:
        assert self.hub is not None
        self.hub.kill()
        self.hub.wait(10)

    def end_hub(self) -> None:
        """End the hub by a signal; it writes its snapshot."""
        assert self.hub is not None
        self.hub.terminate()
        assert self.hub.wait(30) == 0, f"the hub ended with exit code {self.hub.returncode}"

    def status(self) -> dict[str, Any] | None:
        """Return the hub's status; None if it does not answer within a second."""
        if not self.places:
            return ask(self.plan.hub)
        asked = start("benchmarks.kit.cluster", self.plan.hub, place=self.places[0], stdout=subprocess.PIPE)
        told = asked.communicate(timeout=30)[0]
        found: dict[str, Any] | None = json.loads(told) if asked.returncode == 0 else None
        return found

    # -- nodes

    def start_node(self, name: str, **changes: Any) -> None:
        plan = json.dumps(asdict(replace(self.plan, name=name, ledger=str(self.ledger(name)), **changes)))
        place = self.places[self._place(name)] if self.places else None
        logs = {"stdout": self.log, "stderr": self.log}
        self.nodes[name] = start(self.program, plan, place=place, **logs)

    def ledger(self, name: str) -> Path:
        return self.directory / f"{name}.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a node's ledger, all attempts, without a line that a kill has torn."""
        return ledger_lines(self.ledger(name))

    def latest(self, name: str) -> dict[str, Any]:
        """Return the last line of a node's ledger, without reading the others; {} if there is none."""
        with self.ledger(name).open("rb") as file:
            file.seek(max(0, self.ledger(name).stat().st_size - 512))
            texts = file.read().decode().splitlines()
        found: dict[str, Any] = json.loads(texts[-1]) if texts and texts[-1].endswith("}") else {}
        return found

    def kill_node(self, name: str) -> None:
        self.nodes[name].kill()
        self.nodes[name].wait(10)

    def signal_node(self, name: str, number: signal.Signals) -> None:
        self.nodes[name].send_signal(number)

    def end_node(self, name: str, timeout_s: float = 60.0) -> int:
        """Ask a node to push what it owes and leave; return its exit code."""
        self.nodes[name].terminate()
        return self.nodes[name].wait(timeout_s)

    def end_nodes(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Ask all nodes to push what they owe and leave; return their exit codes."""
        for process in self.nodes.values():
            process.terminate()
        return {name: process.wait(timeout_s) for name, process in self.nodes.items()}

    # -- the network

    def cut(self, name: str) -> None:
        """Drop all packets in both directions; neither end is notified."""
        self._link(name, "down")

    def mend(self, name: str) -> None:
        self._link(name, "up")

    def _link(self, name: str, state: str) -> None:
        set_link(self.places[self._place(name)], state)

    # -- processes

    def left_behind(self) -> list[str]:
        """Return the commands of processes of this field that still run."""
        return left_behind(self.directory)

    def _place(self, name: str) -> int:
        """Return the index of a node's place; nodes are called something-0, something-1, ..."""
        return 1 + int(name.rpartition("-")[2])


def ledger_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger, without a line that a kill has torn."""
    if not path.exists():
        return []
    texts = path.read_text().splitlines()
    return [json.loads(text) for text in texts if text.startswith("{") and text.endswith("}")]


def ledger_tail(path: Path, size: int = 8192) -> list[dict[str, Any]]:
    """Return the lines in the last `size` bytes of a ledger, without one that is torn."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        texts = file.read().decode().splitlines()
    return [json.loads(text) for text in texts if text.startswith("{") and text.endswith("}")]


def left_behind(directory: Path) -> list[str]:
    """Return the commands of processes that still run and name `directory`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(directory) in line and process.pid != os.getpid():
            found.append(line)
    return found


def answered(lines: Sequence[dict[str, Any]]) -> list[Answered]:
    """Return the pushes of one ledger whose answer the node has seen."""
    found, node = [], -1
    for line in lines:
        if line["event"] == "joined":
            node = line["node"]
        elif line["event"] == "answered":
            found.append(Answered(node, line["unit"], line["steps"], line["verdict"]))
    return found


def ask(address: str) -> dict[str, Any] | None:
    """Return the status of the hub at `address`; None if it does not answer within a second."""
    client = HubClient(address, call_timeout_s=1.0)
    try:
        # The lines of the past, most of the status, are not used here.
        request = StatusRequest(metrics_after=2**63)
        status: dict[str, Any] = json.loads(client.status(request).json)
    except (HubUnreachable, HubRefused):
        return None
    finally:
        client.close()
    return status


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    answer = ask(sys.argv[1])
    print(json.dumps(answer))
    sys.exit(answer is None)
