"""All connections of a rank to rollout servers: opened, watched, ended, opened again; and their settings.

One thread uses it. Held samples are released at once, or after an audit in a thread of its own. Imports no
torch.
"""

import json
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from aedit.proto.rpc import DirectoryClient, client_keys, make_accusation
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.proto.versions import LineUnknown, VersionsClient, VersionStore
from aedit.spec_rollout.audit import Auditor, AuditVerdict, HeldRollout, Origin, try_auditor
from aedit.spec_rollout.remote.connection import Connection, ServerStream
from aedit.spec_rollout.remote.discovery import Place, ServerDiscovery
from aedit.spec_rollout.remote.publisher import (
    VersionGiven,
    VersionSender,
    VersionSource,
    tensors_of,
    version_layout,
)
from aedit.spec_rollout.remote.report_checks import Violation
from aedit.spec_rollout.remote.session import Held
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL, TokenDecoder
from aedit.spec_rollout.server import Channel, Message
from aedit.spec_rollout.training import ArrayReader
from aedit.types import (
    Layout,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TensorLayout,
    UnitLayout,
    check,
    checked,
    imported,
)

REPORT_S = 0.1
"""Interval of reports on a server whose figures have changed."""
BEAT_S = 0.5
"""Interval of messages to the rank without other messages."""
LONGEST_TICK_S = 1.0
"""A longer time between two looks is this process's own silence, not that of the servers."""
HOLD_S = 2.0
"""Longest time for which a sample is held without an audit."""

log = logging.getLogger(__name__)


def _no_member() -> tuple[int, int]:
    """Return index and session of a node without a hub."""
    return 0, 0


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Rollout servers of one rank; see `WorkerSource`."""

    addresses: tuple[str, ...] = ()
    """HOST:PORT of servers that are always tried."""
    hubs: tuple[str, ...] = ()
    """HOST:PORT of hubs; the first one lists the servers of the run."""
    standby: str = ""
    """Address of the first hub's standby."""
    run: str = ""
    """Name of the run, equal on the servers."""
    trainer: str = ""
    """Name of this node in logs."""
    rank: NonNegativeInt = 0
    keys: Path | None = None
    """Folder of the node's keys; None: plaintext."""
    layout: Layout | None = None
    """Sync units of the model, equal on the servers; None: one unit per transformer block, and `rest`."""
    dtype: str = ""
    """Dtype of the versions that servers are given, equal on them: bf16, fp32 or fp64; empty: that of the
    workers."""
    on_new_version: Literal["recompute", "finish"] = "recompute"
    """Samples that are running at a server when a new version comes continue with it, or end with theirs."""
    silent_s: PositiveFloat = 5.0
    """Seconds without a sign of life after which a server is given up and its samples continue elsewhere."""
    stalled_s: PositiveFloat = 60.0
    """Seconds without a token of a sample after which this sample continues elsewhere, and time in which a
    server must answer the request to return one."""
    connect_s: PositiveFloat = 10.0
    """Limit of the time until a server answers."""
    poll_s: PositiveFloat = 3.0
    """Interval of the questions for the list of servers."""
    ring: PositiveInt = 8
    """Policy versions that are kept, to send others only what has changed since."""
    auditor: str = ""
    """Function as `package.module:name` that is called with `LinkSettings` and returns an `Auditor`; empty:
    what has the right form is delivered at once."""
    audit_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the audit, which JSON can hold."""
    member: Callable[[], tuple[int, int]] = _no_member
    """Returns index and session of this node at the hub, which takes accusations of servers from members."""
    logs: Path | None = None
    """Directory of the process's output; None discards it."""

    def __post_init__(self) -> None:
        known = ("", "bf16", "fp32", "fp64")
        check(self.dtype in known, "Servers: dtype", f"must be one of {', '.join(known[1:])}", self.dtype)
        check(bool(self.addresses or self.hubs), "addresses", "must name a server, or hubs one", "none")
        check(len(set(self.addresses)) == len(self.addresses), "addresses", "must differ", self.addresses)
        for address in (*self.addresses, *self.hubs):
            host, _, port = address.rpartition(":")
            fits = bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
            check(fits, "addresses", "must be HOST:PORT", repr(address))

    @classmethod
    def at(cls, *addresses: str, **settings: Any) -> "Servers":
        """Return servers at these addresses, HOST:PORT each; no hub is needed."""
        return cls(addresses=addresses, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings(Servers):
    """`Servers` and the policy, for the process that connects; `member` stays with the rank."""

    specs: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and dtype of each tensor in the shared memory."""
    fd: int
    """Number of the file descriptor of the shared memory."""
    vocabulary: int
    """Number of token ids."""
    tokenizer: str
    """Directory of a saved tokenizer; empty: none."""

    @classmethod
    def of(cls, servers: Servers, weights: Mapping[str, Any], vocabulary: int, tokenizer: str) -> Self:
        """Return the settings of a process.

        Args:
            servers: The servers.
            weights: The shared memory, as `SharedWeights.described` gives it.
            vocabulary: Number of token ids.
            tokenizer: Directory of a saved tokenizer; empty: none.

        Raises:
            ValueError: The policy has not the units or the dtype that servers expect.
        """
        specs = tuple((name, tuple(shape), dtype) for name, shape, dtype in weights["specs"])
        made = cls(
            **{each.name: getattr(servers, each.name) for each in fields(servers)},
            specs=specs,
            fd=weights["fd"],
            vocabulary=vocabulary,
            tokenizer=tokenizer,
        )
        found = made.layout or layout_of([(name, shape) for name, shape, _ in specs])
        version_layout(specs, found, made.dtype)
        return replace(made, layout=found, trainer=made.trainer or secrets.token_hex(4))

    def to_json(self) -> str:
        """Return them as text, from which `from_json` makes them again."""
        found = asdict(replace(self, member=_no_member))
        del found["member"]
        return json.dumps(found, default=str)


BLOCK = re.compile(r"(.*?\.\d+)\.")
"""Name of a transformer block at the start of a tensor's name."""


def layout_of(tensors: list[tuple[str, tuple[int, ...]]]) -> Layout:
    """Return one unit per transformer block, after the unit `rest`, as `LayerSync` divides such models.

    tensors: name and shape of each tensor.
    """
    units: dict[str, list[TensorLayout]] = {"rest": []}
    for name, shape in tensors:
        found = BLOCK.match(name)
        units.setdefault(found[1] if found else "rest", []).append(TensorLayout(name, shape))
    return Layout(tuple(UnitLayout(name, tuple(parts)) for name, parts in units.items() if parts))


class Links:
    """Connections by number; numbers are not used again."""

    def __init__(
        self, settings: LinkSettings, channel: Channel, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """Begin to connect.

        Args:
            settings: The servers, and the policy.
            channel: To the rank.
            post: Takes what other threads want this one to call, in order; may block.
        """
        self.settings, self._channel, self._post = settings, channel, post
        self.connections: dict[int, Connection] = {}
        self._places: dict[str, Place] = {}
        """The addresses that were ever listed."""
        self._list({})
        self._keys = client_keys(settings.keys) if settings.keys else None
        self._line = f"rank-{secrets.token_hex(8)}"
        assert settings.layout is not None
        layout = version_layout(settings.specs, settings.layout, settings.dtype)
        self._store = VersionStore(layout, ring=settings.ring)
        reader = ArrayReader(settings.specs, settings.fd)
        self._source = VersionSource(
            reader, self._store, self._line, self._soon(self._stored), self._soon(self._fail)
        )
        self._auditor = _auditor(settings)
        self._audits: queue.SimpleQueue[Callable[[Auditor], None]] = queue.SimpleQueue()
        """Calls of the auditor, for its thread."""
        if self._auditor is not None:
            threading.Thread(
                target=self._run_audits, args=(self._auditor,), name="audit", daemon=True
            ).start()
        self._discovery = None
        if settings.hubs:
            client = DirectoryClient(settings.hubs, settings.run, self._keys, standby=settings.standby)
            listed = self._soon(self._list)
            self._discovery = ServerDiscovery(client, settings.poll_s, listed, time.monotonic)
        self._decoder: TokenDecoder | None = None
        self._member = (0, 0)
        """Index and session of the node at the hub."""
        self._version, self._last_number, self._beat_s = 0, 0, time.monotonic()

    def handle(self, lane: int, data: bytes) -> None:
        """Do what the rank asks for. Messages to connections that have ended are left out."""
        if not lane:
            self._command(json.loads(data))
            return
        connection = self.connections.get(lane)
        if connection is None or connection.session is None:
            return
        message = pb.ToServer.FromString(data)
        if message.HasField("add") and not connection.closing:
            connection.session.add(message.add)
        elif message.HasField("remove"):
            connection.session.remove(message.remove)

    def advance(self, now_s: float, passed_s: float) -> None:
        """Note the time: connect, notice silence, release what may be released, report."""
        for connection in list(self.connections.values()):
            connection.advance(now_s, min(passed_s, LONGEST_TICK_S), self.settings.stalled_s)
            self._look_after(connection, now_s)
        for place in list(self._places.values()):
            if place.may_open(now_s):
                self._connect(place)
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            away = [  # addresses that there is no connection to, with the reasons
                {"address": place.address, "error": place.error, "banned": place.is_banned}
                for place in self._places.values()
                if place.is_listed and not place.is_open and place.error
            ]
            self._channel.send("beat", places=away)

    def close(self) -> None:
        """End all connections."""
        for connection in self.connections.values():
            connection.close()
        if self._discovery is not None:
            self._discovery.close()

    def _command(self, message: Message) -> None:
        """Publish a version; or act on a failure that the rank has found in what was released."""
        self._member = message["member"]
        if message["kind"] == "publish":
            self._source.publish(message["version"])
            return
        verdict = AuditVerdict(passed=False, reason=message["reason"], evidence=message["evidence"])
        self._tell_auditor(lambda auditor: auditor.accuse(message["server"]))
        for connection in list(self.connections.values()):
            session = connection.session
            if session is not None and session.facts.name == message["server"]:
                self._convict(connection, verdict)

    # --- what other threads have to say

    def _soon(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function for other threads, which lets this one call `function`."""
        return lambda *arguments: self._post(partial(function, *arguments))

    def _fail(self, error: str) -> None:
        """End this process for a reason that another thread has found."""
        raise RuntimeError(error)

    def _list(self, found: Mapping[str, tuple[str, bytes]]) -> None:
        """Replace the servers that the hub lists: names and public keys by address."""
        known = {**dict.fromkeys(self.settings.addresses, ("", b"")), **found}
        for address, place in self._places.items():
            place.is_listed = address in known
        for address, (name, public_key) in known.items():
            place = self._places.setdefault(address, Place(address))
            if name:
                place.name, place.public_key = name, public_key

    def _stored(self, version: int) -> None:
        """Give all servers a version that is in the store."""
        self._version = version
        self._tell_auditor(lambda auditor: auditor.publish(version, partial(self._arrays, version)))
        for connection in self.connections.values():
            connection.want(version, time.monotonic())

    def _given(self, number: int, done: VersionGiven) -> None:
        """Note that a server has a version, or why not."""
        connection = self.connections.get(number)
        if connection is None or connection.closing:
            return
        if done.is_final:
            self._lose(connection, f"it refuses version {done.version} of the policy: {done.error}")
            return
        if done.error:
            log.warning("version %d for %s: %s", done.version, connection.place.address, done.error)
        connection.given(done, time.monotonic())

    def _from_server(self, number: int, what: pb.ToTrainer | str | Violation) -> None:
        """Take a message of a server, or the end of its stream."""
        connection = self.connections.get(number)
        if connection is None or connection.closing:
            return
        try:
            if isinstance(what, Violation):
                raise what
            if isinstance(what, str):
                self._lose(connection, what)
            elif connection.session is None:
                self._opened(connection, what)
            else:
                connection.quiet_s = 0.0
                connection.session.handle(what, time.monotonic())
                if what.HasField("ended"):
                    connection.place.stalls = 0
        except Violation as violation:
            self._convict(connection, AuditVerdict(passed=False, reason=str(violation)))
            return
        self._audit(connection)

    # --- connections

    def _connect(self, place: Place) -> None:
        self._last_number += 1
        number, settings = self._last_number, self.settings
        begin = pb.Open(
            protocol=ROLLOUT_PROTOCOL,
            run=settings.run,
            line=self._line,
            trainer=settings.trainer,
            rank=settings.rank,
            on_new_version=settings.on_new_version,
        )
        post = partial(self._soon(self._from_server), number)
        stream = ServerStream(place.address, self._keys, place.secret, begin, post)
        client = VersionsClient(place.address, self._keys)
        given = partial(self._soon(self._given), number)
        sender = VersionSender(client, self._store, self._line, place.secret, given)
        self.connections[number] = Connection(number, place, stream, sender, self._channel)
        place.is_open = True

    def _opened(self, connection: Connection, found: pb.ToTrainer) -> None:
        if found.WhichOneof("message") != "opened":
            raise Violation("its first message is not `opened`")
        origin, now_s = Origin(self.settings.run, self._line, found.opened.server), time.monotonic()
        connection.advance(now_s, 0.0, self.settings.stalled_s)
        connection.quiet_s = 0.0
        connection.open(found.opened, origin, vocabulary=self.settings.vocabulary, decoder=self._tokenizer)
        if self._version:
            connection.want(self._version, now_s)

    def _look_after(self, connection: Connection, now_s: float) -> None:
        """Notice silence, ask for releases, report; forget a connection of which nothing is left."""
        session, settings = connection.session, self.settings
        if connection.closing:
            if session is None or not session.held:
                self._forget(connection)
                return
        elif session is None and connection.quiet_s > settings.connect_s:
            self._lose(connection, f"no answer within {settings.connect_s:g} s")
        elif session is not None and connection.quiet_s > settings.silent_s:
            self._lose(connection, f"no sign of life for {connection.quiet_s:.1f} s")
        elif session is not None and (late := session.overdue) and late[1] > settings.stalled_s:
            (rollout, sample), passed_s = late
            what = f"the request to return sample {rollout}/{sample}"
            self._lose(connection, f"no answer for {passed_s:.1f} s to {what}")
            connection.place.stalled(now_s, settings.stalled_s)
        elif session is not None and session.ending:
            self._lose(connection, "it is about to leave")
        elif not connection.place.is_listed:
            self._lose(connection, "the hub no longer lists it")
        self._audit(connection)
        changed = session is not None and session.changed
        if now_s - connection.reported_s >= (REPORT_S if changed else BEAT_S):
            connection.report(now_s)

    def _lose(self, connection: Connection, reason: str) -> None:
        """End a connection; the tokens of its unfinished samples are released first."""
        connection.close()
        connection.closing = reason
        if connection.session is not None:
            connection.session.hold_unfinished()

    def _convict(self, connection: Connection, verdict: AuditVerdict) -> None:
        """End the connection to a server that has lied, and report it to the hub.

        Nothing that was not released is used. What has not the right form is no evidence, as it is not
        signed.
        """
        connection.close()
        session, evidence = connection.session, verdict.evidence
        discarded = 0 if session is None else session.discard()
        reason = verdict.reason if evidence else f"it has sent {verdict.reason}"
        log.warning("%s: %s; %d samples discarded", connection.place.address, reason, discarded)
        if self._discovery is not None and session is not None and evidence:
            facts, (node, of_node) = session.facts, self._member
            self._discovery.accuse(
                make_accusation(
                    facts.name, facts.public_key, verdict.reason, evidence, node=node, session=of_node
                )
            )
        connection.closing = reason
        self._forget(connection, violation=True, evidence=evidence)

    def _forget(
        self, connection: Connection, *, violation: bool = False, evidence: Mapping[str, Any] | None = None
    ) -> None:
        del self.connections[connection.number]
        session, now_s = connection.session, time.monotonic()
        worked = session is not None and session.num_samples > 0
        connection.place.closed(now_s, connection.closing, worked=worked, violation=violation)
        if session is not None:
            connection.report(now_s)
            self._channel.send(
                "lost",
                lane=connection.number,
                reason=connection.closing,
                violation=violation,
                evidence=dict(evidence or {}),
            )

    def _tokenizer(self) -> TokenDecoder | None:
        """Return the tokenizer of stop strings, which is loaded when the first sample needs it."""
        if self._decoder is None and self.settings.tokenizer:
            from transformers import AutoTokenizer

            made: Any = AutoTokenizer
            self._decoder = made.from_pretrained(self.settings.tokenizer, trust_remote_code=False)
        return self._decoder

    # --- audits

    def _audit(self, connection: Connection) -> None:
        """Release what is held, or ask the auditor if there is a new question; one at a time."""
        session, now_s = connection.session, time.monotonic()
        if session is None:
            return
        if self._auditor is None:
            session.release(session.held)
            return
        if not session.held:
            connection.asked, connection.held_since_s = None, now_s
            return
        draining = session.draining or now_s - connection.held_since_s > HOLD_S
        question = len(session.held), draining
        if connection.is_audited or question == connection.asked:
            return
        connection.is_audited, connection.asked = True, question
        server, held = session.facts.name, tuple(session.held)
        done = partial(self._soon(self._audited), connection)
        self._audits.put(lambda auditor: done(*_judged(auditor, server, held, draining=draining)))

    def _audited(
        self,
        connection: Connection,
        judged: tuple[Held, ...],
        unjudged: tuple[Held, ...],
        verdict: AuditVerdict | None,
    ) -> None:
        """Act on the answer of the auditor about samples that were held when it was asked."""
        connection.is_audited, connection.asked = False, None
        connection.held_since_s = time.monotonic()
        if connection.number not in self.connections or connection.session is None:
            return
        connection.session.return_held(unjudged)
        if verdict is None:
            return
        if not verdict.is_final:
            connection.session.return_held(judged)
        elif verdict.passed:
            connection.session.release(judged)
        else:
            self._convict(connection, verdict)

    def _tell_auditor(self, job: Callable[[Auditor], None]) -> None:
        if self._auditor is not None:
            self._audits.put(job)

    def _run_audits(self, auditor: Auditor) -> None:
        """Call the auditor; runs in a thread of its own."""
        try:
            while True:
                self._audits.get()(auditor)
        except Exception as error:
            log.exception("the audit has failed")
            self._soon(self._fail)(f"the audit has failed: {type(error).__name__}: {error}")

    def _arrays(self, version: int) -> dict[str, Any] | None:
        """Return copies of the tensors of a version as bit patterns; None if it is no longer here."""
        try:
            with self._store.hold(self._line, version) as units:
                return tensors_of(self._store.layout.layout, units)
        except LineUnknown:
            return None


def _judged(
    auditor: Auditor, server: str, held: tuple[Held, ...], *, draining: bool
) -> tuple[tuple[Held, ...], tuple[Held, ...], AuditVerdict | None]:
    """Return the samples that can be judged, the others, and the first decision about one of the former.

    It is not final if there is none about any of them; None: no sample was selected.
    """
    judged = tuple(each for each in held if auditor.can_judge(each.rollout))
    unjudged = tuple(each for each in held if each not in judged)
    rollouts: list[HeldRollout] = [each.rollout for each in judged]
    verdict = None
    while rollouts:
        place = auditor.select(server, rollouts, draining=draining)
        if place is None:
            break
        verdict = auditor.check(rollouts.pop(place))
        if verdict.is_final:
            break
    return judged, unjudged, verdict


def _auditor(settings: LinkSettings) -> Auditor | None:
    if not settings.auditor:
        return None
    auditor = imported(settings.auditor, "Servers: auditor")(settings)
    try:
        try_auditor(auditor)
    except ValueError as error:
        raise ValueError(f"Servers: auditor: {settings.auditor}, called with LinkSettings: {error}") from None
    return auditor  # type: ignore[no-any-return]
