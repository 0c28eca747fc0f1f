"""`aedit join ADDRESS`: join a run as a node, given only the address of its hub, or of a peer of a swarm."""

import contextlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from aedit.launch.config import (
    JoinOptions,
    Placement,
    RunConfig,
    check_effects,
    check_imports,
    flag_keys,
    of_this_machine,
    parse_config,
    with_flags,
)
from aedit.launch.processes.run_local import preflight, run
from aedit.launch.records import claimed
from aedit.proto.rpc import caller_keys, greet, name_of
from aedit.system import host_name
from aedit.types import UserError

T = TypeVar("T")

NAMES = "node_name"
"""File of the run directory with the names of the nodes that joined from it."""


def join(
    addresses: str, flags: list[str], *, name: str = "", keys: Path | None = None, insecure: bool = False
) -> int:
    """Fetch the run's configuration and train as one of its nodes; return the exit code as `aedit run` does.

    Args:
        addresses: HOST:PORT of the hub, or of several that split the units; or of peers of a swarm, or what
            `swarm.peers` may be.
        flags: Settings of this machine, such as `--device cpu`.
        name: Of the node; by default that of its keys, or one that the run directory remembers.
        keys: Folder of keys for TLS.
        insecure: Connect to another machine without TLS.
    """
    peers = addresses

    def received_from(place: str) -> RunConfig:
        reply = greet(place, caller_keys(place, keys, insecure))
        return parse_config(reply.config, f"the configuration of {place}")

    addresses, received = joined_to(addresses, received_from)
    config = with_flags(of_this_machine(received), flags)
    check_imports(config, node=True)
    check_effects(config, dict.fromkeys(flag_keys(flags), 1), defaultdict(lambda: "flag"))
    if config.name != received.name:
        raise UserError(
            f"--name: the hub's run is named {received.name}, not {config.name};"
            " use --as for the name of the node, --dir for its folder"
        )
    if config.swarm.on:
        config = replace(config, swarm=replace(config.swarm, peers=peers))
    else:
        config = replace(config, hub=replace(config.hub, address=addresses))
    preflight(config, Placement())
    run_dir = Path(config.dir) / config.name
    with _named(run_dir, name or name_of(keys)) as own_name:
        membership = JoinOptions(
            hub="" if config.swarm.on else addresses,
            standby=config.hub.standby,
            name=own_name,
            keys=keys,
            insecure=insecure,
        )
        return run(config, Placement(), membership=membership)


def joined_to(place: str, greet: Callable[[str], T]) -> tuple[str, T]:
    """Return the address that was asked, and its answer.

    Args:
        place: Addresses, or a file or multiaddresses that lead to peers of a swarm, which are asked in turn.
        greet: Asks one address. Raises UserError.

    Raises:
        UserError: None of them answers.
    """
    if not (Path(place).is_file() or place.startswith("/")):
        return place, greet(place)
    # Imported here: most runs have a hub.
    from aedit.launch.swarm import introduced

    found = introduced(place)
    for address in found[:-1]:
        with contextlib.suppress(UserError):
            return address, greet(address)
    return found[-1], greet(found[-1])


@contextlib.contextmanager
def _named(run_dir: Path, name: str) -> Iterator[str]:
    """Lock a node name in this directory until the block ends, and yield it.

    It is `name`, or if that is empty the first one that the directory remembers and no running node uses, or
    a new one. A node keeps its name over restarts, and a second `aedit join` in one directory is another
    node.
    """
    remembered = run_dir / NAMES
    names = [name] if name else []
    if not name and remembered.exists():
        names = remembered.read_text(encoding="utf-8").split()
    with contextlib.ExitStack() as held:
        for known in names:
            try:
                held.enter_context(claimed(run_dir, known))
            except UserError:
                if name:
                    raise
            else:
                yield known
                return
        new = f"{host_name()}-{secrets.token_hex(3)}"  # machines may have equal host names
        held.enter_context(claimed(run_dir, new))
        try:
            with remembered.open("a", encoding="utf-8") as file:
                file.write(f"{new}\n")
        except OSError as error:
            raise UserError(f"{remembered}: {error.strerror}; choose another --dir") from None
        yield new
