"""A node of the simulation: it joins, pushes, reports, and votes with the elector of production."""

from contextlib import suppress

import numpy as np

from aedit.proto.agent.membership import Elector
from aedit.proto.rpc import MOST_TERM, Caller, HubRefused, Proposal, votes
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.votes import VoteReply, answer_out, identity_of
from kit.failover.disk import DISKS, Disk, SimPath
from kit.failover.world import Process, Violation

BEAT_S, AGAIN_S, SILENT_S = 1.5, 0.5, 2.5
CALLER = Caller("ipv4:127.0.0.1")


class SimNode(Process):
    """One node; its votes are on disk."""

    def __init__(self, world, number, hubs):
        super().__init__(world, number)
        self.hubs, self.name = hubs, f"node{number}"
        DISKS[f"n{number}"] = self.disk = Disk(world.random)
        self.file = SimPath(f"/n{number}/votes.json")
        self.who, self.hub, self.acked, self.seq = pb.Who(run="run"), hubs[0], 0, 0
        self.receipt, self.seen = pb.Receipt(), (0, 0, 0)
        self.is_member = True
        self.version = self.count = 0
        self.brings = False

    def start(self):
        self.alive, self.life = True, self.life + 1
        self.votes = Elector(self.file)
        self.identity = self.votes.shown.voter
        self.is_member = self.is_joining = self.is_pushing = self.is_asking = False
        self.again_s = 0.0
        self.heard_s, self.turn = self.clock(), 0
        self.after(BEAT_S * self.world.random.random(), self._beat)

    def kill(self, loses=False):
        self.alive = False
        if loses:  # another machine takes its place: its votes are gone with its disk, and so is its identity
            self.disk.names.pop(str(self.file), None)

    def restart(self, life):
        if not self.alive and life == self.life:
            self.start()

    def serve(self, method, *args):
        raise AssertionError("nodes are not called")

    def claim(self):
        return pb.Claim(receipt=self.receipt, seqs=[self.acked], versions=[self.version])

    def _beat(self):
        self.after(BEAT_S, self._beat)
        if self.clock() - self.heard_s > SILENT_S:
            self._ask_another()
        elif not self.is_member:
            self._join()
        else:
            request = pb.HeartbeatRequest(
                who=self.who, steps=1, steps_per_s=1.0, state="training", claim=self.claim()
            )
            self.call(self.hub, "heartbeat", request, then=self._heard)
            self._push()

    def _join(self):
        if self.is_joining or self.is_member:
            return
        self.is_joining, hub = True, self.hub
        layout = [pb.Unit(name="unit", tensors=[pb.Tensor(name="w", shape=[2])])]
        request = pb.JoinRequest(
            who=self.who,
            name=self.name,
            layout=layout,
            num_samples=1000,
            offer=self.votes.shown,
            rejoin=b"secret of " + self.name.encode(),
            claim=self.claim(),
        )

        def joined(reply):
            self.is_joining = False
            if hub is not self.hub:
                return
            if self._is_refused(reply) or reply.term < self.who.term:
                return self.after(AGAIN_S, self._join)
            self.who = pb.Who(run="run", term=reply.term, node=reply.node, session=reply.session)
            if reply.seqs[0] < self.acked and not self.hub.accounts.is_excused:
                raise Violation(f"{self.name}: push {self.acked} was acknowledged, and {reply.seqs} is known")
            self.seq = self.acked = reply.seqs[0]
            self.is_member, self.brings = True, reply.founder
            self._heard(reply.news)
            self._push()

        self.call(self.hub, "join", request, CALLER, then=joined, timeout_s=2.0)

    def _push(self):
        if self.is_pushing or not self.is_member or not (self.brings or self.version):
            return
        self.is_pushing, hub, seq = True, self.hub, self.seq + 1
        data = np.array([seq, self.number], np.float32).tobytes()
        head = pb.PushHead(
            who=self.who,
            unit=0,
            seq=seq,
            base=0 if self.brings else self.version,
            steps=1,
            tokens=10,
            codec="fp32",
            num_bytes=len(data),
        )

        def pushed(reply):
            self.is_pushing = False
            if hub is not self.hub or not self.is_member:
                return
            if self._is_refused(reply):
                if self.clock() >= self.again_s:
                    self.again_s = self.clock() + AGAIN_S
                    self.after(AGAIN_S, self._push)
                return
            self.brings, self.seq = False, seq
            if reply.accepted:
                self.acked = seq
                self.count += 1
                self._note_receipt(reply.receipt)

        self.call(hub, "push", head, data, then=pushed, timeout_s=3.0)

    def _note_receipt(self, receipt):
        if (receipt.segment, receipt.offset) > (self.receipt.segment, self.receipt.offset):
            self.receipt, self.seen = receipt, (self.who.term, receipt.segment, receipt.offset)

    def _is_refused(self, reply):
        """Return whether a reply is an error, and act on it."""
        if not isinstance(reply, Exception):
            self.heard_s = self.clock()
            return False
        code = reply.code.name if isinstance(reply, HubRefused) else "UNAVAILABLE"
        if code == "FAILED_PRECONDITION":
            self._ask_another()
        elif code in ("NOT_FOUND", "ABORTED", "INVALID_ARGUMENT"):
            self.is_member = False
        elif code == "RESOURCE_EXHAUSTED":  # the hub may wait for votes
            self.heard_s = self.clock()
            self._vote(self.hub)
        return True

    def _heard(self, news):
        if self._is_refused(news):
            return
        self.who.term = max(self.who.term, news.term)
        self._note_receipt(news.receipt)
        for unit in news.units:
            if unit.version < self.version and not self.hub.accounts.is_excused:
                raise Violation(f"{self.name} had version {self.version}, and {unit.version} is shown")
            self.version = unit.version
        if news.asks:
            self._vote(self.hub)

    def _ask_another(self):
        self.turn += 1
        self._vote(self.hubs[self.turn % len(self.hubs)])

    def _vote(self, hub):
        if self.is_asking:
            return
        self.is_asking, seen = True, self.seen
        offering = self.votes.offering(self.who, seen)

        def answered(reply):
            self.is_asking = False
            if isinstance(reply, Exception):
                return
            if reply.leads and reply.term >= self.who.term:
                self.is_member = self.is_member and hub is self.hub and reply.term == self.who.term
                self.hub, self.heard_s, self.who.term = hub, self.clock(), reply.term
            with suppress(StopIteration):
                request = offering.send(reply)
                if request.answer.granted:
                    self._check_vote(hub, reply.asks, seen)
                self.is_asking = True
                self.call(hub, "take_over", request, then=answered)

        self.call(hub, "take_over", next(offering), then=answered)

    def _check_vote(self, hub, asks, seen):
        hub.accounts.supports(self, self.identity, (asks.proposer, asks.process), asks.ballot.term)
        extent = asks.extent.term, asks.extent.segment, asks.extent.offset
        if not asks.ballot.number and extent < seen:
            raise Violation(f"{self.name} votes for a hub that lacks what it has a receipt for")


class Liar(SimNode):
    """A member with a valid key that answers, asks and confirms in the names of others, with any numbers."""

    def _beat(self):
        super()._beat()
        hub, key = self.world.random.choice(self.hubs), self.votes._key
        if not self.who.session:
            return

        def answered(reply):
            if not isinstance(reply, Exception) and reply.HasField("asks"):
                asks = reply.asks
                ballot = asks.ballot.term, asks.ballot.number
                for other in (*self.hubs, *self.nodes[:-1]):
                    self._says(hub, VoteReply(other.identity, asks.proposer, ballot, True, ballot[0], ballot))
                own = identity_of(key.public)
                self._says(hub, VoteReply(own, asks.proposer, ballot, False, MOST_TERM - 1))

        self.call(hub, "take_over", pb.TakeOverRequest(who=self.who, answer=self.votes.shown), then=answered)
        named, term = self.world.random.choice(self.hubs), self.who.term
        leading = self.hub.process and self.hub.process._leading
        segment, offset = leading.ledger.journal.complete if leading else (1, 0)
        confirm = pb.ConfirmRequest(
            term=term, segment=segment, offset=offset, replica=named.identity, address=named.address
        )
        votes.sign(confirm, key)
        self.call(self.hub, "confirm", confirm, then=lambda reply: None)
        asks = Proposal(term + 1, 0, named.identity, (term, 2**31), (term, 2**31, 0))
        request = pb.ProposeRequest(run="run", proposal=votes.proposal_out(asks, key))
        self.call(hub, "propose", request, then=lambda reply: None)

    def _says(self, hub, answer):
        request = pb.TakeOverRequest(who=self.who, answer=answer_out(answer, self.votes._key))
        self.call(hub, "take_over", request, then=lambda reply: None)
