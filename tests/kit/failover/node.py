"""A simulated node: it pushes, reports, and votes when its hub does not answer."""

from aedit.proto.rpc import Voter
from kit.failover.hub import EXPIRE_S
from kit.failover.world import Violation

BEAT_S = 0.2


class SimNode:
    """One node; `voter` and its accounts are on disk."""

    volatile_votes = False

    def __init__(self, world, number, hubs):
        self.world, self.number, self.hubs = world, number, hubs
        self.voter = Voter(1000 * (number + 1))
        self.seq, self.acked = 1, 0
        self.version, self.known_term = 0, 0
        self.alive, self.life, self.paused_until = False, 0, 0.0

    def start(self):
        self.alive, self.life = True, self.life + 1
        if self.volatile_votes:
            self.voter = Voter(self.voter.me)
        self.hub, self.term = self.hubs[0], 0
        self.heard_s, self.turn, self.answered = self.world.now, 0, None
        self.world.after(BEAT_S * self.world.random.random(), self._beat, self.life)

    def kill(self, loses):
        self.alive = False
        if loses:  # another machine takes its place: its votes are gone with its disk, and so is its identity
            self.voter = Voter(self.voter.me + 1)

    def receive(self, sender, kind, args):
        if self.alive:
            getattr(self, f"on_{kind}")(sender, *args)

    def _beat(self, life):
        if not self.alive or life != self.life:
            return
        self.world.after(BEAT_S, self._beat, life)
        self.answered = None
        self.world.send(self.number, self.hub, "beat", self.term, self.voter.me)
        self.world.send(self.number, self.hub, "push", self.term, self.seq)
        if self.world.now - self.heard_s > EXPIRE_S:
            self._ask_another()

    def _ask_another(self):
        self.turn += 1
        self.world.send(self.number, self.hubs[self.turn % len(self.hubs)], "poll", None)

    def _is_current(self, term):
        """Take over a higher term; return False for a lower one."""
        if term < self.term:
            return False
        self.term = term
        return True

    def on_refused(self, sender, hub):
        if hub == self.hub:
            self._ask_another()

    def on_waits(self, sender, hub):
        if hub == self.hub:
            self.world.send(self.number, hub, "poll", None)

    def on_news(self, sender, term, version, parts, asks):
        if sender != self.hub or not self._is_current(term):
            return
        if asks:
            self.world.send(self.number, sender, "poll", None)
        self.heard_s = self.world.now
        self.world.accounts.tells(version, parts)
        if term > self.known_term and version < self.version:
            raise Violation(f"node {self.number} had version {self.version}, and term {term} has {version}")
        self.version, self.known_term = max(version, self.version), term

    def on_acknowledged(self, sender, term, seq):
        if seq == self.seq and self._is_current(term):
            self.acked, self.seq = seq, seq + 1

    def on_polled(self, sender, term, proposal):
        if proposal is not None and proposal != self.answered:
            self.answered = proposal
            self.voter, answer = self.voter.answer(proposal)
            self.world.send(self.number, sender, "poll", answer)
        elif term and self._is_current(term) and sender != self.hub and term >= self.term:
            self.hub, self.heard_s = sender, self.world.now
