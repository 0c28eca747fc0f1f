"""HTTP beside a rollout server: everybody's requests on the line `run`, after those of trainers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from aedit.launch.node import stop_tokens
from aedit.launch.serve.model_server import Addresses, close_servers, read_keys, start_servers
from aedit.launch.serve.places import HttpPlace
from aedit.launch.serve.served_run import ServedRun
from aedit.spec_rollout.http import HttpServer, HttpService, TextCodec
from aedit.spec_rollout.server import EngineHost

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
