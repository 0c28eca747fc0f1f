"""A simulated hub: the production state machine of leadership over a small model of a journal."""

from aedit.async_sgd.replication import Replica
from aedit.async_sgd.rules import Agreed, Configured, Led
from aedit.proto.rpc import Voter

FETCH_S, TICK_S, SYNC_S, MERGE_S = 0.1, 0.15, 0.02, 0.2
YIELD_S = 1.0
SILENT_S, LEASE_S, PROMISE_S, EXPIRE_S = 0.5, 0.4, 0.8, 1.0


class Disk:
    """What a restart finds. Records behind `synced` may be lost with the process."""

    def __init__(self, identity):
        self.voter = Voter(identity)
        self.log, self.synced = [], 0
        self.mirrored = 0
        """Term of the leader whose journal this is; 0: this hub's own."""

    def keep(self, length):
        del self.log[length:]
        self.synced = min(self.synced, length)


class SimHub:
    """One hub process: alive or dead, paused or not."""

    make = Replica
    least = 1
    """Replicas that must have what is acknowledged."""
    volatile_votes = False
    """Forget votes at a restart, as a mutant does that keeps them in memory only."""

    def __init__(self, world, number, hubs):
        self.world, self.number, self.others = world, number, [h for h in hubs if h != number]
        self.disk = Disk(100 + number)
        self.alive, self.paused_until, self.life = False, 0.0, 0
        self.handed_over = 0
        """Number of times that it gave its vote to its successor."""
        self.ruined = False
        """True once its disk was lost for good, and another machine has taken its place."""
        self.cut = 0
        """Number of times that it took back records which a new leader did not have."""

    # --- life

    def start(self):
        self.alive, self.life = True, self.life + 1
        if self.volatile_votes:
            self.disk.voter = Voter(self.disk.voter.me)
        self.machine = self.make(self.disk.voter, promise_s=PROMISE_S, lease_s=LEASE_S)
        self.machine.least = self.least
        self.waiting, self.nodes, self.turn = [], {}, 0
        self.electing_until = 0.0
        self._replay()
        term = self._term()
        if not (self.disk.log or self.number or self.disk.mirrored or self.ruined):
            self._write(self.machine.found(0))
        elif self.machine.may_resume(term):
            self._write(self.machine.resume(self.world.now))
        self._sync(self.life, len(self.disk.log))
        self._save()
        for period, call in ((FETCH_S, self._fetch), (TICK_S, self._tick), (MERGE_S, self._merge)):
            self.world.after(period * self.world.random.random(), self._every, self.life, period, call)

    def kill(self, loses):
        """End the process; with `loses`, some of the records that were not synced are gone."""
        self.alive = False
        log, synced = self.disk.log, self.disk.synced
        if loses:
            self.disk.keep(self.world.random.randint(synced, len(log)))

    def hand_over(self, other):
        """Ask another hub to lead in the place of this one, as an owner of a part of a swarm does."""
        if self.alive and self.machine.yield_to(100 + other, self.world.now + YIELD_S):
            self.world.send(self.number, other, "stand")

    def on_stand(self, sender):
        self.stand(invited=True)

    def stand(self, invited=False):
        """Ask for votes, as a replica of a swarm does that was invited or has heard no owner for long."""
        if self.alive and not self.machine.term:
            self._ask_voters(self._asks(invited))

    def damage(self):
        """The disk has lost the journal; a follower notices, and fetches it anew."""
        if self.alive and not self.machine.term and self.disk.mirrored:
            self._forget()
            self._replay()

    def _every(self, life, period, call):
        if self.alive and life == self.life:
            if self.world.now >= self.paused_until:
                call()
            self.world.after(period, self._every, life, period, call)

    # --- state that follows from the journal

    def _replay(self):
        self.received, self.pending, self.version, self.parts = {}, [], 0, {}
        self.version_at = 0
        self.machine.configs = ()
        for at, entry in enumerate(self.disk.log):
            self._apply(at + 1, entry)

    def _apply(self, end, entry):
        match entry:
            case Configured():
                if not self.machine.term:
                    self.machine.configs = (*self.machine.configs, entry)
            case Agreed(term, number):
                if not self.machine.term:
                    kept = tuple(c for c in self.machine.configs if c.ballot >= (term, number))
                    self.machine.configs = kept
            case ("push", node, seq):
                self.received[node] = max(seq, self.received.get(node, 0))
                self.pending.append((node, seq))
            case ("version", version, parts):
                self.version, self.version_at, self.pending = version, end, []
                self.parts[version] = parts

    def _term(self):
        return max((entry.term for entry in self.disk.log if isinstance(entry, Led)), default=0)

    def _write(self, entries):
        if not entries:
            return
        for entry in entries:
            self.disk.log.append(entry)
            self._apply(len(self.disk.log), entry)
        life = self.life
        self.world.after(SYNC_S * self.world.random.random(), self._sync, life, len(self.disk.log))

    def _sync(self, life, length):
        if not (self.alive and life == self.life and length <= len(self.disk.log)):
            return
        self.disk.synced = max(self.disk.synced, length)
        ends = [i + 1 for i, e in enumerate(self.disk.log[: self.disk.synced]) if isinstance(e, Configured)]
        configs = self.machine.configs
        if self.machine.term and ends and self.disk.log[ends[-1] - 1] == configs[-1]:
            self.machine.placed((1, ends[-1]))
            self._save()
        self._release()

    def _save(self):
        self.disk.voter = self.machine.voter

    # --- messages

    def receive(self, sender, kind, args):
        if not self.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until, self.receive, sender, kind, args)  # the kernel has it
            return
        getattr(self, f"on_{kind}")(sender, *args)

    def on_push(self, node, term, seq):
        if not self._leads(term):
            return self.world.send(self.number, node, "refused", self.number)
        if seq > self.received.get(node, 0) + 1:
            return None
        if seq == self.received.get(node, 0) + 1:
            self._write([("push", node, seq)])
        self.waiting.append((len(self.disk.log), node, seq))
        self._release()
        return None

    def on_beat(self, node, term, voter):
        if not self._leads(term):
            return self.world.send(self.number, node, "refused", self.number)
        self.nodes[node] = voter, self.world.now
        if not self._may_tell(self.version_at):
            return self.world.send(self.number, node, "waits", self.number)
        told = self.version, self.parts.get(self.version, ())
        asks = self.machine.asks is not None
        return self.world.send(self.number, node, "news", self.machine.term, *told, asks)

    def on_poll(self, node, answer):
        """Handle a node that offers its vote, with its answer to the last proposal."""
        if answer is not None:
            self._count(answer, from_node=True)
        asks = self._asks()
        self.world.send(self.number, node, "polled", self.machine.term, asks)

    def on_propose(self, sender, proposal):
        was = self.machine.term
        yields = self.machine.yields_to(proposal.proposer, self.world.now)
        answer = self.machine.answer(proposal, self.world.now)
        self._save()
        if was and not self.machine.term:
            self.handed_over += yields
            self._follow()
        self.world.send(self.number, sender, "answer", answer)

    def on_answer(self, sender, answer):
        self._count(answer, from_node=False)

    def on_fetch(self, sender, identity, term, log):
        if not self.machine.term:
            return
        length, has_all = len(log), self._has(log)
        if term == self.machine.term:
            if has_all:
                self.machine.confirm(identity, (1, length), self.world.now)
                self._release()
        elif not self._leads(term):
            return
        if not has_all:
            last = max((entry.term for entry in log if isinstance(entry, Led)), default=0)
            terms = [(i, e.term) for i, e in enumerate(self.disk.log) if isinstance(e, Led)]
            began = next((i for i, term in terms if term > last), 0)
            began -= began > 0 and isinstance(self.disk.log[began - 1], Agreed)  # perhaps written with it
            lacks = last not in [term for _, term in terms]
            self.world.send(self.number, sender, "differs", self.machine.term, began, lacks, log)
            return
        chunk = tuple(self.disk.log[length : self.disk.synced])
        self.world.send(self.number, sender, "chunk", self.machine.term, log, chunk)

    def _has(self, log):
        """Return whether the journal begins with these records."""
        return tuple(self.disk.log[: len(log)]) == log

    def on_differs(self, sender, term, began, lacks, asked):
        """Take back what the leader of a term does not have; fetch all of it if that is not enough."""
        if asked != tuple(self.disk.log) or not self._follows(term):
            return
        if lacks:
            began = asked.index(Led(self._term()))
        if 0 < began < len(asked):
            self.cut += 1
            self.disk.keep(began)
        else:
            self._forget()
        self._replay()
        self._fetch_from(sender)

    def _follows(self, term):
        """Return whether the leader of a term may be followed, and note that it is."""
        if self.machine.term or not self.machine.may_confirm(term) or term < self.disk.mirrored:
            return False
        self.disk.mirrored = term
        return True

    def on_chunk(self, sender, term, asked, entries):
        if asked != tuple(self.disk.log) or not self._follows(term):
            return
        self.machine.note_leader(self.world.now)
        self.leader = sender
        for entry in entries:
            self.disk.log.append(entry)
            self._apply(len(self.disk.log), entry)
        if entries:
            self._fetch_from(sender)

    def on_who_leads(self, sender):
        self.world.send(
            self.number, sender, "leads", self.machine.term, self.disk.voter.me, self.disk.voter.term
        )

    def on_leads(self, sender, term, replica, promised):
        if self._leads(term):
            self.machine.note_promise(replica, promised)

    def _leads(self, term):
        """Return whether this hub leads; it gives up when somebody knows a higher term."""
        if term > self.machine.term > 0:
            self.machine.step_down()
            self._follow()
        return self.machine.term > 0

    def _follow(self):
        self.waiting = []
        self._replay()

    # --- work

    def _fetch(self):
        if not self.machine.term:
            self.turn += 1
            self._fetch_from(self.others[self.turn % len(self.others)])

    def _fetch_from(self, hub):
        length = len(self.disk.log)
        self.disk.synced = length  # flushed before it is confirmed
        term = self.disk.mirrored if self.machine.may_confirm(self.disk.mirrored) else 0
        self.world.send(self.number, hub, "fetch", self.disk.voter.me, term, tuple(self.disk.log))

    def _forget(self):
        self.machine.forget(self._extent())
        self._save()
        self.disk.keep(0)

    def _merge(self):
        if self.machine.term and self.pending:
            self._write([("version", self.version + 1, tuple(self.pending))])

    def _tick(self):
        machine, now = self.machine, self.world.now
        if not machine.term:
            if now < self.electing_until:
                until = self.electing_until
                self._ask_voters(self._asks())
                self.electing_until = until
            return
        if machine.is_overtaken and machine.may_stand(now):
            machine.stand(self._extent())
        if not machine.holds_lease(now):
            for other in self.others:
                self.world.send(self.number, other, "who_leads")
        self._write(machine.propose(*self._wanted()))
        self._save()
        self._ask_voters(machine.asks)
        self._release()

    def _wanted(self):
        machine, now = self.machine, self.world.now
        silent = machine.silent(now, SILENT_S)
        heard = machine.followers(now - SILENT_S)
        near = {one for one in heard if machine.confirmed(one) >= (1, len(self.disk.log) - 5)}
        kept = set(machine.configs[-1].replicas) | near
        live = sorted(voter for voter, at_s in self.nodes.values() if now - at_s < EXPIRE_S)
        return kept - silent, live[:7]

    def _asks(self, invited=False):
        """Return what this hub asks of voters: as a leader, or as a candidate."""
        machine = self.machine
        if machine.term:
            return machine.asks
        if machine.why_not(self._extent()) or not (invited or machine.may_stand(self.world.now)):
            return None
        self.electing_until = self.world.now + EXPIRE_S
        return machine.stand(self._extent())

    def _extent(self):
        return self._term(), 1, len(self.disk.log)

    def _ask_voters(self, proposal):
        if proposal is not None:
            for other in self.others:
                self.world.send(self.number, other, "propose", proposal)

    def _count(self, answer, *, from_node):
        machine, now = self.machine, self.world.now
        before = machine.term
        if answer.ballot[1]:
            agreed = machine.count_acceptance(answer, now) if machine.term else []
            self._write(agreed)
            if any(entry.number == 1 for entry in agreed):
                self._check()
        elif not machine.term or machine.is_overtaken:
            won = machine.count_vote(answer, now, now - EXPIRE_S)
            self._save()
            if won:
                self.disk.mirrored = 0
                if not before:
                    self.waiting, self.nodes = [], {}
                self._write(won)
                if any(isinstance(entry, Agreed) for entry in won):
                    self._check()
        if before and not machine.term:
            self._follow()
        self._save()
        self._release()

    def _check(self):
        self.world.accounts.check_log(self.number, self.pushes(), self.machine.term)

    def pushes(self):
        """Return (node, seq) of every push in the journal, in order."""
        return [(e[1], e[2]) for e in self.disk.log if isinstance(e, tuple) and e[0] == "push"]

    def _may_tell(self, position):
        machine, agreed = self.machine, self.machine.configs[:1]
        enough = bool(agreed) and (len(agreed[0].replicas) >= self.least or not agreed[0].electors)
        return enough and position <= self.disk.synced and (1, position) <= machine.acknowledged()

    def _release(self):
        """Acknowledge what is on all disks that count."""
        if not self.machine.term:
            self.waiting = []
            return
        left = []
        for position, node, seq in self.waiting:
            if not self._may_tell(position):
                left.append((position, node, seq))
                continue
            self.world.accounts.acknowledges(self.number, self.machine.term, (node, seq))
            self.world.send(self.number, node, "acknowledged", self.machine.term, seq)
        self.waiting = left
