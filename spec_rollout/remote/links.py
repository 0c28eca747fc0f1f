"""All connections of a rank to rollout servers: opened, watched, ended, opened again. One thread uses it.

`Audits` releases held samples: at once, or after an audit in a thread of its own. Imports no torch.
"""

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aedit.proto.rpc import DirectoryClient, client_keys, make_accusation
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.proto.versions import LineUnknown, VersionsClient, VersionStore
from aedit.spec_rollout.audit import Auditor, AuditVerdict, HeldRollout, Origin, WeightReader, try_auditor
from aedit.spec_rollout.remote.connection import PROTOCOL, Connection, ServerStream
from aedit.spec_rollout.remote.discovery import Listed, Place, Places, ServerDiscovery
from aedit.spec_rollout.remote.publisher import (
    VersionGiven,
    VersionSender,
    VersionSource,
    VersionStored,
    tensors_of,
    version_layout,
)
from aedit.spec_rollout.remote.report_checks import Violation
from aedit.spec_rollout.remote.session import Held, Session
from aedit.spec_rollout.sampling import TokenDecoder
from aedit.spec_rollout.server import Channel, Message
from aedit.spec_rollout.training import ArrayReader
from aedit.types import Layout, TensorLayout, UnitLayout, imported

REPORT_S = 0.1
"""Interval of reports on a server whose figures have changed."""
BEAT_S = 0.5
"""Interval of messages to the rank without other messages."""
LONGEST_TICK_S = 1.0
"""A longer time between two looks is this process's own silence, not that of the servers."""
HOLD_S = 2.0
"""Longest time for which a sample is held without an audit."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings of a connection process, as values that JSON can hold."""

    addresses: tuple[str, ...]
    """Servers that are always tried, HOST:PORT."""
    hubs: tuple[str, ...]
    """Hubs whose directory is asked for servers."""
    standby: str
    run: str
    trainer: str
    rank: int
    keys: str
    """Folder of the node's keys; empty: plaintext."""
    layout: Layout
    """Sync units of the model."""
    specs: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and dtype of each tensor in the shared memory."""
    dtype: str
    """Dtype of the policy versions; empty: that of the shared memory."""
    fd: int
    """Number of the file descriptor of the shared memory."""
    vocabulary: int
    tokenizer: str
    on_new_version: str
    silent_s: float
    stalled_s: float
    connect_s: float
    poll_s: float
    ring: int
    auditor: str
    """Function that returns an `Auditor`, as `package.module:name`; empty: no audit."""
    audit_options: Mapping[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return them for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "LinkSettings":
        """Return the settings that `described` has written."""
        units = (
            UnitLayout(
                unit["name"],
                tuple(TensorLayout(each["name"], tuple(each["shape"])) for each in unit["tensors"]),
            )
            for unit in found["layout"]["units"]
        )
        return cls(
            **{
                **found,
                "addresses": tuple(found["addresses"]),
                "hubs": tuple(found["hubs"]),
                "layout": Layout(tuple(units)),
                "specs": tuple((name, tuple(shape), dtype) for name, shape, dtype in found["specs"]),
            }
        )


@dataclass(frozen=True, slots=True)
class AuditDone:
    """Result of one audit for one server."""

    session: Hashable
    held: tuple[Held, ...]
    """The samples that were held when it began and can be judged."""
    verdict: AuditVerdict | None
    """None: no sample was selected."""
    unjudged: tuple[Held, ...] = ()
    """Samples whose policy versions the auditor has not any more."""
    error: str = ""
    """The auditor itself has failed."""


@dataclass(slots=True)
class _Asked:
    """State of the questions about one server."""

    is_busy: bool = False
    held: int = 0
    draining: bool = False
    since_s: float = 0.0
    """Time since which the oldest sample is held."""


class Audits:
    """Asks an auditor about the held samples of servers, one question per server at a time."""

    def __init__(self, auditor: Auditor | None, post: Callable[[AuditDone], None]) -> None:
        """Begin.

        Args:
            auditor: None: everything is released at once.
            post: Takes results, from another thread; `done` then belongs to the caller's thread.
        """
        self._auditor, self._post = auditor, post
        self._asked: dict[Hashable, _Asked] = {}
        self._jobs: queue.SimpleQueue[Callable[[Auditor], None] | None] = queue.SimpleQueue()
        if auditor is not None:
            threading.Thread(target=self._work, args=(auditor,), name="audit", daemon=True).start()

    def publish(self, version: int, read: WeightReader) -> None:
        """Tell the auditor of a new policy version."""
        if self._auditor is not None:
            self._jobs.put(lambda auditor: auditor.publish(version, read))

    def accuse(self, server: str) -> None:
        """Tell the auditor that a server was found to lie elsewhere."""
        if self._auditor is not None:
            self._jobs.put(lambda auditor: auditor.accuse(server))

    def consider(self, name: Hashable, session: Session, now_s: float) -> None:
        """Release what is held, or ask the auditor if there is a new question. name: of the session."""
        if self._auditor is None:
            session.release(session.held)
            return
        asked = self._asked.setdefault(name, _Asked())
        if not session.held:
            asked.held, asked.since_s = 0, now_s
            return
        draining = session.draining or now_s - asked.since_s > HOLD_S
        if asked.is_busy or (len(session.held), draining) == (asked.held, asked.draining):
            return
        asked.is_busy, asked.held, asked.draining = True, len(session.held), draining
        held, server = tuple(session.held), session.facts.name
        self._jobs.put(lambda auditor: self._post(_audit(auditor, name, server, held, draining)))

    def done(self, name: Hashable, now_s: float) -> None:
        """Note that the result of the last question has been used."""
        asked = self._asked.get(name)
        if asked is not None:
            asked.is_busy, asked.held, asked.since_s = False, 0, now_s

    def forget(self, name: Hashable) -> None:
        """Forget a session that has ended."""
        self._asked.pop(name, None)

    def _work(self, auditor: Auditor) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job(auditor)
            except Exception as error:
                log.exception("the audit has failed")
                self._post(
                    AuditDone(None, (), None, error=f"the audit has failed: {type(error).__name__}: {error}")
                )
                return


def _audit(
    auditor: Auditor, name: Hashable, server: str, held: tuple[Held, ...], draining: bool
) -> AuditDone:
    """Return the first decision about one of the samples; not final if there is none about any of them."""
    unjudged = tuple(each for each in held if not auditor.can_judge(each.rollout))
    held = tuple(each for each in held if each not in unjudged)
    rollouts: list[HeldRollout] = [each.rollout for each in held]
    verdict = None
    while rollouts:
        place = auditor.select(server, rollouts, draining=draining)
        if place is None:
            break
        verdict = auditor.check(rollouts.pop(place))
        if verdict.is_final:
            break
    return AuditDone(name, held, verdict, unjudged)


@dataclass(frozen=True, slots=True)
class FromServer:
    """A message of a connection, the end of its stream, or of a transfer to it."""

    number: int
    what: pb.ToTrainer | str | Violation | VersionGiven


Event = FromServer | VersionStored | AuditDone | Listed


class Links:
    """Connections by number; numbers are not used again."""

    def __init__(
        self, settings: LinkSettings, channel: Channel, post: Callable[[Event], None], now_s: float
    ) -> None:
        self.settings = settings
        self.connections: dict[int, Connection] = {}
        self.places = Places()
        self.places.list(settings.addresses)
        self._channel, self._post = channel, post
        self._keys = client_keys(Path(settings.keys)) if settings.keys else None
        self._line = f"rank-{secrets.token_hex(8)}"
        layout = version_layout(settings.specs, settings.layout, settings.dtype)
        self._store = VersionStore(layout, ring=settings.ring)
        self._reader = ArrayReader(settings.specs, settings.fd)
        self._source = VersionSource(self._reader, self._store, self._line, post)
        self._audits = Audits(_auditor(settings), post)
        self._discovery = self._discover(settings, post)
        self._decoder: TokenDecoder | None = None
        self._member = (0, 0)
        """Index and session of the node at the hub."""
        self._version, self._last_number, self._beat_s, self._now_s = 0, 0, now_s, now_s

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

    def _command(self, message: Message) -> None:
        """Publish a version; or act on a failure that the rank has found in what was released."""
        self._member = message["member"]
        if message["kind"] == "publish":
            self._source.publish(message["version"])
            return
        verdict = AuditVerdict(passed=False, reason=message["reason"], evidence=message["evidence"])
        self._audits.accuse(message["server"])
        for connection in list(self.connections.values()):
            session = connection.session
            if session is not None and session.facts.name == message["server"]:
                self._convict(connection, verdict)

    def take(self, event: Event, now_s: float) -> None:
        """Take the news of another thread."""
        self._now_s = now_s
        if isinstance(event, Listed):
            self.places.list(event.servers)
        elif isinstance(event, VersionStored):
            if event.error:
                raise RuntimeError(event.error)
            self._version = event.version
            self._audits.publish(event.version, partial(self._arrays, event.version))
            for connection in self.connections.values():
                connection.want(event.version, now_s)
        elif isinstance(event, AuditDone):
            self._audited(event)
        elif event.number in self.connections:
            self._from_server(self.connections[event.number], event.what)

    def advance(self, now_s: float, passed_s: float) -> None:
        """Note the time: connect, notice silence, release what may be released, report."""
        self._now_s = now_s
        for connection in list(self.connections.values()):
            connection.advance(now_s, min(passed_s, LONGEST_TICK_S), self.settings.stalled_s)
            self._look_after(connection)
        for place in self.places.due(now_s):
            self._connect(place)
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._channel.send("beat", places=self._described())

    def close(self) -> None:
        """End all connections."""
        for connection in self.connections.values():
            connection.close()
        if self._discovery is not None:
            self._discovery.close()

    def _connect(self, place: Place) -> None:
        self._last_number += 1
        number, settings = self._last_number, self.settings
        begin = pb.Open(
            protocol=PROTOCOL,
            run=settings.run,
            line=self._line,
            trainer=settings.trainer,
            rank=settings.rank,
            on_new_version=settings.on_new_version,
        )

        def post(what: pb.ToTrainer | str | Violation | VersionGiven) -> None:
            self._post(FromServer(number, what))

        stream = ServerStream(place.address, self._keys, place.secret, begin, post)
        client = VersionsClient(place.address, self._keys)
        sender = VersionSender(client, self._store, self._line, place.secret, post)
        self.connections[number] = Connection(number, place, stream, sender, self._channel)
        place.is_open = True

    def _from_server(
        self, connection: Connection, what: pb.ToTrainer | str | Violation | VersionGiven
    ) -> None:
        if connection.closing:
            return
        try:
            if isinstance(what, Violation):
                raise what
            if isinstance(what, str):
                self._lose(connection, what)
            elif isinstance(what, VersionGiven):
                self._given(connection, what)
            elif connection.session is None:
                self._opened(connection, what)
            else:
                connection.take(what, self._now_s)
        except Violation as violation:
            self._convict(connection, AuditVerdict(passed=False, reason=str(violation)))
            return
        if connection.session is not None and connection.session.held:
            self._audits.consider(connection.number, connection.session, self._now_s)

    def _opened(self, connection: Connection, found: pb.ToTrainer) -> None:
        if found.WhichOneof("message") != "opened":
            raise Violation("its first message is not `opened`")
        origin = Origin(self.settings.run, self._line, found.opened.server)
        connection.advance(self._now_s, 0.0, self.settings.stalled_s)
        connection.quiet_s = 0.0
        connection.open(found.opened, origin, vocabulary=self.settings.vocabulary, decoder=self._tokenizer)
        if self._version:
            connection.want(self._version, self._now_s)

    def _given(self, connection: Connection, done: VersionGiven) -> None:
        if done.is_final:
            self._lose(connection, f"it refuses version {done.version} of the policy: {done.error}")
            return
        if done.error:
            log.warning("version %d for %s: %s", done.version, connection.place.address, done.error)
        connection.given(done, self._now_s)

    def _look_after(self, connection: Connection) -> None:
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
            connection.place.stalled(self._now_s, settings.stalled_s)
        elif session is not None and session.ending:
            self._lose(connection, "it is about to leave")
        elif not connection.place.is_listed:
            self._lose(connection, "the hub no longer lists it")
        if session is not None:
            self._audits.consider(connection.number, session, self._now_s)
            if connection.due(self._now_s, REPORT_S, BEAT_S):
                connection.report(self._now_s)

    def _lose(self, connection: Connection, reason: str) -> None:
        """End a connection; the tokens of its unfinished samples are released first."""
        connection.close()
        connection.closing = reason
        if connection.session is not None:
            connection.session.hold_unfinished()

    def _convict(self, connection: Connection, verdict: AuditVerdict) -> None:
        """End the connection to a server that has lied; nothing that was not released is used."""
        connection.close()
        session = connection.session
        discarded = 0 if session is None else session.discard()
        reason = f"it has sent {verdict.reason}" if not verdict.evidence else verdict.reason
        log.warning("%s: %s; %d samples discarded", connection.place.address, reason, discarded)
        self._accuse(connection, verdict)
        connection.closing = reason
        self._forget(connection, violation=True, evidence=verdict.evidence)

    def _forget(
        self, connection: Connection, *, violation: bool = False, evidence: Mapping[str, Any] | None = None
    ) -> None:
        del self.connections[connection.number]
        self._audits.forget(connection.number)
        session = connection.session
        worked = session is not None and session.num_samples > 0
        connection.place.closed(self._now_s, connection.closing, worked=worked, violation=violation)
        if session is not None:
            connection.report(self._now_s)
            self._channel.send(
                "lost",
                lane=connection.number,
                reason=connection.closing,
                violation=violation,
                evidence=dict(evidence or {}),
            )

    def _audited(self, done: AuditDone) -> None:
        if done.error:
            raise RuntimeError(done.error)
        self._audits.done(done.session, self._now_s)
        connection = self.connections.get(done.session) if isinstance(done.session, int) else None
        if connection is None or connection.session is None:
            return
        connection.session.return_held(done.unjudged)
        if done.verdict is None:
            return
        if not done.verdict.is_final:
            connection.session.return_held(done.held)
        elif done.verdict.passed:
            connection.session.release(done.held)
        else:
            self._convict(connection, done.verdict)

    def _accuse(self, connection: Connection, verdict: AuditVerdict) -> None:
        """Report a server to the hub; what has not the right form is no evidence, as it is not signed."""
        if self._discovery is None or connection.session is None or not verdict.evidence:
            return
        facts, (node, session) = connection.session.facts, self._member
        self._discovery.accuse(
            make_accusation(
                facts.name, facts.public_key, verdict.reason, verdict.evidence, node=node, session=session
            )
        )

    def _arrays(self, version: int) -> dict[str, Any] | None:
        """Return copies of the tensors of a version as bit patterns; None if it is no longer here."""
        try:
            with self._store.hold(self._line, version) as units:
                return tensors_of(self._store.layout.layout, units)
        except LineUnknown:
            return None

    def _described(self) -> list[dict[str, Any]]:
        """Return the addresses that there is no connection to, with the reasons."""
        return [
            {"address": place.address, "error": place.error, "banned": place.is_banned}
            for place in self.places.places.values()
            if place.is_listed and not place.is_open and place.error
        ]

    def _tokenizer(self) -> TokenDecoder | None:
        """Return the tokenizer of stop strings, which is loaded when the first sample needs it."""
        if self._decoder is None and self.settings.tokenizer:
            from transformers import AutoTokenizer

            made: Any = AutoTokenizer
            self._decoder = made.from_pretrained(self.settings.tokenizer, trust_remote_code=False)
        return self._decoder

    def _discover(self, settings: LinkSettings, post: Callable[[Event], None]) -> ServerDiscovery | None:
        if not settings.hubs:
            return None
        client = DirectoryClient(settings.hubs, settings.run, self._keys, standby=settings.standby)
        return ServerDiscovery(client, settings.poll_s, post, time.monotonic)


def _auditor(settings: LinkSettings) -> Auditor | None:
    if not settings.auditor:
        return None
    auditor = imported(settings.auditor, "Servers: auditor")(settings)
    try:
        try_auditor(auditor)
    except ValueError as error:
        raise ValueError(f"Servers: auditor: {settings.auditor}, called with LinkSettings: {error}") from None
    return auditor  # type: ignore[no-any-return]
