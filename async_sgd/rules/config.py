"""Configuration of the outer step and of the hub. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from aedit.types import (
    ImportPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    check,
    checked,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")

Codec = Literal["fp32", "bf16", "int8", "e3m0", "ternary", "topk"]

MergeRule = Literal["mean", "rda", "trimmed", "median", "geometric-median", "multi-krum", "centered-clip"]


ELEMENTWISE = ("trimmed", "median")
"""Merge rules that order the values of each element."""


@checked("outer")
@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer optimizer: it turns an averaged pseudo-gradient into the next anchor."""

    kind: Literal["average", "nesterov", "delayed-nesterov", "heloco"] | ImportPath = "nesterov"
    """`average` subtracts lr times the mean; `nesterov` is SGD with Nesterov momentum; `delayed-nesterov`
    takes the momentum in only once per `delay` updates, for a hub that merges every arrival (`hub.grace` 0);
    `heloco` turns what contradicts the momentum towards it, tensor by tensor, at a hub. Or a class of your
    own as `package.module:Name`; its constructor gets those of the values below that it names, but
    `correction`."""

    lr: PositiveFloat = 0.8
    """Outer learning rate; 1 with `average` is plain parameter averaging."""

    momentum: Annotated[float, Range(least=0, below=1)] = 0.85
    """Momentum of both Nesterov kinds; not used by `average`."""

    delay: PositiveInt = 4
    """Updates per momentum step (N of arXiv:2401.09135, algorithm 3); about the number of nodes. A hub that
    merges every arrival knows how many there are: however many, a push of each of them together moves the
    anchor as one mean of theirs."""

    activation: Share = 0.0
    """Share of the momentum that takes part in every update in between (c of arXiv:2401.09135)."""

    correction: NonNegativeFloat = 1.0
    """Strength of the correction of `heloco` (k_s and k_d of arXiv:2606.00271)."""

    look_ahead: bool = False
    """Hand out the point where the momentum will carry the anchor next instead of the anchor itself, so
    that what comes back late was measured near where it lands. Needs a hub and momentum."""

    def __post_init__(self) -> None:
        no_momentum = self.look_ahead and self.kind == "average"
        check(not no_momentum, "outer.look_ahead", "needs momentum, not outer.kind =", self.kind)


@checked("edit.penalty")
@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyConfig:
    """The pseudo-gradient penalty.

    Anomaly detection, weights and clipping (EDiT, arXiv:2412.07210, section 3.2).
    """

    weights: Literal["uniform", "scale-free", "paper"] = "scale-free"
    """`scale-free` is softmax(-(G_i / median_j G_j - 1) / temperature); `paper` is softmax(-G_i /
    temperature); `uniform` weighs every trusted node equally."""

    temperature: PositiveFloat = 1.0
    """Raising it moves the weights towards uniform."""

    step_weight: Share = 0.0
    """Share of the weight given in proportion to inner steps since the last round (A-EDiT uses 0.5)."""

    detector: Literal["off", "robust", "ema"] = "robust"
    """`robust` judges log-norms against a drift-corrected median; `ema` is the paper's z-test on raw norms.
    Non-finite norms are distrusted whatever the detector, also when it is `off`."""

    threshold: PositiveFloat = 3.5
    """Standard deviations above its own history at which a unit's norm is distrusted; the paper uses 3."""

    warmup_rounds: Annotated[int, Range(least=2)] = 4
    """Rounds of history a unit needs before it can be distrusted for its size."""

    window: int = 16
    """Rounds of history the `robust` detector keeps."""

    ema: Annotated[float, Range(above=0, below=1)] = 0.02
    """Weight of the newest norm in the `ema` detector's running mean and variance."""

    patience: PositiveInt = 3
    """Distrusted finite rounds in a row after which a unit's history starts anew from them, so that a lasting
    change (a new learning rate, new data) cannot lock a node out."""

    clip: PositiveFloat | None = 10.0
    """Largest norm of a unit's averaged pseudo-gradient; larger ones are scaled down. None: never."""

    def __post_init__(self) -> None:
        check(
            self.window >= self.warmup_rounds,
            "edit.penalty.window",
            "must be at least warmup_rounds",
            self.window,
        )


@checked("hub.staleness")
@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """Weight of a pseudo-gradient that was measured from an older anchor."""

    rule: Literal["constant", "polynomial", "exponential"] = "polynomial"
    """With s versions in between: 1, (1 + s)^-power, or exp(-rate s) times a cosine gate that is 0 from
    `cutoff` on (arXiv:2605.09126)."""

    power: NonNegativeFloat = 0.5
    rate: NonNegativeFloat = 0.1

    cutoff: PositiveInt = 64
    """Versions after which a pseudo-gradient is refused, whatever the rule; its node keeps the progress and
    measures it anew."""


@checked("hub.push_filter")
@dataclass(frozen=True, slots=True, kw_only=True)
class PushFilterConfig:
    """Limits on the size and direction of a push, beyond well-formedness."""

    threshold: PositiveFloat = 5.0
    """Robust standard deviations (MAD of log-norms) above which a norm is refused."""

    cosine: bool = True
    """With at least four pushes to merge, weigh 0 what points away from every other one."""

    clip: PositiveFloat | None = 2.0
    """Scale down what is longer than this many median norms of its unit, for its steps, and what makes up
    more than three quarters of the way that a merge of three or more moves the anchor. None: never."""

    violations: PositiveInt = 8
    """Refused pushes, less one for every 16 accepted ones, after which a node is excluded."""


@checked("hub.limits")
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitConfig:
    """Limits per peer of the hub."""

    nodes: PositiveInt = 256
    """Members at a time."""

    servers: Annotated[int, Range(least=1, most=512)] = 256
    """Rollout servers in the directory at a time; they are no members."""

    names: PositiveInt = 16
    """Names of nodes that one host may take in a run, members or not, where callers have no keys of their
    own; of the hub's own machine `nodes`."""

    calls_per_s: PositiveFloat = 200.0
    """Calls of one node per second, with bursts of as many."""

    in_flight_bytes: int = 2**30
    """Bytes of all pushes being received at a time; who comes above it is asked to wait."""

    connections: PositiveInt = 1024
    """Connections of one host at a time; the ones above it that were silent for longest are ended."""

    def __post_init__(self) -> None:
        bound = self.in_flight_bytes >= 2**20
        check(bound, "hub.limits.in_flight_bytes", "must be at least 1 MiB", self.in_flight_bytes)


@checked("hub")
@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """An asynchronous run: who owns the anchors, and how what arrives becomes the next ones."""

    address: str = ""
    """HOST:PORT of the hub; port 0 takes a free one. Empty: no hub, the nodes share one `torchrun` world.
    Several, separated by commas, split the units among as many hub processes."""

    standby: str = ""
    """HOST:PORT of a hub that follows the journal and can be elected when the hub fails. Several standbys are
    separated by commas; if several hubs split the units, each of them has one, in the same order."""

    parent: str = ""
    """HOST:PORT of the hub of which this one is a node, for two levels (HALoS, arXiv:2506.04531)."""

    parent_every: PositiveInt = 32
    """Versions of a unit between two exchanges with the parent."""

    parent_mix: Annotated[float, Range(above=0, most=1)] = 0.25
    """Share of the parent's anchor in the anchor it is mixed into."""

    quorum: PositiveInt | Literal["all"] = 1
    """Nodes whose pushes of a unit make a new anchor: a number of them, or with `all` every member that is
    alive. With a number, what is merged counts as the share of a round that its nodes have: 1/N of
    N nodes, or their share by `hub.weights`."""

    grace: NonNegativeFloat = 0.5
    """Once a quorum is there, wait for the others this share of the usual time between merges. Nodes train on
    meanwhile. 0 with a quorum of 1: every arrival makes an anchor of its own."""

    grace_cap_s: NonNegativeFloat = 10.0
    """Longest such wait."""

    merge: MergeRule | ImportPath = "mean"
    """Weighted mean; mean norm times mean direction per matrix where directions agree (RDA); or, for members
    who are not trusted: the mean without the extremes of every element (`trimmed`), the middle of every
    element, the geometric median, the mean of those that are close to many others (`multi-krum`), or the
    mean of differences that are no longer than usual (`centered-clip`). Or a function of your own as
    `package.module:name`."""

    merge_cut: Annotated[float, Range(least=0, below=0.5)] = 1 / 3
    """Share of the pushes at either end that `trimmed` leaves out, and share of liars that `multi-krum`
    reckons with; below half."""

    weights: Literal["uniform", "steps", "tokens", "penalty"] = "penalty"
    """Of a push in its merge, and of its node's share of a round: equal; its steps; tokens^2 / steps
    (arXiv:2604.21428); or EDiT's, by norm and steps as `edit.penalty` says."""

    endless: bool = False
    """Keep the run open: `train.steps` and `train.seconds` are no budget, and each node decides when it
    leaves. For nodes with training loops of their own."""

    max_steps_ahead: PositiveInt = 1024
    """Steps a node trains on without an answer from the hub before it waits. Its leases of data may end
    before: they last for `4 * expire_s`, or twice as long as the hub was away of late."""

    codec: Codec | ImportPath = "bf16"
    """How pseudo-gradients travel up: `e3m0` is 4 bits, `ternary` 1.7, `topk` keeps 192 of every 4096 in 2
    bits. Or a class of your own as `package.module:Name`, which the hub and every node must be able to
    import."""

    codec_down: Codec | ImportPath = "fp32"
    """How anchors travel down: `fp32` sends them whole, the others what has changed since the version the
    node has."""

    heartbeat_s: PositiveFloat = 0.5
    """How often a node reports and asks for news while it awaits some; else up to four times as long. Where
    the heartbeats of all members would take more than a quarter of a core, the hub asks for longer intervals;
    a push may carry a report, too."""

    expire_s: float = 15.0
    """Silence after which a node is no longer counted on. Its data goes to others when 20 times as long has
    passed. At least three of the intervals that the hub has asked for, where these are longer than
    `heartbeat_s`."""

    lease_samples: PositiveInt = 4096
    """Most samples in one lease; no sample is with two nodes."""

    snapshot_bytes: int = 2**25
    """Journal bytes after which a snapshot lets the hub forget them; at least twice what the last snapshot
    has. A hub that comes back reads that much, and a new replica or standby fetches it."""

    threads: NonNegativeInt = 0
    """Units that are merged at a time; each takes up to 12 bytes per parameter of its unit meanwhile. 0: half
    of the cores."""

    fsync: bool = True
    """An accepted push is on the disk before it is acknowledged, not only in the file system's cache."""

    model_sha256: str = ""
    """Digest of units, shapes, facts and samples that the first node must have; `aedit config model` prints
    it. Empty: the first node to join decides what the run trains."""

    anchors_sha256: tuple[str, ...] = ()
    """Digest of the first anchor of each unit; `aedit config model` prints them. "" for a unit takes any.
    Empty: the first node's parameters are the first anchors."""

    certificates: bool = False
    """Let in only nodes with a certificate of their own (mTLS), besides the token that all share."""

    metrics_port: Annotated[int, Range(least=0, most=65535)] | None = None
    """Serve Prometheus metrics on this port of the hub's host."""

    view: str = ""
    """HOST:PORT of a page of the run for browsers, at the first hub, or at a peer of a swarm; empty: none.
    Port 0 chooses a free one. Other hosts than 127.0.0.1 need keys of the hub."""

    policy_versions: PositiveInt = 4
    """Versions of the policy that the hub keeps for rollout servers: one that has any of them needs only what
    has changed since. Each takes up to 2 bytes per parameter (4 unless `rl.engine_dtype` is bf16), and only
    while a server is there."""

    call_timeout_s: PositiveFloat = 30.0
    """Deadline of every call but bulk transfers, which have it per MiB."""

    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    push_filter: PushFilterConfig = field(default_factory=PushFilterConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)

    @property
    def each_alone(self) -> bool:
        """Return whether every arrival makes an anchor of its own."""
        return self.quorum == 1 and not self.grace

    def __post_init__(self) -> None:
        for name in ("address", "standby", "parent"):
            for place in filter(None, getattr(self, name).split(",")):
                host, _, port = place.rpartition(":")
                check(bool(host) and port.isdecimal(), f"hub.{name}", "must be HOST:PORT", repr(place))
        host, _, port = self.view.rpartition(":")
        fits = not self.view or (bool(host) and port.isdecimal() and port.isascii() and int(port) < 1 << 16)
        check(fits, "hub.view", "must be HOST:PORT, such as 127.0.0.1:8080", repr(self.view))
        rule = 'must not order single elements with hub.codec = "topk", as few pushes have the same ones and'
        rule += ' the middle of their values is 0; use "mean" or "geometric-median"'
        check(self.codec != "topk" or self.merge not in ELEMENTWISE, "hub.merge", rule, repr(self.merge))
        check(
            self.expire_s > 2 * self.heartbeat_s, "hub.expire_s", "must be above 2 heartbeats", self.expire_s
        )
        check(
            self.snapshot_bytes >= 2**20, "hub.snapshot_bytes", "must be at least 1 MiB", self.snapshot_bytes
        )
        for name, found in (("model_sha256", (self.model_sha256,)), ("anchors_sha256", self.anchors_sha256)):
            for digest in filter(None, found):
                check(bool(_SHA256.fullmatch(digest)), f"hub.{name}", "must be 64 hexadecimal digits", digest)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return one address per hub process; hub k owns the units i with i % len(addresses) == k."""
        return tuple(filter(None, self.address.split(",")))

    def standbys_of(self, part: int) -> tuple[str, ...]:
        """Return the standbys of hub process `part`: all, or one each if several hubs split the units."""
        given = tuple(filter(None, self.standby.split(",")))
        return given if len(self.addresses) == 1 else given[part : part + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRule:
    """Rule of a unit that is trained apart from the model, by name in `HubPlan.rules` and `MeanExchange`.

    Such a unit has training steps of its own, which are no steps of the run and weigh its pushes. A node that
    made none pushes nothing to a hub; where all nodes take part, it weighs 0, and where none made any nothing
    is sent. Its pseudo-gradients are neither screened nor clipped by size or
    direction, as their sizes say nothing beside those of other units: only values that are not finite are
    refused. A hub never waits for a quorum of them.
    """

    outer: OuterConfig = field(default_factory=lambda: OuterConfig(kind="average", lr=1.0))
    """Default: the average of those who trained."""

    weights: Literal["uniform", "steps"] = "steps"
    """Weight of a push in the average: its own training steps, or equal."""


DRAFTER = "drafter"
"""Name of the unit that holds the shared drafter."""

UnitRules = Mapping[str, UnitRule]
"""Rules by name of the unit; units without an entry follow the run's rules."""


@checked()
@dataclass(frozen=True, kw_only=True)
class HubPlan:
    """The part of the run's configuration that a hub needs."""

    hub: HubConfig
    outer: OuterConfig
    penalty: PenaltyConfig
    every: PositiveFloat
    """Length of a local phase, in steps or, with pace "seconds", in seconds."""
    pace: Literal["steps", "dylu", "seconds"] = "dylu"
    """Rule that decides when a node pushes: `edit.schedule` of the run."""
    steps: PositiveInt
    """The budget: inner steps per node, as the mean over those who are members."""
    seconds: PositiveFloat | None = None
    """The budget in time, if that is used up sooner."""
    part: tuple[NonNegativeInt, PositiveInt] = (0, 1)
    """(k, n): this hub owns the units i with i % n == k."""
    step_tokens: NonNegativeInt = 0
    """Tokens that an inner step of a node counts for, as the hub's own configuration has it; 0: not known."""
    leases: bool = False
    """True if every inner step takes at least one leased sample: leases then bound the steps of a node."""
    rules: UnitRules = field(default_factory=dict)
    """Units that are trained apart from the model, by name: the drafter that a run shares."""
