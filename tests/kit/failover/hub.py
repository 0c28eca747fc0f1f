"""A hub of the simulation: the classes of `aedit hub`, with events in the place of threads and sockets."""

import gc
import json
import logging
import random
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from itertools import count
from types import SimpleNamespace
from unittest import mock

import grpc

from aedit import system
from aedit.async_sgd.hub import Hub, outer_step
from aedit.async_sgd.journal import JournalBroken, NoSpace, Unconfirmed, frames, journal, receipts
from aedit.async_sgd.journal import snapshot as snapshots
from aedit.async_sgd.journal import store as stores
from aedit.async_sgd.replication import Leadership, journal_stream, leadership, mirror
from aedit.async_sgd.replication.replica import Replica
from aedit.async_sgd.rules import HubConfig, OuterConfig, PushFilterConfig
from aedit.async_sgd.service import driver
from aedit.edit import EditConfig
from aedit.launch.config import RunConfig
from aedit.launch.hub import folder, main, standby
from aedit.launch.hub.endpoint import HubEndpoint, OtherHubs, VoteRequests
from aedit.proto.rpc import HubRefused, HubUnreachable, NoNews, PortClosed, Refusal, votes
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError
from kit.failover.disk import DISKS, MMAP, SHUTIL, SYSTEM, TEMPFILE, Disk, SimPath
from kit.failover.world import Process, Violation

TICK_S, ASK_S, SILENT_S, RESTART_S, WAIT_S, CONFIRM_S = 0.5, 0.4, 3.0, 1.0, 1.0, 0.45
AWAY_S = 6.0
"""Least time for which a hub that has given up its lease for lack of room lets others be elected."""


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


@cache
def plan_of(num_hubs):
    """Return what its hubs need of that; making it anew takes long."""
    return folder.make_hub(config_of(num_hubs), (0, 1)).plan


def address_of(number):
    return f"h{number}:1"


HOSTS = {}
"""Machines of the hubs of the simulation that runs, by the name of their folder."""


def hub_at(address):
    return HOSTS[address.partition(":")[0]]


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


def nothing(_):
    """Do nothing. A `Mock` in its place would keep all its calls."""


def no_settings(config):
    return {}


def no_text(config, *, defaults):
    return ""


PROCESSES = [count()]
"""Numbers of processes that hubs draw."""
MERGES = {}
"""Results of `outer_step.merged`: leader, followers and replays all compute the same merges."""


def merged(old, pushes, layout, rule, share=None):
    """Return what production computes, once."""
    key = old.version, old.values.tobytes(), share, tuple((part, push.values.crc) for push, part in pushes)
    if key not in MERGES:
        MERGES[key] = compute_merged(old, pushes, layout, rule, share)
    return MERGES[key]


compute_merged = outer_step.merged

ELECTED = {}
"""Configurations by which a process was elected to lead a term, by its identity, its number and the term."""


def begin(self, term, *voters):
    """Return the records of production, and note by which configurations it was elected."""
    ELECTED[self.voter.me, self._process, term] = self.configs
    return begin_to_lead(self, term, *voters)


begin_to_lead = Replica._begin


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
        mock.patch.object(
            leadership, "secrets", SimpleNamespace(randbits=lambda bits: next(PROCESSES[0]) << 1)
        ),
        mock.patch.object(outer_step, "merged", merged),
        mock.patch.object(Replica, "_begin", begin),
        mock.patch.object(standby.Standby, "start", nothing),
        mock.patch.object(VoteRequests, "start", nothing),
        mock.patch.object(HubEndpoint, "least_replicas", 1),
        mock.patch.object(journal_stream, "_CHUNK_BYTES", 1),
        mock.patch.object(main, "OtherHubs", Others),
        mock.patch.object(main, "Reports", Events),
        mock.patch.object(folder, "claim", lambda directory, config, part: config),
        mock.patch.object(main, "method", no_settings),
        mock.patch.object(main, "to_toml", no_text),
        mock.patch.object(main, "given_to_nodes", nothing),
        mock.patch.object(
            main, "make_hub", lambda config, _: Hub(plan_of(1 + len(config.hub.standbys_of(0))))
        ),
        mock.patch("aedit.async_sgd.service.hub_worker.ThreadPoolExecutor", AtOnce),
    ]
    logging.disable(logging.CRITICAL)
    usual = gc.get_threshold()
    gc.set_threshold(200_000, *usual[1:])  # a ninth of the time would be collections
    gc.freeze()
    try:
        for patch in patches:
            patch.start()
        yield
    finally:
        for patch in patches:
            patch.stop()
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.set_threshold(*usual)


def begin_world(seed, least, chunk_bytes):
    """Draw everything that follows from this seed. least, chunk_bytes: see `History`."""
    HubEndpoint.least_replicas, journal_stream._CHUNK_BYTES = least, chunk_bytes
    SYSTEM.random = random.Random(f"system {seed}")
    SYSTEM.randbits, SYSTEM.uniform = SYSTEM.random.getrandbits, SYSTEM.random.uniform
    PROCESSES[0] = count(1)
    for kept in (Key.pairs, MERGES, ELECTED, DISKS, HOSTS):
        kept.clear()


class Events:
    """In the place of `Reports`: keeps the events."""

    def __init__(self, directory):
        self._events = HOSTS[directory.name].events

    def event(self, event, **values):
        self._events.append((event, values))

    def start(self, *_):
        pass

    def record_applied(self, record):
        pass

    def status(self, now, after):
        shown = ("term", "segment", "offset", "confirmed")
        return json.dumps({name: now[name] for name in shown if name in now})


class Others(OtherHubs):
    """The other hubs, which were asked before: `answers` are what came."""

    def __init__(self, endpoint, question):
        super().__init__(endpoint, question)
        self._host = HOSTS[endpoint.directory.name]

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
        other = hub_at(address).seen_by(host)
        pairs = {(host.number, other.number), (other.number, host.number)}
        if host.world.network.cut & pairs or other.is_off or host.world.now < other.paused_until:
            return HubUnreachable(address)
        return other.serve(method, request) if other.alive else PortClosed(address)

    def tell(self, term):
        for other in self._host.others:
            self._host.call(other, "confirm", pb.ConfirmRequest(term=term), then=lambda answer: None)


class HubProcess(main._Process):
    """`aedit hub` from recovery to exit, without its server and its threads."""

    def __init__(self, host):
        others, number = len(host.others), max(1, int(host.address[1:-2]))
        place = host.directory, (0, 1), host.is_standby, host.address, None, number
        super().__init__(HubEndpoint(config_of(others + 1), *place), insecure=True, clock=host.clock)
        self._host, self._server = host, SimpleNamespace(address=host.address)

    def _start(self, leading):
        leading.guard.trust(other_terms=self._others.terms, beside=self._host.ask_others)
        self._host.check_term(leading)
        self.core = leading.driver

    def _serve(self, core):
        self.core = core


class Stream:
    """The journal on its way from a leader to a follower: in order, until the connection breaks."""

    def __init__(self, follower, standby, leader):
        address, self.term = leader
        self.leader, self.follower, self.standby = hub_at(address).seen_by(follower), follower, standby
        self.life, self.last_s, self.is_open, self.pause = follower.life, 0.0, True, None

    def begin(self, request):
        """Begin to send, if the other end leads."""
        leader, process = self.leader, self.leader.process
        if process is None or process._leading is None:
            refusal = HubRefused(grpc.StatusCode.FAILED_PRECONDITION, "this hub is a standby")
            return leader.world.after(0.01, self._arrive, refusal)
        self.answers = iter(process.core.tail(request))
        leader.streams = [one for one in leader.streams if one.is_open and one.follower is not self.follower]
        leader.streams.append(self)
        self.pump()

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
            self.follower.awake(self.life, self.follower.take, self, item)


class Waiting:
    """A join or a push at a leader, which is repeated until the replicas have it, or for `WAIT_S`."""

    def __init__(self, host, method, args):
        self.host, self.process, self.args, self.position = host, host.process, args, None
        self.core, self.leading = self.process.core, self.process._leading
        self.until_s = host.clock() + WAIT_S
        self.ask, self.admitted = self.push if method == "push" else self.join, None

    def __call__(self):
        """Return the answer, or this object if it is to be called again."""
        host = self.host
        if host.process is not self.process:
            return HubUnreachable("it has ended")
        waits = self.position is not None and host.clock() < self.until_s
        if waits and not self.leading.leadership.acknowledges(self.position):
            return self
        return host.reply(self._ask, self.args)

    def _ask(self, *args):
        try:
            return self.ask(*args)
        except Refusal as refusal:
            if not isinstance(refusal.__cause__, Unconfirmed) or self.host.clock() >= self.until_s:
                raise
            self.position = self.leading.ledger.journal.position
            return self

    def push(self, head, data):
        return self.core.push(head, memoryview(data))

    def join(self, *args):
        reply, to = self.admitted = self.admitted or self.core.admit(*args)
        reply.news.receipt.CopyFrom(self.leading.guard.durable(to))
        return reply


class SimHub(Process):
    """The machine of one hub, and the supervisor that starts its process again."""

    def __init__(self, world, number, accounts, original=None):
        """Create the machine. original: another one, at whose address it is, with a copy of its disk."""
        super().__init__(world, number)
        self.address, self.accounts = original.address if original else address_of(number), accounts
        self.disk, HOSTS[f"h{number}"] = Disk(world.random), self
        DISKS[f"h{number}"] = self.disk
        self.directory = SimPath(f"/h{number}")
        self.is_standby = number > 0
        self.others, self.answers, self.events, self.streams, self.stream = [], [], [], [], None
        self.process, self.identity, self.reasons = None, 0, []
        """reasons: of each end of the process by itself."""
        self.is_unreliable = False
        """Its disk has lost what was flushed, or may have."""
        self.copy, self.callers, self.is_gone = None, (), False
        """Another machine at this address, the numbers of the processes that reach that one, and whether this
        one was taken away."""
        if original:
            files, here, there = original.disk.copied(), str(self.directory), str(original.directory)
            self.disk.put_back({name.replace(there, here, 1): inode for name, inode in files.items()})
            self.is_standby, self.others = original.is_standby, original.others
            self.is_unreliable = original.is_unreliable

    # --- life

    def start(self):
        self.alive, self.is_off, self.life = True, False, self.life + 1
        self.resigned_s = float("-inf")
        self._begin()
        self._every(TICK_S, self._tick)
        self._every(ASK_S, self._ask_for_votes)

    def _begin(self, before=None):
        self.process, self.streams, self.stream = None, [], None
        self.searches = self.confirms = False
        self.led = 0
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
                    process.follow(has_resigned=before.has_resigned) if before else process.start()
            except UserError as error:
                return self._end(error)
            self.process = process

        if before:
            go_on()
        else:
            self._gather(process, go_on)

    def kill(self, loses=False):
        """End the process; with `loses` the machine, with what its disk had not been asked to write."""
        self.alive, self.is_off = False, loses
        for stream in [*self.streams, self.stream]:
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
        if not self.alive and life == self.life and not self.is_gone:
            self.start()

    def seen_by(self, caller):
        return self.copy if caller.number in self.callers else self

    def _every(self, period_s, call):
        def again():
            self.after(period_s, again)
            if self.process is not None:
                call()

        self.after(period_s * self.world.random.random(), again)

    # --- calls of others

    def serve(self, method, *args):
        """Return the answer of this process to a call, or the error that the caller gets.

        While the replicas lack what a join or a push has decided, it is a `Waiting`, which asks again.
        """
        process = self.process
        if process is None:
            return PortClosed("it starts")
        if process._leading is not None and method in ("join", "push"):
            reply = Waiting(self, method, args)()
        else:
            reply = self.reply(getattr(process.core, method), args)
        self._pump()
        return reply

    def reply(self, ask, args):
        """Return what this process answers, or the error that the caller gets."""
        process = self.process
        try:
            reply = ask(*args)
        except Refusal as refusal:
            return HubRefused(refusal.code, refusal.text)
        except ValueError as error:
            return HubRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (OSError, NoSpace, JournalBroken) as error:
            return HubUnreachable(str(error))
        self._note(process._leading, args[0], reply)
        return reply

    def _note(self, leading, request, reply):
        """Let the accounts check what this process answers; `leading` if it leads."""
        if isinstance(reply, pb.Answer) and reply.granted:
            proposer = reply.proposer, reply.process
            self.accounts.supports(self, reply.voter, proposer, reply.ballot.term)
        if leading is None:
            return
        self.check_term(leading)
        if isinstance(reply, pb.PushReply) and reply.accepted:
            self.accounts.acknowledges(self, request, reply.receipt)
        is_own = isinstance(request, pb.ConfirmRequest) and request.term == leading.ledger.hub.state.term
        if is_own and request.replica:
            self.accounts.confirms(self, request)

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
        self.check_term(leading)
        try:
            leading.engine.turn()
            leading.ledger.journal.check_place()
        except Exception as error:
            leading.engine.fail(error)
        if leading.leadership.has_others and not leading.is_over:
            leading.look_at_voters()
        self._pump()

    def check_term(self, leading):
        """Let the accounts check a term that this process leads; one that was overtaken is elected anew."""
        term, replica = leading.ledger.hub.state.term, leading.leadership._replica
        is_written = term == replica.term  # else a full disk has no room for it yet
        if is_written and term != self.led and not leading.leadership.only_sends:
            self.led = term
            self.accounts.leads(self, leading, ELECTED[self.identity, replica._process, term])

    def _pump(self):
        for stream in list(self.streams):
            stream.pump()

    def _finish(self, process):
        if process.may_follow:
            for stream in self.streams:
                stream.is_open = False
            self.is_standby = True
            self.resigned_s = self.world.now
            return self._begin(process)
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
        if self.disk.full and self.world.now - self.resigned_s < AWAY_S:
            raise Violation(f"hub {self.number} has led without room, and asks for votes again at once")
        request = requests.request(asks)
        for other in self.others:

            def take(answer, address=other.address):
                if isinstance(answer, pb.Answer):
                    requests.take(address, answer)

            self.call(other, "propose", request, then=take)

    # --- a follower

    @property
    def standby(self):
        """The standby of this process while it follows."""
        standby = self.process and self.process._standby
        return standby if standby and standby.leading is None else None

    def _follow(self, standby):
        while standby.apply():
            pass
        if standby.failure or standby.leading is not None:
            return
        if self.stream is not None:
            if self.clock() - self.said_s > SILENT_S:
                self._lost(standby, HubUnreachable("silent"))
        elif not self.searches and self.clock() >= self.search_s:
            self.searches = True
            self._gather(self.process, lambda: self._found(standby))
        if self.clock() - self.confirmed_s > CONFIRM_S:
            self._confirm(standby)

    def _found(self, standby):
        self.searches = False
        if self.standby is standby:
            leader = standby.leader()
            self._open(standby, leader) if leader else self._lost(standby, None)

    def _open(self, standby, leader):
        self.said_s = self.clock()
        try:
            request = standby.tail_request(leader[1])
        except Exception as error:
            return self._lost(standby, error)
        self.stream = stream = Stream(self, standby, leader)
        other = stream.leader
        self.world.carry(self, other, lambda: other.awake(other.life, stream.begin, request))

    def take(self, stream, item):
        """Take what has come in a stream: a part of the journal, or what has ended it; None: it has ended."""
        standby, leader = stream.standby, stream.leader.address
        if self.stream is not stream or self.standby is not standby:
            return
        self.said_s = self.clock()
        if item is None or isinstance(item, Exception):
            return self._lost(standby, item)
        try:
            goes_on = standby.take(item, stream.term, leader)
        except Exception as error:
            return self._lost(standby, error)
        if not goes_on:
            stream.is_open = False
            self._open(standby, (leader, stream.term))
        elif not self.confirms:
            self.confirms = True
            self.after(0.1, self._confirm, standby)

    def _lost(self, standby, ended):
        if self.stream is not None:
            self.stream.is_open, self.stream = False, None
        try:
            self.search_s = self.clock() + standby.lost_leader(ended)
        except Exception as error:
            standby._fail(error)

    def _confirm(self, standby):
        self.confirms = False
        if self.standby is not standby or self.stream is None or not standby.term:
            return
        while standby.apply():
            pass
        try:
            request = standby.confirmer.request(standby.term)
        except Exception as error:
            return standby._fail(error)
        if request is None:
            return
        self.confirmed_s = self.clock()

        def then(answer):
            if self.standby is standby and standby.confirmer.answered(answer):
                standby.ask_for_votes(invited=True)

        self.call(self.stream.leader, "confirm", request, then=then)
