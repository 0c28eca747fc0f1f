"""`aedit join HOST:PORT`: be a node of a run that is going on, with nothing but the hub's address."""

import secrets
import socket
from dataclasses import replace
from pathlib import Path

import aedit
from aedit.launch.config import LocalConfig, RunConfig
from aedit.launch.flags import with_flags
from aedit.launch.load import parse
from aedit.launch.placement import Membership, Placement
from aedit.launch.prepare import write_atomically
from aedit.launch.run import run
from aedit.proto.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.hub_pb2 import HelloReply, HelloRequest
from aedit.proto.membership import PROTOCOL
from aedit.proto.security import ClientKeys, client_keys, is_loopback
from aedit.types import UserError

HELLO_LIMIT_S = 10.0


def join(
    addresses: str, flags: list[str], *, name: str = "", keys: Path | None = None, insecure: bool = False
) -> int:
    """Fetch the run's configuration, then train as one of its nodes; the exit code as of `aedit run`.

    addresses: HOST:PORT of the hub, or of several that split the units. flags: what this machine has
    otherwise, such as `--device cpu`. name: of the node; by default one that its run directory remembers.
    """
    config = with_flags(_of_this_machine(_greet(addresses, keys, insecure)), flags)
    config = replace(config, hub=replace(config.hub, address=addresses))
    run_dir = Path(config.dir) / config.name
    name = name or _remembered_name(run_dir)
    membership = Membership(
        hub=addresses, standby=config.hub.standby, name=name, keys=keys, insecure=insecure
    )
    return run(config, Placement(), membership=membership)


def member_keys(addresses: str, keys: Path | None, insecure: bool) -> ClientKeys:
    """What a node shows to its hub; UserError if others could listen in and nobody has said that they may."""
    if keys is not None:
        return client_keys(keys)
    open_to_others = [place for place in addresses.split(",") if not is_loopback(place)]
    if open_to_others and not insecure:
        raise UserError(
            f"{open_to_others[0]} is another machine: name what `aedit keys` made for this node with --keys,"
            " or say --insecure if the network is closed"
        )
    return ClientKeys()


def _greet(addresses: str, keys: Path | None, insecure: bool) -> RunConfig:
    client = HubClient(
        addresses.split(",")[0], member_keys(addresses, keys, insecure), call_timeout_s=HELLO_LIMIT_S
    )
    try:
        reply: HelloReply = client.hello(HelloRequest(protocol=PROTOCOL, version=aedit.__version__))
    except (HubUnreachable, HubRefused) as error:
        raise UserError(str(error)) from None
    finally:
        client.close()
    return parse(reply.config, f"the configuration of {addresses}")


def _of_this_machine(config: RunConfig) -> RunConfig:
    """What is told by the hub is what to train; where and on what is this machine's affair."""
    own = RunConfig()
    if config.name in (".", ".."):
        raise UserError(f"the hub's run is called {config.name!r}, which is no directory name")
    return replace(config, dir=own.dir, device=own.device, local=LocalConfig())


def _remembered_name(run_dir: Path) -> str:
    """Equal after a restart, different for two volunteers whose machines have one name."""
    path = run_dir / "node_name"
    try:
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, name)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another --dir") from None
    return name
