"""Where a hub listens, and where the others of its run are."""

from dataclasses import dataclass
from pathlib import Path

from aedit.launch.config.config import RunConfig
from aedit.launch.hub import folder
from aedit.proto.wire.security import ClientKeys, ServerKeys, check_exposure, client_keys, server_keys
from aedit.types import UserError


@dataclass(frozen=True, slots=True)
class Place:
    """One hub process among those of its run."""

    config: RunConfig
    directory: Path
    part: tuple[int, int]
    standby: bool
    """Whether it was started as the one that follows."""
    address: str
    """HOST:PORT as configured; port 0 is any."""
    keys: Path | None

    @property
    def listens_at(self) -> str:
        """Where it was before, so that those who know it find it again, if it may choose its port."""
        before = folder.read_line(self.directory / "address")
        same_host = before.rpartition(":")[0] == self.address.rpartition(":")[0]
        return before if self.address.endswith(":0") and same_host else self.address

    @property
    def is_second(self) -> bool:
        """Whether it listens where the configuration has the standby, whatever it does there."""
        return bool(self.config.hub.standby) and self.address == self.config.hub.standby and self.standby

    @property
    def other(self) -> str:
        """The hub that leads if this one does not, or follows if it does; empty: none, or not known yet."""
        if not self.config.hub.standby:
            return ""
        if self.is_second:
            return folder.found_at(self.config.hub.addresses[self.part[0]], self._beside(self.part[0]))
        return folder.found_at(self.config.hub.standby, self.directory.parent / "standby")

    def addresses(self) -> tuple[str, ...]:
        """Of all hubs that split the units, this one being the one that leads its part."""
        mine, own = self.part[0], folder.read_line(self.directory / "address") or self.address
        configured = self.config.hub.addresses
        found = [folder.found_at(place, self._beside(k)) or place for k, place in enumerate(configured)]
        host = configured[mine].rpartition(":")[0] if mine < len(found) else ""
        if mine < len(found) and (self.is_second or host == own.rpartition(":")[0]):
            found[mine] = own
        return tuple(found)

    def server_keys(self, *, insecure: bool) -> ServerKeys:
        """What callers must show. UserError if everybody could reach it and nothing was asked of them."""
        mutual = self.config.hub.certificates
        if mutual and not self.keys:
            raise UserError("hub.certificates: needs --keys with what `aedit keys` made for the hub")
        keys = server_keys(self.keys, require_client_certificates=mutual) if self.keys else None
        check_exposure(self.address, keys, insecure)
        return keys or ServerKeys()

    def client_keys(self) -> ClientKeys:
        """What it shows to the other hub."""
        return client_keys(self.keys) if self.keys else ClientKeys()

    def _beside(self, part: int) -> Path:
        """Folder of another hub of a local run."""
        name = f"hub_{part}" if self.part[1] > 1 else "hub"
        return self.directory if part == self.part[0] and not self.is_second else self.directory.parent / name
