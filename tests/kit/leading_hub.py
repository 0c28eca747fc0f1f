"""A hub that leads, in this process, behind a real gRPC server: for tests of what callers may do."""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.cli.keys import make_keys
from aedit.launch.config import load
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.main import _Process
from aedit.proto.rpc import HubClient, client_keys
from kit.hub_processes import Client, write_run


@dataclass
class LeadingHub:
    """`process`: the parts of `aedit hub`. Its clients have the keys in the folder `keys`."""

    process: _Process
    address: str
    keys: Path | None = None

    @property
    def leading(self):
        return self.process._leading

    @property
    def followers(self):
        """Return the hubs that have confirmed a part of the journal."""
        return self.leading.leadership._replica.followers(float("-inf"))

    def client(self, keys=""):
        found = client_keys(self.keys / keys) if keys else None
        return HubClient(self.address, found, call_timeout_s=5.0)

    def node(self, name="node", keys="", **changes):
        """Return a node that has not joined, with the keys of a folder."""
        made = Client(self.address, name, **changes)
        made.hub = self.client(keys)
        return made


def keys_of(folder, nodes=(), hosts=("127.0.0.1",), **others):
    """Make keys for a hub on loopback, or without hosts for a swarm; return their folder."""
    make_keys(folder / "keys", hosts, nodes, **others)
    return folder / "keys"


@contextmanager
def leading_hub(folder, more="", keys=None, force=False, holder="hub", above=0, **settings):
    """Yield a hub that leads. more: lines of its `[hub]` table. keys: folder that `keys_of` has made.

    holder: of the keys of the hub. above: number below its first term.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = load(write_run(folder, more, **settings), []).config
    own = keys / holder if keys else None
    endpoint = HubEndpoint(config, folder / "hub", (0, 1), False, "127.0.0.1:0", own)
    (folder / "hub").mkdir(exist_ok=True)
    process = _Process(endpoint, insecure=False)
    try:
        process.start(force=force, above=above)
        yield LeadingHub(process, process._server.address, keys)
    finally:
        process.close()
