"""HTTP servers of one policy until the process is asked to end.

`RunHttp` serves the policy of a run: public requests on the line `run`, after those of trainers.
"""

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import AutoTokenizer

from aedit.launch.node import stop_tokens
from aedit.launch.serve.run_server import HttpPlace
from aedit.launch.serve.served_run import ServedRun
from aedit.spec_rollout.http import HttpServer, HttpService, TextCodec, control_routes, make_app
from aedit.spec_rollout.server import EngineHost
from aedit.types import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses of a served policy, and the keys that each accepts."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    """Accepted by the public address; empty: all are served."""
    control: tuple[str, int] | None = None
    control_keys: tuple[str, ...] = ()
    weights_root: Path | None = None
    """Weights are read from directories below it only."""


@dataclass(slots=True)
class EndRequest:
    """Request to end, made by a signal."""

    asked: threading.Event = field(default_factory=threading.Event)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.asked.set()


def read_keys(path: Path, option: str) -> tuple[str, ...]:
    """Return the keys of a file: one a line, empty lines and lines that begin with # left out.

    Raises:
        UserError: It cannot be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UserError(f"{option} {path}: must have one key a line, of letters, digits and signs")
    return keys


def start_servers(service: HttpService, addresses: Addresses) -> list[HttpServer]:
    """Start the public server, and the one for control if it has an address.

    Raises:
        UserError: An address cannot be bound.
    """
    public = make_app(service, addresses.keys)
    servers = [_start(service, public, (addresses.host, addresses.port), "--host, --port")]
    if addresses.control is not None:
        app = make_app(service, addresses.control_keys, control_routes(addresses.weights_root))
        try:
            servers.append(_start(service, app, addresses.control, "--control"))
        except UserError:
            close_servers(servers)
            raise
    return servers


def close_servers(servers: Sequence[HttpServer]) -> None:
    """Close all servers."""
    for server in servers:
        server.close()


def wait_for_end(ending: EndRequest, service: HttpService) -> BaseException | None:
    """Wait until the process is asked to end; return the error if the engine's thread has died first."""
    while not ending.asked.wait(0.5):
        if service.host.error is not None:
            return service.host.error
    return None


def _start(service: HttpService, app: object, place: tuple[str, int], option: str) -> HttpServer:
    try:
        return HttpServer(app, *place, service.limits)  # type: ignore[arg-type]
    except (OSError, OverflowError) as error:
        raise UserError(f"{option}: {place[0]}:{place[1]} cannot be served: {error}") from None


_tokenizers: Any = AutoTokenizer  # its methods carry no types


@dataclass(slots=True)
class RunHttp:
    """HTTP server of the run's policy; serves from `start`, when the line has a version."""

    host: EngineHost
    run: ServedRun
    line: str
    place: HttpPlace | None
    """None: HTTP is not served."""
    folder: Path
    """For the files of the tokenizer."""
    servers: Sequence[HttpServer] = ()

    def start_once(self) -> str:
        """Serve if that has not begun and the policy is there; return the address then, else "".

        Raises UserError if the address cannot be used.
        """
        if self.place is None or self.servers or not self.host.engine(self.line).version:
            return ""
        place, key_file = self.place, self.place.key_file
        keys = () if key_file is None else read_keys(key_file, "--api-key-file")
        addresses = Addresses(host=place.host, port=place.port, keys=keys)
        self.folder.mkdir(exist_ok=True)
        self.run.tokenizer.save(self.folder)
        service = HttpService(
            host=self.host,
            line=self.line,
            codec=TextCodec(_tokenizers.from_pretrained(self.folder, trust_remote_code=False)),
            model=self.run.config.name,
            eos=stop_tokens(self.run.model, self.run.tokenizer.eos_id),
        )
        service.metrics.follow(self.host.status)
        self.servers = start_servers(service, addresses)
        return self.servers[0].address

    def close(self) -> None:
        """End the server."""
        close_servers(self.servers)
