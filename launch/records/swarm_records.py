"""State of a swarm as frozen values, read from a peer's reply to `status`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aedit.launch.records.hub_records import HubSample
from aedit.launch.records.values import Line, number, text


@dataclass(frozen=True, slots=True)
class PeerSample:
    """One live peer, as another one knows it."""

    name: str
    address: str
    """HOST:PORT; empty for a client."""
    owns: tuple[int, ...]
    """Parts that it owns."""
    keeps: tuple[int, ...]
    """Parts that it follows."""
    state: str
    role: str = ""
    """What it does: `trains`, `keeps parts` or both."""
    steps_per_s: float = 0.0
    """Speed of its node; 0 if it is unknown."""
    model: str = ""
    """Digest of what its node trains; empty without a node."""

    @staticmethod
    def of(line: Line) -> "PeerSample":
        """Return the peer in one entry of `peers`."""
        return PeerSample(
            name=text(line["name"]),
            address=text(line.get("address")),
            owns=tuple(int(part) for part in line.get("owns") or ()),
            keeps=tuple(int(part) for part in line.get("keeps") or ()),
            state=text(line.get("state")),
            role=text(line.get("role")),
            steps_per_s=number(line.get("steps_per_s") or 0.0),
            model=text(line.get("model")),
        )


@dataclass(frozen=True, slots=True)
class PartSample:
    """One part of the model, as its owner tells; all unknown while it has none that answers."""

    owner: str = ""
    """HOST:PORT."""
    in_sync: int = 0
    """Followers that confirm each acknowledged push."""
    hub: HubSample | None = None
    bytes_in: float = 0.0
    """Bytes of pushes that the owner has received since it began to lead."""
    bytes_out: float = 0.0
    """Bytes of anchors that it has given."""
    digest: str = ""
    """Digest of the newest anchors that it has given; empty before it has given all units of the part."""
    trouble: str = ""
    """Fault or former fault of the part, as told by the peer that was asked; "" without one."""

    @staticmethod
    def of(line: Line | None, trouble: str = "") -> "PartSample":
        """Return the part in one entry of `parts`."""
        if line is None:
            return PartSample(trouble=trouble)
        in_sync = int(line.get("in_sync") or 0)
        traffic = line.get("traffic") or {}
        return PartSample(
            owner=text(line.get("owner")),
            in_sync=in_sync,
            hub=HubSample.of(line),
            bytes_in=number(traffic.get("bytes_in") or 0),
            bytes_out=number(traffic.get("bytes_out") or 0),
            digest=text(traffic.get("digest")),
            trouble=trouble,
        )


@dataclass(frozen=True, slots=True)
class SwarmSample:
    """Peers and parts at one time."""

    peers: tuple[PeerSample, ...]
    parts: tuple[PartSample, ...]

    @staticmethod
    def of(said: Mapping[str, Any]) -> "SwarmSample":
        """Return the state in a reply to `status`."""
        troubles = list(map(text, said.get("troubles") or ()))
        troubles += [""] * (len(said["parts"]) - len(troubles))
        return SwarmSample(
            tuple(PeerSample.of(peer) for peer in said["peers"]),
            tuple(PartSample.of(*both) for both in zip(said["parts"], troubles, strict=False)),
        )

    @property
    def hub(self) -> HubSample | None:
        """Return the state of the first part whose owner answers: all nodes take part in each."""
        return next((part.hub for part in self.parts if part.hub is not None), None)
