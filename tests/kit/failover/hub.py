"""A hub of the simulation: the classes of `aedit hub`, with events in the place of threads and sockets."""

import json
import logging
import random
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from types import SimpleNamespace
from unittest import mock

import grpc

from aedit import system
from aedit.async_sgd.hub import outer_step
from aedit.async_sgd.journal import JournalBroken, NoSpace, Store, Unconfirmed, frames, journal, receipts
from aedit.async_sgd.journal import snapshot as snapshots
from aedit.async_sgd.journal import store as stores
from aedit.async_sgd.replication import Leadership, mirror
from aedit.async_sgd.rules import HubConfig, OuterConfig, PushFilterConfig
from aedit.async_sgd.service import HelloResponder, driver
from aedit.edit import EditConfig
from aedit.launch.config import RunConfig
from aedit.launch.hub import main, standby
from aedit.launch.hub.endpoint import HubEndpoint, OtherHubs, VoteRequests
from aedit.proto.rpc import PROTOCOL, CallCost, HubRefused, HubUnreachable, NoNews, PortClosed, Refusal, votes
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError
from kit.failover.disk import DISKS, MMAP, SHUTIL, SYSTEM, TEMPFILE, Disk, SimPath
from kit.failover.world import Process, Violation

TICK_S, ASK_S, SILENT_S, RESTART_S, WAIT_S, CONFIRM_S = 0.5, 0.4, 3.0, 1.0, 1.0, 0.45


@cache
def config_of(num_hubs):
    """Return the configuration of a run with so many hubs."""
    addresses = [address_of(number) for number in range(num_hubs)]
    trusting = PushFilterConfig(threshold=1e9, cosine=False, clip=None, violations=10**9)
    hub = HubConfig(
        address=addresses[0],
        standby=",".join(addresses[1:]),
        codec="fp32",
        endless=True,
        expire_s=3.0,
        grace=0.0,
        threads=1,
        snapshot_bytes=2**40,
        push_filter=trusting,
        weights="uniform",
    )
    outer = OuterConfig(kind="average", lr=1.0)
    return RunConfig(name="run", hub=hub, edit=EditConfig(landing="arrival"), outer=outer)


def address_of(number):
    return f"h{number}:1"


class Key:
    """In the place of an Ed25519 key: as long, drawn with the seed, and faster."""

    pairs: dict = {}  # noqa: RUF012 - of all that were made

    def __init__(self, private=None):
        self.bytes = SYSTEM.random.randbytes(32) if private is None else private
        self.public = sha256(b"public" + self.bytes).digest()
        self.pairs[self.public] = self.bytes
        self.private = self

    def private_bytes_raw(self):
        return self.bytes

    def sign(self, data):
        return sha256(self.bytes + data).digest()

    @classmethod
    def verifies(cls, public, signature, data):
        return public in cls.pairs and sha256(cls.pairs[public] + data).digest() == signature


class AtOnce:
    """In the place of a pool of threads."""

    def __init__(self, *_):
        pass

    def submit(self, call, *args):
        call(*args)

    def shutdown(self, **_):
        pass


def wait(self, position, limit_s=0.0):
    """Raise Unconfirmed where a thread would wait: nodes repeat a push until it is acknowledged."""
    if not self.acknowledges(position):
        raise Unconfirmed("another hub of the run must confirm this first: try again")


MERGES = {}
"""Results of `outer_step.merged`: leader, followers and replays all compute the same merges."""


def merged(old, pushes, layout, rule, share=None):
    """Return what production computes, once."""
    key = old.version, old.values.tobytes(), share, tuple((part, push.values.crc) for push, part in pushes)
    if key not in MERGES:
        MERGES[key] = compute_merged(old, pushes, layout, rule, share)
    return MERGES[key]


compute_merged = outer_step.merged


@contextmanager
def simulated():
    """Let the modules of hubs use simulated disks, random numbers and keys, and start no thread."""
    places = [frames, journal, snapshots, stores, mirror, system]
    patches = [mock.patch.object(place, "os", SYSTEM) for place in places]
    patches += [
        mock.patch.object(frames, "mmap", MMAP),
        mock.patch.object(stores, "shutil", SHUTIL),
        mock.patch.object(system, "tempfile", TEMPFILE),
        mock.patch.object(system, "Path", SimPath),
        mock.patch.object(receipts, "secrets", SYSTEM),
        mock.patch.object(driver, "secrets", SYSTEM),
        mock.patch.object(standby, "random", SYSTEM),
        mock.patch.object(votes, "SigningKey", Key),
        mock.patch.object(votes, "is_signed_by", Key.verifies),
        mock.patch.object(Leadership, "wait", wait),
        mock.patch.object(outer_step, "merged", merged),
        mock.patch.object(standby.Standby, "start"),
        mock.patch("aedit.async_sgd.service.hub_worker.ThreadPoolExecutor", AtOnce),
    ]
    logging.disable(logging.CRITICAL)
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()
        logging.disable(logging.NOTSET)


def begin_world(seed):
    """Draw everything that follows from this seed."""
    SYSTEM.random = random.Random(f"system {seed}")
    SYSTEM.randbits, SYSTEM.uniform = SYSTEM.random.getrandbits, SYSTEM.random.uniform
    for kept in (Key.pairs, MERGES, DISKS):
        kept.clear()


class Events:
    """In the place of `Reports`: keeps the events."""

    def __init__(self, host):
        self._host = host

    def event(self, event, **values):
        self._host.events.append((event, values))

    def start(self, *_):
        pass

    def record_applied(self, record):
        pass

    def status(self, now, after):
        shown = ("term", "segment", "offset", "confirmed")
        return json.dumps({name: now[name] for name in shown if name in now})


class Others(OtherHubs):
    """The other hubs, which were asked before: `answers` are what came."""

    def __init__(self, endpoint, question, host):
        super().__init__(endpoint, question)
        self._host = host

    def _hellos(self, stopping=None, limit_s=0.0, without=""):
        yield from [(address, answer) for address, answer in self._host.answers if address != without]

    def _hello(self, address, limit_s):
        return self._at_once(address, "hello", self._question())

    def _status(self, address):
        answer = self._at_once(address, "status", pb.StatusRequest())
        if isinstance(answer, Exception):
            raise answer
        return json.loads(answer.json)

    def _at_once(self, address, method, request):
        host = self._host
        other = next(one for one in host.others if one.address == address)
        pairs = {(host.number, other.number), (other.number, host.number)}
        if host.world.network.cut & pairs or other.is_off or host.world.now < other.paused_until:
            return HubUnreachable(address)
        return other.serve(method, request) if other.alive else PortClosed(address)

    def tell(self, term):
        for other in self._host.others:
            self._host.call(other, "confirm", pb.ConfirmRequest(term=term), then=lambda answer: None)


class HubProcess(main._Process):
    """`aedit hub` from recovery to exit, without its server, its threads and its reports."""

    def __init__(self, host):
        self.endpoint = HubEndpoint(
            config_of(len(host.others) + 1),
            host.directory,
            (0, 1),
            host.is_standby,
            host.address,
            None,
            max(1, host.number),
        )
        self._host, self._clock, self._config = host, host.clock, self.endpoint.config
        self._store = Store(host.directory)
        self._reports = Events(host)
        self._responder = HelloResponder(
            protocol=PROTOCOL,
            method={},
            difference=lambda settings: None,
            version="",
            run="run",
            config="",
            addresses=tuple,
            standby=lambda: "",
        )
        others = self.endpoint.num_others
        self._leadership = Leadership(
            host.directory / "votes.json", others, host.clock, least=lambda: host.least
        )
        self._others = Others(
            self.endpoint, lambda: self._responder.question(self._leadership.promised), host
        )
        self._vote_requests = VoteRequests(self.endpoint, self._leadership, self._count)
        self._vote_requests.start = lambda: None
        self._server = SimpleNamespace(address=host.address)
        self._leading = self._standby = self.core = None
        self._cost = CallCost()

    def _start(self, leading):
        leading.guard.trust(other_terms=self._others.terms, beside=self._host.ask_others)
        self._host.accounts.leads(self._host, leading)
        self.core = leading.driver

    def _serve(self, core):
        self.core = core


class Stream:
    """The journal on its way from a leader to a follower: in order, until the connection breaks."""

    def __init__(self, leader, follower, answers, opened):
        self.leader, self.follower, self.answers = leader, follower, answers
        self.lives, self.opened = (leader.life, follower.life), opened
        self.last_s, self.is_open = 0.0, True
        self.pause = None

    def pump(self):
        """Send what there is."""
        world, pause = self.leader.world, self.pause
        if pause is not None and pause[0].notifier.count == pause[0].seen and world.now < pause[1]:
            return
        while self.is_open:
            try:
                item = next(self.answers)
            except StopIteration:
                item, self.is_open = None, False
            except Refusal as refusal:
                item, self.is_open = HubRefused(refusal.code, refusal.text), False
            except (JournalBroken, OSError) as error:
                item, self.is_open = HubUnreachable(str(error)), False
            if isinstance(item, NoNews):
                self.pause = item, world.now + item.limit_s / self.leader.rate
                return
            net = world.network
            if net.loss and world.random.random() < net.loss / 4:  # no packet for long, and it breaks
                self.is_open = False
                return
            delay_s = net.delay_s * (0.2 + 2 * world.random.random())
            self.last_s = max(self.last_s + net.gap_s + 1e-9, world.now + delay_s)
            world.at(self.last_s, self._arrive, item)

    def _arrive(self, item):
        pair = (self.leader.number, self.follower.number)
        if pair in self.leader.world.network.cut:
            self.is_open = False
        else:
            self.follower.awake(self.lives[1], self.opened, self, item)


class SimHub(Process):
    """The machine of one hub, and the supervisor that starts its process again."""

    def __init__(self, world, number, accounts, least=1):
        super().__init__(world, number)
        self.address, self.accounts, self.least = address_of(number), accounts, least
        self.disk = DISKS[f"h{number}"] = Disk(world.random)
        self.directory = SimPath(f"/h{number}")
        self.is_standby = number > 0
        self.others, self.answers, self.events = [], [], []
        self.process, self.identity, self.reasons = None, 0, []
        """reasons: of each end of the process by itself."""
        self.is_unreliable = False
        """Its disk has lost what was flushed, or may have."""

    # --- life

    def start(self):
        self.alive, self.is_off, self.life = True, False, self.life + 1
        self._begin(follows=False)
        self._every(TICK_S, self._tick)
        self._every(ASK_S, self._ask_for_votes)

    def _begin(self, follows):
        self.process, self.streams, self.stream = None, [], None
        self.searches, self.confirms = False, 0
        self.search_s = self.said_s = self.confirmed_s = 0.0
        try:
            with main.saying_why(self.directory):
                process = HubProcess(self)
        except UserError as error:
            return self._end(error)
        self.identity = process._leadership.identity

        def go_on():
            try:
                with main.saying_why(self.directory):
                    process.follow() if follows else process.start()
            except UserError as error:
                return self._end(error)
            self.process = process

        if follows:
            go_on()
        else:
            self._gather(process, go_on)

    def kill(self, loses=False, reason=""):
        """End the process; with `loses` the machine, with what its disk had not been asked to write."""
        self.alive, self.is_off = False, loses
        for stream in [*getattr(self, "streams", ()), getattr(self, "stream", None)]:
            if stream is not None and stream.is_open:
                stream.is_open = False
                if stream.leader is self and not loses:
                    self.world.after(0.01, stream._arrive, HubUnreachable("connection reset"))
        self.process = None
        if loses:
            self.disk.crash()

    def _end(self, error):
        reason = str(error)
        self.reasons.append(reason)
        if not reason:
            raise Violation(f"hub {self.number} ends without a reason")
        if "another hub leads this run" in reason:
            self.is_standby = True
        elif isinstance(error, UserError):
            self.accounts.refuses_folder(self.number, reason)
        self.kill()
        self.world.after(RESTART_S, self.restart, self.life)

    def restart(self, life):
        if not self.alive and life == self.life:
            self.start()

    def _every(self, period_s, call):
        def again():
            self.after(period_s, again)
            if self.process is not None:
                call()

        self.after(period_s * self.world.random.random(), again)

    # --- calls of others

    def serve(self, method, *args):
        """Return the answer of this process to a call, or the error that the caller gets.

        It may be a function to be called later, which returns the answer then.
        """
        process = self.process
        if process is None:
            return PortClosed("it starts")
        answer = self._tried(lambda: self._answer(process.core, method, *args))
        if isinstance(answer, pb.Answer) and answer.granted:
            self.accounts.supports(answer.voter, answer.proposer, answer.ballot.term)
        if process.core is not None and process._leading is not None:
            term = process._leading.ledger.hub.state.term
            if isinstance(answer, pb.ConfirmReply) and args[0].replica and args[0].term == term:
                self.accounts.confirms(self, args[0])
            self._pump()
        return answer

    def _tried(self, call):
        try:
            return call()
        except Refusal as refusal:
            return HubRefused(refusal.code, refusal.text)
        except ValueError as error:
            return HubRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (OSError, NoSpace, JournalBroken) as error:
            return HubUnreachable(str(error))

    def _answer(self, core, method, *args):
        """Return the answer of a core, or a function that returns it once the replicas have what it says."""
        leading = self.process._leading
        if leading is None or method not in ("join", "push"):
            return getattr(core, method)(*args)
        if method == "join":
            reply, position = core.admit(*args)
        else:
            reply, position = self._pushed(core, *args), leading.ledger.journal.position
            if reply is not None:
                return reply
        until_s = self.clock() + WAIT_S

        def settle():
            if not leading.leadership.acknowledges(position) and self.clock() < until_s:
                return answer
            if method == "push":
                return self._acknowledged(args[0], core.exchange._decided(args[0]))
            reply.news.receipt.CopyFrom(leading.guard.durable(position))
            return reply

        def answer():
            return self._tried(settle)

        return answer

    def _pushed(self, core, head, data):
        """Return the answer to a push; None if it is decided, and a replica does not have that yet."""
        try:
            return self._acknowledged(head, core.push(head, data))
        except Refusal as refusal:
            if not isinstance(refusal.__cause__, Unconfirmed):
                raise
            return None

    def _acknowledged(self, head, reply):
        if reply.accepted:
            self.accounts.acknowledges(self, head, reply.receipt)
        return reply

    def open_stream(self, follower, request, opened):
        """Begin to send the journal to a follower."""
        process = self.process
        if process is None or process._leading is None:
            refusal = HubRefused(grpc.StatusCode.FAILED_PRECONDITION, "this hub is a standby")
            stream = Stream(self, follower, iter(()), opened)
            self.world.after(0.01, stream._arrive, refusal)
            return
        stream = Stream(self, follower, iter(process.core.tail(request)), opened)
        self.streams = [one for one in self.streams if one.is_open and one.follower is not follower]
        self.streams.append(stream)
        stream.pump()

    # --- steps

    def _gather(self, process, then):
        """Ask all others for their term, and go on with the answers that came in time."""
        answers, waiting, asked = [], len(self.others), process._others._question()

        def take(address, answer):
            nonlocal waiting
            answers.append((address, answer))
            waiting -= 1
            if not waiting:
                self.answers = answers
                then()

        for other in self.others:
            self.call(other, "hello", asked, then=lambda answer, a=other.address: take(a, answer))

    def ask_others(self, ask):
        process = self.process

        def then():
            if self.process is process:
                ask()

        self._gather(process, then)

    def _tick(self):
        process = self.process
        leading, follower = process._leading, process._standby
        if leading is not None:
            self._lead(leading)
        else:
            self._follow(follower)
        if self.process is process and process.is_over:
            self._finish(process)

    def _lead(self, leading):
        if leading.is_over:
            return
        try:
            leading.engine.turn()
            leading.ledger.journal.check_place()
        except Exception as error:
            leading.engine.fail(error)
        if leading.leadership.has_others and not leading.is_over:
            leading.look_at_voters()
        self._pump()

    def _pump(self):
        for stream in list(self.streams):
            stream.pump()

    def _finish(self, process):
        if process.may_follow:
            for stream in self.streams:
                stream.is_open = False
            self.is_standby = True
            return self._begin(follows=True)
        try:
            process.exit_code()
            reason = (process._leading or process._standby).failure
        except UserError as error:
            reason = str(error)
            if process._leading.guard.lacking:
                self.accounts.lacks(self.number, reason)
        self._end(Exception(reason))

    def _ask_for_votes(self):
        requests, leadership = self.process._vote_requests, self.process._leadership
        if (asks := leadership.asks()) is None:
            return
        request = requests.request(asks)
        for other in self.others:

            def take(answer, address=other.address):
                if isinstance(answer, pb.Answer):
                    requests.take(address, answer)

            self.call(other, "propose", request, then=take)

    # --- a follower

    def _follow(self, follower):
        while follower.apply():
            pass
        if follower.failure or follower.leading is not None:
            return
        if self.stream is not None:
            if self.clock() - self.said_s > SILENT_S:
                self._lost(follower, HubUnreachable("silent"))
        elif not self.searches and self.clock() >= self.search_s:
            self.searches = True
            self._gather(self.process, lambda: self._found(follower))
        if self.clock() - self.confirmed_s > CONFIRM_S:
            self._confirm(follower)

    def _found(self, follower):
        self.searches = False
        if self.process is None or self.process._standby is not follower or follower.leading is not None:
            return
        if (leader := follower.leader()) is None:
            self._lost(follower, None)
        else:
            self._open(follower, leader)

    def _open(self, follower, leader):
        address, term = leader
        other = next(one for one in self.others if one.address == address)
        try:
            request = follower.tail_request(term)
        except Exception as error:
            return self._lost(follower, error)
        opened = SimpleNamespace(leader=leader)
        self.stream = opened
        self.said_s = self.clock()

        def take(stream, item):
            if self.stream is opened and self.process is not None and follower.leading is None:
                opened.is_open, opened.leader_host = True, other
                self._take(follower, stream, item, leader)

        def reach():
            other.awake(other.life, other.open_stream, self, request, take)

        opened.is_open = False
        self.world.carry(self, other, reach)

    def _take(self, follower, stream, item, leader):
        self.said_s = self.clock()
        address, term = leader
        if item is None or isinstance(item, Exception):
            stream.is_open = False
            return self._lost(follower, item)
        try:
            goes_on = follower.take(item, term, address)
        except Exception as error:
            stream.is_open = False
            return self._lost(follower, error)
        if not goes_on:
            stream.is_open = False
            return self._open(follower, leader)
        if not self.confirms:
            self.confirms += 1
            self.after(0.1, self._confirm_soon, follower)

    def _lost(self, follower, ended):
        self.stream = None
        try:
            self.search_s = self.clock() + follower.lost_leader(ended)
        except Exception as error:
            follower._fail(error)

    def _confirm_soon(self, follower):
        self.confirms = 0
        if self.process is not None and self.process._standby is follower and follower.leading is None:
            while follower.apply():
                pass
            self._confirm(follower)

    def _confirm(self, follower):
        if self.stream is None or not follower.term:
            return
        try:
            request = follower.confirmer.request(follower.term)
        except Exception as error:
            return follower._fail(error)
        if request is None:
            return
        self.confirmed_s = self.clock()
        leader = next(one for one in self.others if one.address == self.stream.leader[0])

        def then(answer):
            if self.process and self.process._standby is follower and follower.confirmer.answered(answer):
                follower.ask_for_votes(invited=True)

        self.call(leader, "confirm", request, then=then)
