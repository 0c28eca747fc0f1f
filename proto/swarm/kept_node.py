"""The file in which a node of a hash table keeps its port, and the other nodes that it knew last."""

import json
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aedit.proto.swarm.maddr import is_maddr
from aedit.system import write_atomically

log = logging.getLogger(__name__)

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
                told = {"port": self.port, "nodes": self.nodes}
                write_atomically(_file(identity), json.dumps(told, indent=1) + "\n", sync=False)
        except OSError as error:
            log.warning("the hash table's last nodes cannot be kept: %s", error)

    def renewed(self, maddrs: Sequence[str], nodes: Sequence[str]) -> "KeptNode":
        """Return this with what a node tells now; the former nodes stay while there are no others."""
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
