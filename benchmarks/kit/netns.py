"""Small network of namespaces, one switch, and a shaped uplink per node. Needs root."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND_S = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """Node's end of the network."""

    namespace: str
    interface: str
    address: str


def why_not() -> str | None:
    """Return why this machine cannot have such a network; None if it can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces: not run"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs the commands `ip` and `tc` (iproute2): not run"
    try:
        with network(1, 100):
            return None
    except subprocess.CalledProcessError as error:
        return f"this kernel refuses `{' '.join(error.cmd)}` ({error.stderr.strip()}): not run"


def wires() -> str:
    """Return how processes are connected here, for the method of a table."""
    why = why_not()
    return "each in a network namespace" if why is None else f"on one network ({why}), so no wire is cut"


@contextmanager
def network(nodes: int, rate_mbit: int) -> Iterator[list[Place]]:
    """Set up `nodes` namespaces around one switch, every node sending at most `rate_mbit`.

    They are removed afterwards, also after Ctrl-C or SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    switch = f"aedit-{os.getpid()}-switch"
    places = [Place(f"aedit-{os.getpid()}-{n}", f"ae{n}", f"10.77.0.{n + 1}") for n in range(nodes)]
    made: list[str] = []
    try:
        for name in (switch, *(place.namespace for place in places)):
            run_command(f"ip netns add {name}")
            made.append(name)
        run_command(f"ip -n {switch} link add bridge type bridge")
        run_command(f"ip -n {switch} link set bridge up")
        for place in places:
            _join(place, switch, rate_mbit)
        yield places
    finally:
        for name in made:  # its interfaces go with a namespace, and their other ends with them
            run_command(f"ip netns del {name}")
        signal.signal(signal.SIGTERM, before)


def _join(place: Place, switch: str, rate_mbit: int) -> None:
    at = f"ip -n {place.namespace}"
    port = f"port-{place.interface}"
    run_command(f"{at} link add {place.interface} type veth peer name {port} netns {switch}")
    run_command(f"ip -n {switch} link set {port} master bridge")
    run_command(f"ip -n {switch} link set {port} up")
    run_command(f"{at} addr add {place.address}/24 dev {place.interface}")
    run_command(f"{at} link set lo up")
    run_command(f"{at} link set {place.interface} up")
    # Packets leave in clumps of up to 64 KiB, and at 1 Gbit/s one tick of the timer is worth more than that.
    burst_kb = max(64, rate_mbit)
    run_command(
        f"tc -n {place.namespace} qdisc add dev {place.interface} root tbf rate {rate_mbit}mbit "
        f"burst {burst_kb}kb latency 400ms"
    )


def set_link(place: Place, state: str) -> None:
    """Drop all packets from and to `place` with "down", so that neither end is notified; "up" ends that."""
    switch = place.namespace.rpartition("-")[0] + "-switch"
    run_command(f"ip -n {switch} link set port-{place.interface} {state}")


def split(places: Sequence[Place], group: Sequence[Place]) -> None:
    """Let `group` and the others reach their own members only, so that no end is notified; () ends that."""
    switch = f"{places[0].namespace.rpartition('-')[0]}-switch"
    if "apart" not in run_command(f"ip -n {switch} -brief link show type bridge"):
        run_command(f"ip -n {switch} link add apart type bridge")
        run_command(f"ip -n {switch} link set apart up")
    for place in places:
        bridge = "apart" if place in group else "bridge"
        run_command(f"ip -n {switch} link set port-{place.interface} master {bridge}")


def run_command(command: str) -> str:
    """Return the output of `command`. Raises subprocess.CalledProcessError if it fails."""
    words = command.split()
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=COMMAND_S).stdout
