"""Tests that replicas which nobody needs are given up, one at a time, however peers came: in a simulation."""

import random
from collections import Counter
from itertools import combinations, permutations

import pytest

from aedit.async_sgd.replication import placed_replicas
from aedit.launch.swarm.hosted_part import PartView, Role
from aedit.proto.swarm import PartReplica, ranking

COPIES, LAG, HEARD = 3, 4, 2
"""Copies that are kept, turns after which a card or a journal has arrived at the latest, and turns for which
an owner remembers a confirmation."""


class Part:
    """The replicas of one part: the owner's configuration; others see cards and journals some turns later."""

    def __init__(self, seed, rest=LAG + HEARD):
        self.chance, self.rest = random.Random(seed), rest
        self.rested = Counter()
        first = self.new_key()
        self.peers, self.hosts, self.owner, self.in_sync = [first], {first}, first, {first}
        self.past = []

    def new_key(self):
        return self.chance.randbytes(32)

    def cards(self):
        replica = {
            key: PartReplica(address="h:1", term=1, leads=key == self.owner, in_sync=key in self.in_sync)
            for key in self.hosts
        }
        return {key: replica.get(key) for key in self.peers}

    def then(self, me):
        """Return the cards and the configuration of this turn, or of one some turns ago for somebody else."""
        return self.past[
            -1 if me else max(0, len(self.past) - 1 - self.chance.randrange(LAG)) - len(self.past)
        ]

    def view(self, me):
        """Return what a peer sees: its own replica as it is, each other card as it was some turns ago."""
        seen = {}
        for key in self.peers:
            card = self.then(key == me)[0].get(key)
            if card is not None:
                seen[key] = card
        return PartView(ranking("run", 0, self.peers), seen, me)

    def turn(self):
        self.past.append((self.cards(), frozenset(self.in_sync)))
        for key in self.chance.sample(self.peers, len(self.peers)):
            # A journal says that a replica is needed or not some turns after the owner has decided so.
            journal = self.then(False)[1]
            role = self.view(key).role(COPIES, 0 if key in journal else len(journal))
            self.rested[key] = self.rested[key] + 1 if role is Role.RETIRE else 0
            if role is Role.HOST:
                self.hosts.add(key)
            elif self.rested[key] > self.rest:
                assert key not in self.in_sync, "a replica was given up on which the owner still counted"
                self.hosts.remove(key)
        self.lead()

    def lead(self):
        """Let the owner choose its replicas, and hand the part over."""
        ranked = self.view(self.owner).ranked
        place = {key: number for number, key in enumerate(ranked)}
        names = sorted(self.peers)
        heard = {key for key in self.hosts - self.in_sync if self.rested[key] <= HEARD}
        near = {key for key in heard if self.chance.random() < 0.5}
        found = placed_replicas(
            {names.index(key) for key in self.in_sync},
            {names.index(key) for key in near},
            names.index(self.owner),
            lambda one: place[names[one]],
            COPIES,
        )
        self.in_sync = {names[one] for one in found}
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
            assert part.in_sync <= part.hosts
            most = max(most, len(part.in_sync))
            assert len(part.in_sync) >= min(most, COPIES), f"seed {seed}: two replicas were given up at once"
            if part.is_settled():
                break
            part.turn()
        assert part.is_settled(), f"seed {seed}"


def test_a_replica_that_does_not_rest_is_given_up_while_the_owner_counts_on_it():
    """Found: a peer read of an earlier configuration in a journal that was still arriving."""

    def grow(part):
        for _ in range(40):
            part.peers.append(part.new_key())
            for _ in range(6):
                part.turn()

    with pytest.raises(AssertionError, match="the owner still counted"):
        any(grow(Part(seed, rest=0)) for seed in range(100))


def test_every_choice_keeps_the_owner_and_enough_replicas_and_comes_to_the_best_ones():
    """All sets of five replicas, and all rankings of them."""
    everybody = set(range(5))
    for order in permutations(range(5)):
        for size in range(1, 5):
            for kept in map(set, combinations(range(5), size)):
                for me in kept:
                    _comes_to_the_best(kept, everybody - kept, me, order.index)


def _comes_to_the_best(kept, near, me, place):
    everybody, before = kept | near, kept
    for _ in range(10):
        after = placed_replicas(before, everybody - before, me, place, COPIES)
        assert me in after
        assert len(after) >= min(len(before), COPIES)
        assert len(after) <= max(len(before), COPIES + 1)
        assert len(before - after) <= 1
        assert after >= before or len(before) > COPIES, "given up before another one had taken its place"
        if after == before:
            break
        before = after
    best = set(sorted(everybody, key=place)[:COPIES])
    assert before in (best, best | {me}), "the owner that should be another one stays until it hands over"
