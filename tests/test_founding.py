"""Tests who may found a lost part again: at most one peer per generation, and never a minority."""

import itertools
import random
from dataclasses import replace

import pytest

from aedit.proto.swarm.card import Founding
from aedit.proto.swarm.founding import Register, accepted, begins, mark, owned, voted
from aedit.proto.wire.lineage import last_term_before, lineage

KEYS = [bytes([65 + n]) * 32 for n in range(7)]


class World:
    """Peers that have all missed a part, and what each has last heard of each other. Steps are explicit."""

    def __init__(self, count, dead=0):
        members = frozenset(KEYS[:count])
        self.alive = KEYS[: count - dead]
        self.registers = {key: Register(members=members) for key in self.alive}
        self.heard = {key: {} for key in self.alive}
        self.founded = {}

    def copy(self):
        twin = World.__new__(World)
        twin.alive, twin.registers, twin.founded = self.alive, dict(self.registers), dict(self.founded)
        twin.heard = {key: dict(heard) for key, heard in self.heard.items()}
        return twin

    def hear(self, key, other):
        self.heard[key][other] = self.registers[other].say

    def says(self, key):
        return self.heard[key] | {key: self.registers[key].say}

    def vote(self, key, order):
        """Let a peer vote that sees those live that it has heard, in the order of its ranking."""
        says = self.says(key)
        ranked = [one for one in order if one in says]
        self.registers[key] = voted(self.registers[key], key, ranked, says)

    def accept(self, key):
        self.registers[key] = register = accepted(self.registers[key], self.says(key), self.alive)
        if register.accepted:
            other = self.founded.setdefault(register.accepted, register.founder)
            assert other == register.founder, f"two founders of generation {register.accepted}"
        if begins(register, key):
            self.registers[key] = replace(register, begun=register.accepted)

    def restart(self, key):
        self.heard[key] = {}

    def state(self):
        return tuple(self.registers.values()), tuple(
            tuple(sorted(h.items(), key=str)) for h in self.heard.values()
        )


def steps_of(world):
    """Return every single step that can happen next."""
    pairs = itertools.permutations(world.alive, 2)
    steps = [lambda w, a=a, b=b: w.hear(a, b) for a, b in pairs]
    for key in world.alive:
        for order in (KEYS, KEYS[::-1]):  # peers that see others rank otherwise
            steps.append(lambda w, key=key, order=order: w.vote(key, order))
        steps += [lambda w, key=key: w.accept(key), lambda w, key=key: w.restart(key)]
    return steps


def test_all_short_histories_of_three_peers_have_one_founder_per_generation():
    """Every order of votes, lost and late cards, restarts and two candidates, breadth first."""
    seen, front, founded = set(), [World(3)], False
    for _ in range(7):
        following = []
        for world in front:
            for step in steps_of(world):
                after = world.copy()
                step(after)
                if (state := str(after.state())) not in seen:
                    seen.add(state)
                    following.append(after)
                    founded |= bool(after.founded)
        front = random.Random(0).sample(following, min(len(following), 600))
    assert founded


@pytest.mark.parametrize(("count", "dead"), [(4, 1), (5, 0), (5, 2), (7, 3)])
def test_random_histories_have_one_founder_per_generation(count, dead):
    founded = 0
    for seed in range(150):
        world, chance = World(count, dead), random.Random(seed)
        for _ in range(60 * count):
            chance.choice(steps_of(world))(world)
        founded += bool(world.founded)
    assert founded > 5


@pytest.mark.parametrize(("count", "dead"), [(2, 1), (4, 2), (5, 3), (6, 3)])
def test_half_of_the_peers_or_less_never_found(count, dead):
    for seed in range(50):
        world, chance = World(count, dead), random.Random(seed)
        for _ in range(150):
            chance.choice(steps_of(world))(world)
        assert not world.founded


def test_the_first_peer_stands_and_the_others_follow():
    world = World(5, dead=2)
    for one, other in itertools.permutations(world.alive, 2):
        world.hear(one, other)
    for key in world.alive:  # each votes once for as long as the part must be missed
        world.vote(key, KEYS)
        for one, other in itertools.permutations(world.alive, 2):
            world.hear(one, other)
    for key in world.alive:
        world.accept(key)
    assert {(r.accepted, r.founder) for r in world.registers.values()} == {(1, mark(KEYS[0]))}
    assert [key for key, register in world.registers.items() if register.begun] == [KEYS[0]]


def test_after_a_split_vote_the_next_generation_is_tried():
    world = World(4)
    for key, order in zip(world.alive, [KEYS, KEYS, KEYS[::-1], KEYS[::-1]], strict=True):
        for other in world.alive:
            if (other in KEYS[:2]) == (key in KEYS[:2]):
                world.hear(key, other)
        world.vote(key, order)
    for _ in range(3):
        for one, other in itertools.permutations(world.alive, 2):
            world.hear(one, other)
        for key in world.alive:
            world.accept(key)
            world.vote(key, KEYS)
    for key in world.alive:
        world.accept(key)
    assert world.founded.popitem() == (2, mark(KEYS[0]))


def test_a_founder_that_has_not_managed_it_is_not_the_next_one():
    says = {key: Register(members=frozenset(KEYS[:3])).say for key in KEYS[:3]}
    failed = Register(
        members=frozenset(KEYS[:3]), generation=1, accepted=1, founder=mark(KEYS[0]), candidate=mark(KEYS[0])
    )
    assert voted(failed, KEYS[0], KEYS[:3], says) == failed
    after = voted(failed, KEYS[1], KEYS[:3], says)
    assert (after.generation, after.candidate) == (2, mark(KEYS[1]))


def test_a_minority_that_still_sees_a_replica_does_not_become_a_majority():
    register = owned(Register(), KEYS[:7], KEYS[:7])
    assert owned(register, KEYS[:3], KEYS[:3]).members == frozenset(KEYS[:7])
    assert owned(register, KEYS[:4], KEYS[:4]).members == frozenset(KEYS[:4]), "most of them are here"


def test_peers_that_are_cut_off_together_are_not_taken_out_one_by_one():
    register = owned(Register(), KEYS[:6], KEYS[:6])
    for left in (5, 4, 3):  # their leases end one after the other
        register = owned(register, KEYS[:left], KEYS[:6])
    assert len(register.members) == 6


def test_newcomers_do_not_outvote_a_minority_that_waits_for_the_others():
    """Four that have come to three of eight peers are a majority of those seven."""
    new, old = KEYS[3:7], KEYS[:3]
    say = Founding(generation=1, candidate=mark(new[0]), members=7)
    says = dict.fromkeys(new, say) | dict.fromkeys(old, Founding(generation=0, candidate=b"", members=8))
    assert accepted(Register(members=frozenset(KEYS)), says, KEYS).accepted == 0


def test_a_peer_that_comes_later_believes_most_of_those_who_are_there():
    say = Founding(generation=2, candidate=mark(KEYS[1]), members=3)
    assert accepted(Register(), dict.fromkeys(KEYS[:2], say), KEYS[:3]).accepted == 2
    assert accepted(Register(), {KEYS[0]: say}, KEYS[:3]).accepted == 0, "one of three"


def test_a_false_generation_does_not_use_them_up():
    me = KEYS[0]
    says = {KEYS[1]: Founding(generation=2**20 - 1, candidate=mark(KEYS[2]), members=3)}
    after = voted(Register(members=frozenset(KEYS[:3])), me, KEYS[:3], says)
    assert after.generation < 100


def test_terms_of_a_later_generation_are_above_all_earlier_ones_and_founders_differ():
    one, other = (last_term_before(1, key) for key in KEYS[:2])
    assert lineage(one + 1) != lineage(other + 1)
    assert lineage(1_000_000) == 0 < lineage(one + 1)
    assert last_term_before(2, KEYS[0]) > max(one, other) + 2**20
    register = Register(accepted=1, founder=KEYS[0])
    assert register.counts(one + 7)
    assert register.counts(0)
    assert not register.counts(5)
    assert not register.counts(other + 7)
