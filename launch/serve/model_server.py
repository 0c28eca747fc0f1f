"""HTTP servers of one policy until the process is asked to end.

`RunHttp` serves the policy of a run: public requests on the line `run`, after those of trainers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from aedit.launch.node import stop_tokens
from aedit.launch.serve.run_server import Addresses
from aedit.launch.serve.served_run import ServedRun
from aedit.spec_rollout.http import HttpServer, HttpService, TextCodec, control_routes, make_app
from aedit.spec_rollout.server import EngineHost
from aedit.types import UserError


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
    addresses: Addresses | None
    """None: HTTP is not served."""
    folder: Path
    """For the files of the tokenizer."""
    servers: Sequence[HttpServer] = ()

    def start_once(self) -> str:
        """Serve if that has not begun and the policy is there; return the address then, else "".

        Raises UserError if the address cannot be used.
        """
        if self.addresses is None or self.servers or not self.host.engine(self.line).version:
            return ""
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
        self.servers = start_servers(service, self.addresses)
        return self.servers[0].address

    def close(self) -> None:
        """End the server."""
        close_servers(self.servers)
