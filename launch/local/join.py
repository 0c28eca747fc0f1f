"""`aedit join HOST:PORT`: be a node of a run that is going on, with nothing but the hub's address."""

import secrets
import socket
from dataclasses import replace
from pathlib import Path

from aedit.launch.config.config import LocalConfig, RunConfig
from aedit.launch.config.flags import with_flags
from aedit.launch.config.load import parse
from aedit.launch.config.placement import Membership, Placement
from aedit.launch.local.run import run
from aedit.launch.rundir.prepare import write_atomically
from aedit.launch.rundir.provenance import source_digest
from aedit.proto.wire.hello import caller_keys, greet
from aedit.types import UserError


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


def _greet(addresses: str, keys: Path | None, insecure: bool) -> RunConfig:
    reply = greet(addresses, caller_keys(addresses, keys, insecure), code=source_digest())
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
