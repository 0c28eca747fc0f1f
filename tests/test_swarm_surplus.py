"""Tests that replicas which nobody needs are given up, one at a time, however peers came: in a simulation."""

import random

import pytest

from aedit.launch.swarm.roles import PartView, Role
from aedit.proto.swarm.card import PartReplica
from aedit.proto.swarm.placement import ranking

COPIES, LAG, QUIET = 3, 4, 2
"""Turns after which a card has arrived at the latest, and after which a silent replica is taken out."""


class Part:
    """The replicas of one part: what the owner waits for, and cards that others see some turns later.

    `in_sync` is the configuration, of at most one replica more than is kept.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        first = self.new_key()
        self.peers, self.hosts, self.owner, self.in_sync = [first], {first}, first, {first}
        self.told, self.gone, self.past = {}, {}, []

    def new_key(self):
        return self.chance.randbytes(32)

    def cards(self):
        replica = {
            key: PartReplica(address="h:1", term=1, leads=key == self.owner, in_sync=key in self.in_sync)
            for key in self.hosts
        }
        return {key: replica.get(key) for key in self.peers}

    def view(self, me):
        """Return what a peer sees: its own replica as it is, each other card as it was some turns ago."""
        now, seen = self.past[-1], {}
        for key in self.peers:
            then = self.past[max(0, len(self.past) - 1 - self.chance.randrange(LAG))]
            card = now.get(key) if key == me else then.get(key)
            if card is not None:
                seen[key] = card
        return PartView(ranking("run", 0, self.peers), seen, me)

    def turn(self):
        self.past.append(self.cards())
        for key in self.chance.sample(self.peers, len(self.peers)):
            journal = self.in_sync - {key}  # what it has from the owner, who is waited for by all in sync
            role = self.view(key).role(COPIES, len(journal))
            if role is Role.HOST:
                self.hosts.add(key)
            elif role is Role.RETIRE:
                self.hosts.remove(key)
                self.gone[key] = len(self.past)
        self.lead()

    def lead(self):
        """Let the owner take out who is silent, take in one that has caught up, and hand the part over."""
        silent = {key for key in self.in_sync - self.hosts if len(self.past) >= self.gone[key] + QUIET}
        self.in_sync -= silent
        near = sorted(self.hosts - self.in_sync)
        if near and len(self.in_sync) < COPIES + 1 and self.chance.random() < 0.5:
            self.in_sync.add(self.chance.choice(near))
        best = self.view(self.owner).first()
        if best in self.in_sync & self.hosts and self.chance.random() < 0.3:
            self.owner = best

    def is_settled(self):
        chosen = ranking("run", 0, self.peers)[:COPIES]
        return self.hosts == self.in_sync == set(chosen) and self.owner == chosen[0]


@pytest.mark.parametrize("count", [5, 6, 12, 40])
def test_a_part_ends_with_the_chosen_replicas_however_many_peers_came_at_once(count):
    for seed in range(12):
        part, most = Part(seed), 1
        while len(part.peers) < count:
            part.peers.append(part.new_key())
            for _ in range(part.chance.randrange(4)):
                part.turn()
        for _ in range(60 * count):
            alive = len(part.in_sync & part.hosts)
            most = max(most, alive)
            assert alive >= min(most, COPIES), f"seed {seed}: two replicas in sync were given up at once"
            if part.is_settled():
                break
            part.turn()
        assert part.is_settled(), f"seed {seed}"
