"""`aedit serve HOST:PORT`: a rollout server of the run of a hub."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from aedit.child import StopSignals
from aedit.launch.config import RunConfig, check_imports, of_this_machine, parse, with_flags
from aedit.launch.serve.places import ServerPlaces
from aedit.proto.rpc import HelloReply, HubRefused, HubUnreachable, ServerKeys, caller_keys, greet
from aedit.system import keep_one_arena
from aedit.types import UserError

if TYPE_CHECKING:  # they load torch, which takes seconds: what the user can correct is said before
    from aedit.launch.serve.run_member import RunMember

LEAVE_S = 20.0
"""Longest wait after a signal for trainers that take their samples back."""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """Words of the command line."""

    hub: str
    """HOST:PORT of the hub, or of several that split the units."""
    flags: Sequence[str] = ()
    """Settings of this machine, such as `--serve.rows 8`."""
    name: str = ""
    places: ServerPlaces
    keys: Path | None = None
    insecure: bool = False


def serve_run(request: ServeRequest) -> int:
    """Generate for the run until it is finished, a signal arrives, or the hub bans this server.

    Returns:
        0 after the end of the run or a signal, 1 if the server was banned or has failed.

    Raises:
        UserError: The user must correct something.
    """
    keep_one_arena()
    client_keys = caller_keys(request.hub, request.keys, request.insecure)
    reply = greet(request.hub, client_keys)
    config = run_config(reply, request)
    server_keys = request.places.server_keys(request.keys, config, insecure=request.insecure)
    stop = StopSignals()
    with ExitStack() as opened:
        member = opened.enter_context(_member(request, config, reply, server_keys))
        print(member.welcome(), flush=True)
        while not stop.asked.wait(LOOK_S) and not member.is_over:
            member.look()
        if stop.asked.is_set():
            member.leave(LEAVE_S)
        print(member.farewell(), flush=True)
        return member.exit_code


def run_config(reply: HelloReply, request: ServeRequest) -> RunConfig:
    """Return the run's configuration with the settings of this machine."""
    told = parse(reply.config, f"the configuration of {request.hub}")
    config = with_flags(of_this_machine(told), list(request.flags))
    if config.name != told.name:
        raise UserError(
            f"--name: the hub's run is named {told.name}, not {config.name};"
            " use --as for the name of the server, --dir for its folder"
        )
    check_imports(config, node=True)
    hubs = ",".join(reply.addresses) or request.hub
    return replace(config, hub=replace(config.hub, address=hubs))


@contextmanager
def _member(
    request: ServeRequest, config: RunConfig, reply: HelloReply, keys: ServerKeys
) -> Iterator["RunMember"]:
    from aedit.launch.serve.run_member import RunMember
    from aedit.launch.serve.server_folder import server_folder

    with server_folder(Path(config.dir) / config.name, request.name, request.keys) as folder:
        member = RunMember(
            config,
            folder,
            hubs=(request.hub.split(",")[0], *([reply.standby] if reply.standby else [])),
            client_keys=caller_keys(request.hub, request.keys, request.insecure),
            server_keys=keys,
            places=request.places,
        )
        try:
            member.start()
            yield member
        except (HubRefused, HubUnreachable) as error:
            raise UserError(str(error)) from None
        finally:
            member.close()
