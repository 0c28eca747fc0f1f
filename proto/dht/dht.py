"""Discovery by hivemind's distributed hash table, whose node is a process of its own.

If that process, p2pd or the table fails, the process is started again after growing pauses, and `state`
says since when there is no table. A node that starts again listens at its former address if that is free,
and calls the nodes that it knew last.
"""

import base64
import ipaddress
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from aedit.proto.dht.child import HivemindProcess, LineProcess
from aedit.proto.swarm import decoded_card
from aedit.system import write_atomically
from aedit.types import PositiveFloat, UserError, checked, printable

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "aedit.proto.dht.dht_process")
_MOST_SKEW_S = 3.0
"""hivemind's limit: records of a peer whose clock differs by more end too early or too late."""
_FIRST_PAUSE_S = 1.0
_LOOK_S = 0.2
_NOT_UP = "it is not up yet"


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class DhtSettings:
    """Settings of a peer's node of the table."""

    run: str
    """Name of the run; "" finds the peers of all runs of the table, and cannot announce."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of nodes, such as /ip4/10.0.0.1/tcp/7000/p2p/12D3...; empty: this is the first node."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses where the node listens."""
    announce: tuple[str, ...] = ()
    """Addresses that others get, where they differ from those of this machine."""
    identity: Path | None = None
    """File of the node's key, made if there is none, so that its address stays; None draws one. What else
    the next start needs is kept beside it."""
    client: bool = False
    """Behind NAT or a firewall: the node calls others, and no other calls it."""
    allow: tuple[bytes, ...] = ()
    """Public keys of the peers whose cards this node stores; empty: those of all peers."""
    every_s: PositiveFloat = 2.0
    """Time between two looks at the table."""
    silent_s: PositiveFloat = 60.0
    """Time without a message after which the process is started again. Its slowest start takes 40 s."""


@checked()
class DhtDiscovery(HivemindProcess):
    """Finds peers by records of a distributed hash table. Any thread may call; no method blocks."""

    def __init__(self, settings: DhtSettings, *, command: Sequence[str] = COMMAND) -> None:
        """Start the process of the table.

        Args:
            settings: Settings of the node.
            command: Program of the process; its last argument will be the id of this process. For tests.

        Raises:
            UserError: hivemind is not installed, or an address of `initial_peers` is none.
        """
        super().__init__(
            command, use="discovery by a DHT", name="dht", first_pause_s=_FIRST_PAUSE_S, look_s=_LOOK_S
        )
        checked_maddrs(settings.initial_peers)
        self._settings = settings
        self._lock = threading.Lock()
        self._card = self._sent = b""
        self._found: tuple[bytes, ...] = ()
        self._maddrs: tuple[str, ...] = ()
        self._kept = KeptNode.load(settings.identity)
        self._trouble, self._trouble_since_s = _NOT_UP, time.time()
        """What is wrong, "" if nothing is, and since when by the wall clock."""
        self._skew_s = 0.0
        self._was_up = False
        self._start()

    def announce(self, card: bytes) -> None:
        """Announce this card while the table is up, until another one is given."""
        with self._lock:
            self._card = card

    def found(self) -> Sequence[bytes]:
        """Return the cards that the table held last, with our own one. Signed or not, they are hints."""
        with self._lock:
            return self._found

    @property
    def state(self) -> str:
        """Return since when there is no table, and why, or how wrong the clock is; "" if all is well."""
        with self._lock:
            faults = []
            if self._trouble:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._trouble_since_s))
                faults.append(f"no hash table since {since}: {self._trouble}")
            if abs(self._skew_s) > _MOST_SKEW_S:
                side = "behind" if self._skew_s > 0 else "ahead of"
                faults.append(
                    f"this machine's clock is {abs(self._skew_s):.1f} s {side} those of other peers, and"
                    f" {_MOST_SKEW_S:g} s are possible: set it"
                )
            return "; ".join(faults)

    @property
    def maddrs(self) -> tuple[str, ...]:
        """Return the addresses by which others join: values for `initial_peers`. Empty for a client."""
        with self._lock:
            return self._maddrs

    @property
    def introduction(self) -> str:
        """Return what a further peer passes to `aedit join`; "" until the table is up, and for a client."""
        return ",".join(self.maddrs)

    def _turn(self, process: LineProcess) -> str:
        """Send the card if it has changed; return why the process must end."""
        if monotonic() - self._spoke_s > self._settings.silent_s:
            return f"its process has said nothing for {self._settings.silent_s:g} s"
        with self._lock:
            card = self._card
        if card and card != self._sent:
            message = {"card": base64.b64encode(card).decode(), "lease_s": decoded_card(card).lease_s}
            if not process.send(message):
                return "its process reads nothing"
            self._sent = card
        return ""

    def _first_message(self) -> dict[str, Any]:
        """Return the settings for the process. Nodes that were there before are as good to begin with.

        p2pd does not start if it reaches none of them, and all may have ended. So a node that was in the
        table before begins alone in every second try, and calls them from there.
        """
        mine, kept, failures = self._settings, self._kept, self.failures
        self._sent = b""
        known = [*dict.fromkeys((*mine.initial_peers, *kept.nodes))]
        was_there = self._was_up or kept.port > 0
        alone = was_there and failures > 0 and failures % 2 == 0
        return {
            "run": mine.run,
            "initial_peers": [] if alone else known,
            "known": known,
            "listen": [kept.listening(maddr) for maddr in mine.listen],
            "announce": list(mine.announce),
            "identity": str(mine.identity) if mine.identity else None,
            "client": mine.client,
            "allow": [key.hex() for key in mine.allow],
            "every_s": mine.every_s,
        }

    def _take(self, message: dict[str, Any]) -> None:
        """Take a message of the process."""
        if "error" in message:
            self._ended(printable(str(message["error"]), 256))
        if "found" not in message:
            return
        with self._lock:
            self._found = tuple(base64.b64decode(card) for card in message["found"])
            self._maddrs = tuple(map(str, message["maddrs"]))
            self._skew_s = float(message["skew_s"] or 0.0)
            if self._trouble not in ("", _NOT_UP):
                log.warning("the hash table is back after %.1f s", time.time() - self._trouble_since_s)
            self._trouble, self._was_up, self.failures = "", True, 0
            nodes = list(filter(is_maddr, map(str, message["neighbours"])))
            # An announced port may be that of a router.
            kept = self._kept.renewed(() if self._settings.announce else self._maddrs, nodes)
            if kept != self._kept:
                self._kept = kept
                kept.save(self._settings.identity)

    def _ended(self, reason: str) -> None:
        """Note what is wrong. The time since when stays while anything is wrong."""
        with self._lock:
            if self._trouble in ("", _NOT_UP) and not self._closed.is_set():
                log.warning("no hash table: %s; peers that know each other go on", reason)
            self._trouble_since_s = self._trouble_since_s if self._trouble else time.time()
            self._trouble = reason


_PORT = re.compile(r"/tcp/(\d{1,5})(?:/|$)")
_LISTENS_AT = re.compile(r"/ip[46]/([^/]+)/tcp/0")
_MOST_NODES = 16


@dataclass(frozen=True, slots=True)
class KeptNode:
    """Port and known nodes of a node's last start. A node without them starts all the same."""

    port: int = 0
    """Port where the node has listened last; 0 if it has not."""
    nodes: tuple[str, ...] = ()
    """Addresses of other nodes."""

    @classmethod
    def load(cls, identity: Path | None) -> "KeptNode":
        """Return what is kept beside the file of the node's key; nothing if there is none."""
        try:
            found = json.loads(_file(identity).read_text(encoding="utf-8")) if identity else {}
            port, nodes = int(found.get("port", 0)), tuple(filter(is_maddr, map(str, found.get("nodes", ()))))
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()
        return cls(port if 0 < port < 2**16 else 0, nodes[:_MOST_NODES])

    def save(self, identity: Path | None) -> None:
        """Write what is kept beside the file of the node's key."""
        try:
            if identity:
                content = {"port": self.port, "nodes": self.nodes}
                write_atomically(_file(identity), json.dumps(content, indent=1) + "\n", sync=False)
        except OSError as error:
            log.warning("the hash table's last nodes cannot be kept: %s", error)

    def renewed(self, maddrs: Sequence[str], nodes: Sequence[str]) -> "KeptNode":
        """Return this with what a node reports now; the former nodes stay while there are no others."""
        port = _PORT.search(maddrs[0]) if maddrs else None
        return KeptNode(int(port[1]) if port else self.port, tuple(sorted(nodes)) or self.nodes)

    def listening(self, maddr: str) -> str:
        """Return a multiaddress that takes any port with the port of before instead, if that is free."""
        found = _LISTENS_AT.fullmatch(maddr)
        if not (found and self.port):
            return maddr
        with socket.socket(socket.AF_INET6 if ":" in found[1] else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((found[1], self.port))
            except OSError:
                return maddr
        return f"{maddr.removesuffix('0')}{self.port}"


def _file(identity: Path) -> Path:
    return identity.with_name(f"{identity.name}.last.json")


_MADDR = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/.*/p2p/[1-9A-HJ-NP-Za-km-z]{20,80}")


def is_maddr(text: str) -> bool:
    """Return whether `text` is the multiaddress of a peer."""
    return bool(_MADDR.fullmatch(text))


def checked_maddrs(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return `texts`. Raise UserError that names the first one that is not the multiaddress of a peer."""
    for text in texts:
        if not is_maddr(text):
            raise UserError(
                f"{printable(text, 128)!r} is not the address of a peer, as in"
                " /ip4/10.0.0.1/tcp/7000/p2p/12D3KooW..."
            )
    return texts


def listening_maddr(listen: str, port: int) -> str:
    """Return the multiaddress of the host in HOST:PORT with another port; all interfaces if it is empty."""
    host = listen.rpartition(":")[0].strip("[]") or "0.0.0.0"
    try:
        found = ipaddress.ip_address(socket.gethostbyname(host) if ":" not in host else host)
    except (OSError, ValueError) as error:
        raise UserError(f"swarm.listen: {host!r} is no address of this machine ({error})") from None
    return f"/ip{found.version}/{found}/tcp/{port}"


def announced_maddr(host: str, port: int) -> str:
    """Return the multiaddress by which others reach a host name or an IP address."""
    try:
        return f"/ip{ipaddress.ip_address(host.strip('[]')).version}/{host.strip('[]')}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"
