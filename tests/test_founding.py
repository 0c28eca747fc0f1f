"""Tests who may found a lost part again: at most one peer per generation, and never a minority."""

import itertools
import random
from dataclasses import replace

import pytest

from aedit.proto.rpc import last_term_before, lineage
from aedit.proto.swarm import (
    MOST_FORCED,
    Founding,
    Register,
    founds_now,
    mark,
    with_agreed,
    with_force,
    with_owner,
    with_vote,
)

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
        self.registers[key] = with_vote(self.registers[key], key, ranked, says)

    def accept(self, key):
        self.registers[key] = register = with_agreed(self.registers[key], self.says(key), self.alive)
        if register.accepted:
            other = self.founded.setdefault(register.accepted, register.founder)
            assert other == register.founder, f"two founders of generation {register.accepted}"
        if founds_now(register, key):
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
    assert with_vote(failed, KEYS[0], KEYS[:3], says) == failed
    after = with_vote(failed, KEYS[1], KEYS[:3], says)
    assert (after.generation, after.candidate) == (2, mark(KEYS[1]))


def test_a_minority_that_still_sees_a_replica_does_not_become_a_majority():
    register = with_owner(Register(), KEYS[:7], KEYS[:7])
    assert with_owner(register, KEYS[:3], KEYS[:3]).members == frozenset(KEYS[:7])
    assert with_owner(register, KEYS[:4], KEYS[:4]).members == frozenset(KEYS[:4]), "most of them are here"


def test_peers_that_are_cut_off_together_are_not_taken_out_one_by_one():
    register = with_owner(Register(), KEYS[:6], KEYS[:6])
    for left in (5, 4, 3):  # their leases end one after the other
        register = with_owner(register, KEYS[:left], KEYS[:6])
    assert len(register.members) == 6


def test_newcomers_do_not_outvote_a_minority_that_waits_for_the_others():
    """Four that have come to three of eight peers are a majority of those seven."""
    new, old = KEYS[3:7], KEYS[:3]
    say = Founding(generation=1, candidate=mark(new[0]), members=7)
    says = dict.fromkeys(new, say) | dict.fromkeys(old, Founding(generation=0, candidate=b"", members=8))
    assert with_agreed(Register(members=frozenset(KEYS)), says, KEYS).accepted == 0


def test_a_peer_that_comes_later_believes_most_of_those_who_are_there():
    say = Founding(generation=2, candidate=mark(KEYS[1]), members=3)
    assert with_agreed(Register(), dict.fromkeys(KEYS[:2], say), KEYS[:3]).accepted == 2
    assert with_agreed(Register(), {KEYS[0]: say}, KEYS[:3]).accepted == 0, "one of three"


def test_a_false_generation_does_not_use_them_up():
    me = KEYS[0]
    says = {KEYS[1]: Founding(generation=2**20 - 1, candidate=mark(KEYS[2]), members=3)}
    after = with_vote(Register(members=frozenset(KEYS[:3])), me, KEYS[:3], says)
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


class ForcedWorld(World):
    """Peers of which some may found the part by force, at any time and without knowing of each other."""

    def copy(self):
        twin = super().copy()
        twin.__class__, twin.begun = ForcedWorld, list(self.begun)
        return twin

    begun = ()

    def force(self, key):
        before, says = self.registers[key], self.says(key)
        if before.has_forced:
            return
        self.registers[key] = with_force(before, key, says, [*self.heard[key], key])
        assert self.registers[key].accepted > max(max(one.generation, one.forced) for one in says.values())

    def accept(self, key):
        before = self.registers[key]
        after = self.registers[key] = with_agreed(before, self.says(key), [*self.heard[key], key])
        assert (after.accepted, after.founder) == (before.accepted, before.founder) or before.is_below(
            (after.accepted, after.founder)
        ), "a founding never goes back"
        if founds_now(after, key):
            self.registers[key] = replace(after, begun=after.accepted)
            self.begun = [*self.begun, (after.accepted, key)]
            assert len(set(self.begun)) == len(self.begun), "nobody founds a generation twice"

    def meet(self):
        """Let all hear each other until nothing changes; return the foundings that count then."""
        for _ in range(4):
            for one, other in itertools.permutations(self.alive, 2):
                self.hear(one, other)
            for key in self.alive:
                self.accept(key)
        return {(one.accepted, one.founder) for one in self.registers.values()}


def forced_steps_of(world, able):
    return steps_of(world) + [lambda w, key=key: w.force(key) for key in able]


def highest(world):
    foundings = [(one.accepted, one.founder) for one in world.registers.values()]
    return max(foundings, key=lambda one: (last_term_before(*one), one[1]))


def check_one_goes_on(world):
    """Once one has forced, all follow the highest founding that any of them knows, however it came to be."""
    if not any(one.has_forced for one in world.registers.values()):
        return
    one_of_all, found = highest(world), world.copy().meet()
    assert len(found) == 1, found
    ((generation, founder),) = found
    assert not Register(accepted=generation, founder=founder).is_below(one_of_all)


def test_all_short_histories_with_two_peers_that_force_end_with_one_founding():
    """Breadth first: votes, lost and late cards and restarts of three peers, two of which force."""
    seen, front, forced_twice = set(), [ForcedWorld(3)], 0
    for _ in range(7):
        following = []
        for world in front:
            for step in forced_steps_of(world, KEYS[:2]):
                after = world.copy()
                step(after)
                if (state := str(after.state())) not in seen:
                    seen.add(state)
                    following.append(after)
        front = random.Random(0).sample(following, min(len(following), 300))
        for world in front:
            check_one_goes_on(world)
            forced_twice += sum(one.has_forced for one in world.registers.values()) == 2
    assert forced_twice > 100


@pytest.mark.parametrize(("count", "dead", "able"), [(2, 1, 1), (4, 2, 1), (5, 3, 2), (5, 0, 2), (7, 3, 3)])
def test_random_histories_with_peers_that_force_end_with_one_founding(count, dead, able):
    split = 0
    for seed in range(120):
        world, chance = ForcedWorld(count, dead), random.Random(seed)
        steps = forced_steps_of(world, world.alive[:able])
        for _ in range(30 * count):
            chance.choice(steps)(world)
        split += len({(one.accepted, one.founder) for one in world.registers.values()}) > 1
        check_one_goes_on(world)
    assert split > 0 or len(world.alive) == 1


def test_half_of_the_peers_follow_one_that_forces_and_are_all_members_then():
    world = ForcedWorld(5, dead=3)
    a, b = world.alive
    assert world.meet() == {(0, b"")}
    world.force(a)
    assert world.meet() == {(1, mark(a))}
    assert [key for key, one in world.registers.items() if one.begun] == [a]
    assert {one.members for one in world.registers.values()} == {frozenset((a, b))}
    world.vote(b, [b, a])  # lost again, with both there: they vote as ever
    world.hear(a, b)
    world.vote(a, [b, a])
    assert world.meet() == {(2, mark(b))}


def test_who_was_away_follows_a_forced_founding_and_the_elected_one_after_it():
    """Three of five that come back are a majority of the peers that they know."""
    followed = Register(
        generation=2, candidate=mark(KEYS[1]), accepted=2, founder=mark(KEYS[1]), is_forced=True
    )
    old = Register(members=frozenset(KEYS[:5]))
    says = {KEYS[0]: followed.say} | dict.fromkeys(KEYS[2:5], old.say)
    after = with_agreed(old, says, KEYS[:5])
    assert (after.accepted, after.founder) == (2, mark(KEYS[1]))
    assert after.say.forced == 2, "and tells others"


def test_a_new_peer_forces_above_all_votes_that_it_hears():
    says = dict.fromkeys(KEYS[:2], Founding(generation=288, candidate=mark(KEYS[0]), members=5))
    after = with_force(Register(), KEYS[6], says, KEYS[:2])
    assert (after.accepted, after.founder) == (289, mark(KEYS[6]))
    assert after.members == {*KEYS[:2], KEYS[6]}
    assert founds_now(after, KEYS[6])
    voter = Register(members=frozenset(KEYS[:5]), generation=288, candidate=mark(KEYS[0]))
    assert with_agreed(voter, says | {KEYS[6]: after.say}, KEYS[:2]).founder == mark(KEYS[6])


def test_false_cards_with_forced_generations_leave_those_to_the_votes():
    false = Founding(generation=0, candidate=b"", members=0, forced=MOST_FORCED + 1, founder=mark(KEYS[2]))
    old = Register(members=frozenset(KEYS[:3]))
    assert with_agreed(old, {KEYS[2]: false}, KEYS[:3]) == old
    highest = replace(false, forced=MOST_FORCED)
    after = with_agreed(old, {KEYS[2]: highest}, KEYS[:3])
    assert after.accepted == MOST_FORCED
    assert with_force(after, KEYS[0], {KEYS[2]: highest}, KEYS[:3]) == after, "no more by force"
    says = dict.fromkeys(KEYS[1:3], highest)
    assert with_vote(after, KEYS[0], KEYS[:2], says).generation == MOST_FORCED + 1, "but by votes"
    beyond = with_force(
        Register(), KEYS[0], {KEYS[2]: replace(false, forced=0, founder=b"", generation=2**20 - 1)}, []
    )
    assert beyond.accepted == 1
