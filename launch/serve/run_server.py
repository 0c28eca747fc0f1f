"""`aedit serve HOST:PORT`: a rollout server of the run of a hub, its addresses, and its folder and name.

The folder is kept over restarts, and used by one process at a time.
"""

import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aedit import traces
from aedit.child import StopSignals
from aedit.launch.config import (
    RunConfig,
    VllmConfig,
    check_effects,
    check_imports,
    flag_keys,
    of_this_machine,
    parse_config,
    with_flags,
)
from aedit.launch.records import KEY_FILE, claimed
from aedit.proto.rpc import (
    SERVER,
    HelloReply,
    HubRefused,
    HubUnreachable,
    ServerKeys,
    SigningKey,
    caller_keys,
    check_address,
    check_exposure,
    greet,
    is_loopback,
    name_of,
    server_keys,
)
from aedit.system import host_name, keep_one_arena
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.launch.serve.run_member import RunMember

LEAVE_S = 20.0
"""Longest wait after a signal for trainers that take their samples back."""
LOOK_S = 1.0
"""Interval of looks at what no event reports: a first policy for HTTP, and a line of metrics that is due."""
MOST_HERE = 64
"""Servers without a name in one run directory."""
_EVERYWHERE = ("0.0.0.0", "::", "")


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

    @classmethod
    def of_run(cls, place: str, key_file: Path | None, *, insecure: bool) -> Self:
        """Return the address HOST:PORT of a run's policy. key_file: keys of clients; None: all are served.

        Raises UserError for a wrong address or file, and for an address that others could use without a key.
        """
        host, _, port = place.rpartition(":")
        if not (host and port.isdecimal() and int(port) < 2**16):
            raise UserError(f"--http {place}: expected HOST:PORT, as in 127.0.0.1:8000")
        if key_file is None and not insecure and not is_loopback(place):
            raise UserError(
                f"--http {place} can be reached from other machines, and anybody could use it: name a file of"
                " keys with --api-key-file, or say --insecure if the network is closed"
            )
        keys = () if key_file is None else read_keys(key_file, "--api-key-file")
        return cls(host=host.strip("[]"), port=int(port), keys=keys)


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


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Addresses as the user has given them."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT for trainers and other servers; port 0 takes a free one."""
    announced: str = ""
    """HOST:PORT at which they reach it; empty: where it listens."""
    http: Addresses | None = None
    """None: no HTTP."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """Arguments of the command line."""

    hub: str
    """HOST:PORT of the hub, or of several that split the units."""
    flags: Sequence[str] = ()
    """Settings of this machine, such as `--serve.rows 8`."""
    engine: str = "aedit"
    """Engine of all lines: `aedit` or `vllm`."""
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
        traces.begin(config.traces.endpoint, "serve", ratio=config.traces.ratio, run=config.name)
        opened.callback(traces.end_traces)
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
    shared = parse_config(reply.config, f"the configuration of {request.hub}")
    config = with_flags(of_this_machine(shared), [*request.flags, "--rl.engine", request.engine])
    of_traces = flag_keys(list(request.flags)) & {"traces.endpoint", "traces.ratio"}
    check_effects(config, dict.fromkeys(of_traces, 1), defaultdict(lambda: "flag"))
    check_served_engine(request.engine, config.rollout.vllm)
    if config.rollout.vllm.has_own_drafter:
        raise UserError(
            "rollout.vllm.speculative: method eagle3 needs a model here: policy versions have no drafter"
        )
    if config.name != shared.name:
        raise UserError(
            f"--name: the hub's run is named {shared.name}, not {config.name};"
            " use --as for the name of the server, --dir for its folder"
        )
    check_imports(config, node=True)
    hubs = ",".join(reply.addresses) or request.hub
    return replace(config, hub=replace(config.hub, address=hubs))


def check_served_engine(engine: str, vllm: VllmConfig) -> None:
    """Raise UserError for settings of vLLM without it."""
    if vllm.server or vllm.weights != VllmConfig().weights:
        raise UserError("--rollout.vllm.server and weights have no effect with aedit serve: remove them")
    if engine == "aedit" and vllm != VllmConfig():
        raise UserError("--rollout.vllm has no effect with --engine aedit: add --engine vllm, or remove it")


@contextmanager
def _member(
    request: ServeRequest, config: RunConfig, reply: HelloReply, keys: ServerKeys
) -> Iterator["RunMember"]:
    from aedit.launch.serve.run_member import RunMember

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


@dataclass(frozen=True, slots=True)
class ServerFolder:
    """Folder of one server in a run directory."""

    path: Path
    name: str
    """Name of the server in the run."""
    key: SigningKey


@contextmanager
def server_folder(run_dir: Path, name: str, keys: Path | None) -> Iterator[ServerFolder]:
    """Lock a folder in `run_dir`/servers until the block ends, and yield it.

    Args:
        run_dir: Of the run.
        name: Of the server. Empty: that of its certificate, or one made of the host name and its key. A
            second process in the same directory then is another server.
        keys: Folder of keys for TLS.

    Raises:
        UserError: The name is not valid, a server of this name is running in this directory, or the folder
            cannot be written.
    """
    name = name or name_of(keys)
    with ExitStack() as held:
        path = _claimed(run_dir / "servers", name, held)
        try:
            path.mkdir(parents=True, exist_ok=True)
            key = SigningKey.kept(path / KEY_FILE)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}; choose another --dir") from None
        except ValueError as error:
            raise UserError(str(error)) from None
        yield ServerFolder(path, name or f"{host_name()}-{key.public.hex()[:6]}", key)


def _claimed(servers: Path, name: str, held: ExitStack) -> Path:
    if name:
        held.enter_context(claimed(servers, name))
        return servers / name
    for number in range(1, MOST_HERE):
        try:
            held.enter_context(claimed(servers, f"server-{number}"))
        except UserError:
            continue
        return servers / f"server-{number}"
    held.enter_context(claimed(servers, f"server-{MOST_HERE}"))  # its error says why
    return servers / f"server-{MOST_HERE}"
