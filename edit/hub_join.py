"""Connection of a training loop to a hub: settings that it sends, positions that it leases, reports to it.

`open_link` reads the settings of the run, then starts the node's agent.
"""

import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import aedit
from aedit import traces
from aedit.async_sgd.rules import DRAFTER, HubConfig
from aedit.edit import flat_layout
from aedit.edit.config import EditConfig
from aedit.edit.exchange import Polled
from aedit.edit.schedule import RoundSchedule, make_pace
from aedit.edit.shards import Shards, control_device, shards_of
from aedit.edit.shared_module import SharedModule, TrainedApart
from aedit.edit.units import SyncUnit, find_units
from aedit.edit.waiting import Waiter
from aedit.proto.agent import AgentLink, AgentPlan, Link, Progress, attach_agent, rejoin_secret, start_agent
from aedit.proto.rpc import HelloReply
from aedit.types import Share, UnitLayout, UserError, check_url, checked

Positions = NDArray[np.int64]
T = TypeVar("T")

_NONE = "none"
"""The text that stands for None in a configuration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Settings of a run, as its hub reports them."""

    run: str
    """Name of the run."""
    edit: EditConfig
    """Units, fragments, interval and deadline, with `landing` set to "arrival"."""
    hub: HubConfig
    """Codecs and timings; `address` and `standby` say where this node reaches the hub."""
    shares_drafter: bool = False
    """The run has a sync unit for a drafter that is trained apart from the model."""

    @classmethod
    def of(cls, reply: HelloReply, addresses: str) -> "HubSettings":
        """Return the settings in a hub's reply to Hello.

        Keys that this version does not know are ignored, so that a newer hub can be joined.

        Args:
            reply: The hub's answer.
            addresses: HOST:PORT under which this node has reached the hub, or several that split the units.
                One address of a run with several hubs is enough: the reply lists the others.

        Raises:
            ValueError: The reply holds no configuration, or values of the wrong type.
        """
        try:
            tables = tomllib.loads(reply.config)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{addresses}: its configuration is not valid TOML: {error}") from None
        hub = _made(HubConfig, tables.get("hub", {}))
        drafter, learns_from_rewards = tables.get("drafter", {}), tables.get("prompts", {}).get("source")
        kinds = ("layer", "auto") if learns_from_rewards else ("layer",)
        given = addresses.split(",")
        known = given if len(given) >= len(reply.addresses) else list(reply.addresses)
        return cls(
            run=reply.run,
            edit=replace(_made(EditConfig, tables.get("edit", {})), landing="arrival"),
            hub=replace(hub, address=",".join(known), standby=reply.standby or hub.standby),
            # Defaults are left out of a hub's configuration.
            shares_drafter=drafter.get("kind", "auto") in kinds and bool(drafter.get("share", True)),
        )

    def schedule(self, link: Link) -> RoundSchedule:
        """Return a new schedule that follows the hub's pace."""
        return make_pace(self.edit, link.news)


def _made(kind: type[T], table: dict[str, Any]) -> T:
    """Return the dataclass `kind` with the values of a TOML table."""
    types = get_type_hints(kind)
    known = {name: _value(types[name], value) for name, value in table.items() if name in types}
    return kind(**known)


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return _made(hint, value)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if value == _NONE and type(None) in options:
        return None
    return tuple(value) if isinstance(value, list) else value


class LeasedPositions:
    """The hub's endless stream of positions 0, 1, 2, ..., as far as it is leased to this node.

    No position is leased to two nodes at a time, and what a dead node has not used goes to others.
    """

    def __init__(self, link: Link, waiter: Waiter) -> None:
        """Read leases from `link`; `waiter` waits when the hub was away longer than its leases last."""
        self.link, self.waiter = link, waiter
        self.drawn = 0
        """Samples drawn so far, in this attempt."""
        self._block = 0  # the next draw is from this block of the leases,
        self._before = 0  # which begins after so many draws

    @property
    def next(self) -> int:
        """Position of the next draw; the end of the last lease if all are drawn, 0 if there was none."""
        blocks = self.link.leases()
        if not blocks:
            return 0
        block, before = self._find(blocks)
        if block == len(blocks):
            return blocks[-1][1]
        return blocks[block][0] + self.drawn - before

    def take(self, k: int, *, or_end: bool = False) -> Positions:
        """Draw the next k positions. All ranks of the node call it together and get the same.

        Args:
            k: Number of samples.
            or_end: Return none instead of waiting when the hub has said that the run is finished.

        Raises:
            PeersMissing: The hub leased no more of them within the waiter's deadline.
        """

        def poll() -> Positions | None:
            positions = self.peek(k)
            is_over = positions is None and or_end and self.link.news().finished
            return np.zeros(0, np.int64) if is_over else positions

        positions = self.waiter.wait_together(Polled(poll), f"a lease of {k} samples from the hub")
        if or_end and not self.waiter.shards.all([len(positions) == k])[0]:
            return np.zeros(0, np.int64)
        self.drawn += k
        return positions

    def go_back(self, drawn: int) -> None:
        """Draw again what was drawn after the first `drawn` samples of this attempt."""
        self.drawn = drawn
        self._block = self._before = 0

    def peek(self, k: int) -> Positions | None:
        """Return the next k positions without drawing them; None while the leases have fewer."""
        blocks = self.link.leases(self.drawn + k)
        self._block, self._before = self._find(blocks)
        found: list[Positions] = []
        missing, skip = k, self.drawn - self._before
        for start, end in blocks[self._block :]:
            part = np.arange(start + skip, min(start + skip + missing, end), dtype=np.int64)
            found.append(part)
            missing, skip = missing - len(part), 0
            if not missing:
                return np.concatenate(found)
        return None if missing else np.zeros(0, np.int64)

    def _find(self, blocks: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the block of the next draw, and how many draws come before it."""
        block, before = self._block, self._before
        while block < len(blocks) and before + blocks[block][1] - blocks[block][0] <= self.drawn:
            before += blocks[block][1] - blocks[block][0]
            block += 1
        return block, before


class StepReport:
    """Steps, speed, loss and samples of one node, for its hub."""

    def __init__(self, link: Link, settings: HubSettings, *, tokens_per_step: int, leases_data: bool) -> None:
        """Report to the agent behind `link`."""
        self.link, self.settings = link, settings
        self.tokens_per_step, self.leases_data = tokens_per_step, leases_data
        self.loss = float("nan")
        self.trained = 0
        """Samples drawn for the steps so far, in this attempt."""
        self._waiter = Waiter(Shards(), settings.edit.timeout_s)
        self._leased = LeasedPositions(link, self._waiter)
        self._progress = Progress()
        self._member = False
        self._began_s = time.monotonic()

    @property
    def drawn(self) -> int:
        """Samples drawn in this attempt."""
        return self._leased.drawn

    def begin(self, shards: Shards) -> None:
        """Start the clock: the node is a member from now on."""
        self._waiter.shards, self._member = shards, True
        self._began_s = time.monotonic()

    def draw(self, n: int) -> Positions:
        """Return the next `n` positions, or none once the run is finished; see `HubExchange.lease`."""
        if not self.leases_data:
            raise ValueError("no data is leased to this node: call HubExchange.join(..., num_samples=...)")
        if not self._member:
            raise ValueError("the hub leases data to members only: call lease() inside `with sync:`")
        return self._leased.take(n, or_end=True)

    def step(self, steps: int, waited_s: float, used: int) -> None:
        """Report an inner step: steps so far, seconds spent waiting, samples used."""
        self.trained = self.drawn
        waited_s += self._waiter.waited_s
        busy_s = max(0.0, time.monotonic() - self._began_s - waited_s)
        self._progress = Progress(steps, steps * self.tokens_per_step, busy_s, waited_s)
        self.send(used)

    def send(self, used: int) -> None:
        """Report once more, with the samples used by now."""
        if self._waiter.shards.leads:
            self.link.tell(replace(self._progress, loss=self.loss, used=used, drawn=self.drawn))


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class HubNodeOptions:
    """The options that each node sets for itself."""

    name: str
    """Kept over restarts: the same name gets the same index."""
    keys: str | Path | Literal[False] | None = None
    """Folder that `aedit keys` wrote; None: no TLS, on this machine only; False: no TLS anywhere."""
    num_samples: int = 0
    """Samples of the data set; 0: the hub leases no data to this node."""
    directory: str | Path | None = None
    """Folder of this node, kept over restarts: it holds the secret by which the hub knows that it is the same
    node. None: unless its keys have its name, a restarted node waits until the hub has given up its
    predecessor (`hub.expire_s`)."""
    agent: Literal["process", "thread"] = "process"
    """Place of the network traffic: a process of its own, or a thread."""
    drafter: TrainedApart | None = None
    """Drafter that the nodes of the run share."""
    traces: str = ""
    """URL of an OTLP receiver over HTTP that gets the traces of the pushes; empty: no traces."""
    trace_ratio: Share = 1.0
    """Share of the pushes that are traced."""

    def __post_init__(self) -> None:
        check_url("traces", self.traces)


def open_link(
    address: str, model: nn.Module, options: HubNodeOptions, shared: SharedModule | None = None
) -> tuple[AgentLink, HubSettings, tuple[UnitLayout, ...]]:
    """Read the settings of the run from the hub and start this node's agent; the node is not a member yet.

    Returns the link to the agent, the settings, and the units: those of the model, and that of `shared`.

    All ranks of the node call it together, each with its shard of the model.

    Raises:
        ValueError: On every rank of the node: there is no such hub, it refuses the node, the keys cannot be
            read, or the model does not have the units that the run names.
    """
    shards = shards_of(list(model.parameters()))
    reply_text, error = _on_first_rank(shards, lambda: _responder(address, options))
    if error:
        raise ValueError(error)
    from aedit.proto.rpc import HelloReply

    settings = HubSettings.of(HelloReply.FromString(bytes.fromhex(reply_text)), address)
    if settings.shares_drafter and shared is None and settings.hub.endless:
        raise ValueError(f"run {settings.run} shares a drafter: pass drafter=online to HubExchange.join")
    if shared is not None and not settings.shares_drafter:
        raise ValueError(
            f'run {settings.run} shares no drafter: join without one, or set drafter.kind = "layer" in the '
            "configuration of its hub"
        )
    plan = node_plan(model, settings, options, shared)
    link: AgentLink | None = None

    def start() -> str:
        nonlocal link
        traces.begin(options.traces, "node", ratio=options.trace_ratio, run=settings.run, node=options.name)
        link = start_agent(plan, ranks=shards.size, mode=options.agent)
        return link.path

    path, error = _on_first_rank(shards, start)
    if error:
        raise ValueError(error)
    return link or attach_agent(path, shards.rank), settings, plan.units


def check_units(units: Sequence[SyncUnit], link: Link, joined: tuple[UnitLayout, ...] | None) -> None:
    """Raise ValueError unless `units` are those that the exchange was made for.

    joined: names and shapes of the model that was joined with; None where only the sizes in `link` are known.
    """
    remedy = (
        "give LayerSync.of the model that was joined with, frozen where it was then, and no"
        " EditConfig(units=...) of its own"
    )
    ours, theirs = [unit.numel for unit in units], [len(anchor) for anchor in link.anchors]
    if ours != theirs:
        raise ValueError(
            f"the units have {ours} parameters, and the exchange was made for {theirs}: {remedy}"
        )
    for here, there in zip(flat_layout.layout(units).units, joined or (), strict=bool(joined)):
        if here != there:
            raise ValueError(f"unit {here.name} is {here}, and the exchange was made for {there}: {remedy}")


def shared_drafter(model: nn.Module, options: HubNodeOptions) -> SharedModule | None:
    """Return the unit of the drafter that this node brings, not yet attached to an exchange; None: none."""
    if options.drafter is None:
        return None
    shapes = {name: tensor.shape for name, tensor in options.drafter.tensors().items()}
    return SharedModule(DRAFTER, shapes, next(model.parameters()).device)


def node_plan(
    model: nn.Module, settings: HubSettings, options: HubNodeOptions, shared: SharedModule | None = None
) -> AgentPlan:
    """Return the plan of this node's agent."""
    hub = settings.hub
    apart = [shared.unit] if shared is not None else []
    units = flat_layout.layout([*find_units(model, settings.edit.units), *apart]).units
    return AgentPlan(
        addresses=hub.addresses,
        standbys=tuple(hub.standby.split(",")) if hub.standby else (),
        name=options.name,
        run=settings.run,
        version=aedit.__version__,
        units=units,
        num_samples=options.num_samples or 1,  # required by the hub; without leases it has no effect
        samples_per_step=1 if options.num_samples else 0,
        steps_ahead=hub.max_steps_ahead,
        lease_samples=hub.lease_samples,
        rejoin=rejoin_secret(Path(options.directory) / "rejoin" if options.directory else None),
        codec=hub.codec,
        codec_down=hub.codec_down,
        traces=options.traces,
        keys=str(options.keys or ""),
        donor="127.0.0.1:0" if hub.address.startswith("127.") and not options.keys else "",
        heartbeat_s=hub.heartbeat_s,
        expire_s=hub.expire_s,
        round_s=settings.edit.round_s,
        call_timeout_s=hub.call_timeout_s,
    )


def _responder(address: str, options: HubNodeOptions) -> str:
    """Return the hub's reply as text, which can be sent to the other ranks."""
    # Only now: a trainer whose agent is a process needs gRPC for this one call.
    from aedit.proto.rpc import caller_keys, check_address, greet, is_loopback

    for place in address.split(","):
        check_address(place)
        if options.keys is None and not is_loopback(place):
            raise ValueError(
                f"{place} is another machine: pass keys=FOLDER with what `aedit keys` wrote for nodes, or"
                " keys=False if the network is closed"
            )
    keys = caller_keys(address, Path(options.keys) if options.keys else None, insecure=True)
    return greet(address, keys).SerializeToString().hex()


def _on_first_rank(shards: Shards, act: Callable[[], str]) -> tuple[str, str]:
    """Return the result of `act` on the node's first rank, and its error, which is empty if there was none.

    All ranks get the same, so that none waits for another one that has failed.
    """
    found = ["", ""]
    if shards.leads:
        try:
            found = [act(), ""]
        except (UserError, ValueError) as error:
            found = ["", str(error)]
    if shards.size > 1:
        device = torch.device(control_device(shards.group))
        dist.broadcast_object_list(found, group=shards.group, group_src=0, device=device)
    return found[0], found[1]
