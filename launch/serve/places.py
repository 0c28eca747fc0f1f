"""Addresses of a rollout server: where it listens, and where others reach it."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aedit.launch.config import RunConfig
from aedit.proto.rpc import SERVER, ServerKeys, check_address, check_exposure, is_loopback, server_keys
from aedit.types import UserError

_EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class HttpPlace:
    """Address of HTTP, and the keys of its clients."""

    host: str
    port: int
    key_file: Path | None
    """Keys of clients; None: everybody is served."""

    @classmethod
    def of(cls, place: str, key_file: Path | None, *, insecure: bool) -> Self:
        """Return the place HOST:PORT.

        Raises UserError for a wrong address, and for one that everybody could use without a key.
        """
        host, _, port = place.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 2**16):
            raise UserError(f"--http {place}: expected HOST:PORT, as in 127.0.0.1:8000")
        if key_file is None and not insecure and not is_loopback(place):
            raise UserError(
                f"--http {place} can be reached from other machines, and anybody could use it: name a file of"
                " keys with --api-key-file, or say --insecure if the network is closed"
            )
        return cls(host.strip("[]"), int(port), key_file)


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Addresses as the user has given them."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT for trainers and other servers; port 0 takes a free one."""
    announced: str = ""
    """HOST:PORT at which they reach it; empty: where it listens."""
    http: HttpPlace | None = None
    """Address of HTTP; None: no HTTP."""

    def server_keys(self, keys: Path | None, config: RunConfig, *, insecure: bool) -> ServerKeys:
        """Return the TLS keys of the server.

        Raises UserError for a wrong address, and if others could connect without TLS and not `insecure`.
        """
        host, _, port = self.listen.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 2**16):
            raise UserError(f"--address {self.listen}: expected HOST:PORT, as in 10.0.0.1:7001")
        if self.announced:
            check_address(self.announced)
        if keys is not None and not (keys / f"{SERVER}.key").exists():
            raise UserError(
                f"--keys {keys}: has no {SERVER}.key, with which trainers recognise this server; make a"
                " folder for it with aedit keys"
            )
        mutual = config.hub.certificates
        found = server_keys(keys, require_client_certificates=mutual) if keys is not None else None
        check_exposure(self.listen, found, insecure)
        return found or ServerKeys()

    def reached_at(self, port: int) -> str:
        """Return the address to announce, for a server that listens at `port`."""
        if self.announced:
            return self.announced
        host = self.listen.rpartition(":")[0]
        return f"{socket.gethostname() if host.strip('[]') in _EVERYWHERE else host}:{port}"
