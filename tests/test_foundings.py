"""Tests what a peer sees, promises and keeps on its disk about parts that are lost."""

from dataclasses import replace

import pytest
from kit.swarm import RUN, card_of, key_of, replica

from aedit.launch.swarm.recreate_parts import Forcing, Foundings
from aedit.proto.rpc import last_term_before
from aedit.proto.swarm import mark, ranking
from aedit.types import UserError

LOST_S = 100.0


class Peers:
    """Peers that read each other's cards at once. Part 0 is kept by `keep`, of which the first owns it."""

    def __init__(self, folder, count, keep):
        self.now, self.folder = 0.0, folder
        self.keys = [key_of(n + 1).public for n in range(count)]
        self.hosted = {self.keys[n]: replica(term=3, leads=n == keep[0]) for n in keep}
        self.dead, self.foundings = set(), {}
        for key in self.keys:
            self.start(key)

    def add(self):
        """Let one more peer come, and return its key."""
        key = key_of(len(self.keys) + 1).public
        self.keys.append(key)
        self.start(key)
        return key

    def force(self, key, wait_s=0.0, parts=(0,)):
        """Start a peer again with the option, and return what founds the part by force."""
        self.start(key)
        return Forcing(parts, self.foundings[key], wait_s, clock=lambda: self.now)

    def start(self, key):
        folder = self.folder / key.hex()
        folder.mkdir(exist_ok=True)
        self.foundings[key] = Foundings(folder, RUN, key, parts=1, lost_s=LOST_S, clock=lambda: self.now)

    def live(self):
        names = {key: key_of(n + 1) for n, key in enumerate(self.keys)}
        return {
            key: replace(
                card_of(
                    names[key], address=f"10.0.0.{self.keys.index(key)}:7001", name=f"p{self.keys.index(key)}"
                ),
                parts={0: self.hosted[key]} if key in self.hosted else {},
                foundings=self.foundings[key].says(),
            )
            for key in self.keys
            if key not in self.dead
        }

    def turn(self, seconds=0.0):
        self.now += seconds
        for key in self.keys:
            if key not in self.dead:
                self.foundings[key].look(self.live())

    def registers(self):
        return [self.foundings[key].register(0) for key in self.keys if key not in self.dead]

    def lose(self, *numbers):
        for number in numbers:
            self.dead.add(self.keys[number])
            self.hosted.pop(self.keys[number], None)


def test_most_peers_found_a_part_whose_replicas_are_all_lost(tmp_path):
    peers = Peers(tmp_path, 5, keep=(0, 1))
    peers.turn()
    peers.lose(0, 1)
    peers.turn(LOST_S - 1)
    assert {register.generation for register in peers.registers()} == {0}, "too soon"
    for _ in range(3):
        peers.turn(2)
    alive = peers.keys[2:]
    founder = ranking(RUN, 0, alive)[0]
    assert {register.founder for register in peers.registers()} == {mark(founder)}
    assert [key for key in alive if peers.foundings[key].begins(0)] == [founder]
    assert not any(peers.foundings[key].begins(0) for key in alive), "once"
    term = last_term_before(1, mark(founder)) + 1
    peers.hosted[founder] = replica(term=term)
    peers.turn(1)
    assert {len(register.members) for register in peers.registers()} == {3}, "the dead are members no more"
    name = f"p{peers.keys.index(founder)}"
    assert peers.foundings[founder].states() == [f"was lost; founded again by {name}, generation 1"]
    # What comes back of the old part is not of the one that counts.
    assert not peers.registers()[0].counts(3)
    assert peers.registers()[0].counts(term + 9)


@pytest.mark.parametrize("lost", [(0, 1), (0, 1, 2)])
def test_half_of_the_peers_and_fewer_wait_and_say_so(tmp_path, lost):
    peers = Peers(tmp_path, 4, keep=(0, 1))
    peers.turn()
    peers.lose(*lost)
    for _ in range(20):
        peers.turn(LOST_S)
    assert {register.accepted for register in peers.registers()} == {0}
    (state,) = peers.foundings[peers.keys[3]].states()
    agree = "lost: founded again once 3 of the 4 peers that knew it agree"
    assert state == f"{agree}, or by aedit peer --force-found 0"


def test_a_live_owner_keeps_its_part(tmp_path):
    peers = Peers(tmp_path, 5, keep=(0, 1))
    peers.turn()
    peers.lose(1)
    for _ in range(10):
        peers.turn(LOST_S)
    assert {register.generation for register in peers.registers()} == {0}


def test_a_replica_that_cannot_be_elected_keeps_no_part(tmp_path):
    """Owner and follower of three copies are gone for good: one vote of three elects nobody."""
    peers = Peers(tmp_path, 5, keep=(0, 1, 2))
    peers.turn()
    peers.lose(0, 1)
    for _ in range(3):
        peers.turn(LOST_S)
    assert {register.accepted > 0 for register in peers.registers()} == {True}


def test_a_peer_keeps_what_it_has_promised_over_restarts(tmp_path):
    peers = Peers(tmp_path, 5, keep=(0, 1))
    peers.turn()
    peers.lose(0, 1)
    peers.turn(LOST_S)
    before = peers.registers()
    assert any(register.generation == 1 for register in before)
    for key in peers.keys[2:]:
        peers.start(key)
    assert peers.registers() == before
    peers.turn(1)
    assert {register.generation for register in peers.registers()} <= {0, 1}, "it waits anew"


def lost_to_most(tmp_path, count=5):
    """Return peers of which two are left, and know that their part is lost."""
    peers = Peers(tmp_path, count, keep=(0, 1))
    peers.turn()
    peers.lose(*range(count - 2))
    for _ in range(3):
        peers.turn(LOST_S)
    assert {register.accepted for register in peers.registers()} == {0}
    return peers


def followed(peers):
    """Return the foundings that count at the live peers after some turns."""
    for _ in range(4):
        peers.turn(1)
    return {(one.accepted, one.founder) for one in peers.registers()}


@pytest.mark.parametrize("is_new", [False, True])
def test_one_of_the_peers_that_are_left_founds_a_part_by_force(tmp_path, capsys, is_new):
    peers = lost_to_most(tmp_path)
    founder = peers.add() if is_new else peers.keys[3]
    generation = max(register.generation for register in peers.registers()) + 1
    forcing = peers.force(founder, wait_s=10)
    peers.turn(9)
    forcing.look(peers.live())
    assert peers.foundings[founder].register(0).accepted == 0, "an owner may still be heard of"
    peers.turn(1)
    forcing.look(peers.live())
    assert peers.foundings[founder].begins(0)
    assert followed(peers) == {(generation, mark(founder))}
    told = capsys.readouterr().err
    assert f"part 0 is founded here in generation {generation}, without a vote" in told
    assert "5 knew it when it had an owner" in told
    assert "are lost" in told
    assert "at one peer only" in told
    peers.hosted[founder] = replica(term=last_term_before(generation, mark(founder)) + 1)
    peers.turn(1)
    live = {key for key in peers.keys if key not in peers.dead}
    assert {register.members for register in peers.registers()} == {frozenset(live)}
    forcing.look(peers.live())
    assert not peers.foundings[founder].begins(0)


def test_the_founder_does_not_vote_on_the_part_while_its_owner_starts(tmp_path):
    """The part was lost for long, so its vote is due soon; its time begins anew with the founding."""
    peers = lost_to_most(tmp_path)
    peers.lose(3)
    forcing = peers.force(peers.keys[4])
    peers.turn(LOST_S - 1)
    forcing.look(peers.live())
    before = peers.registers()
    peers.turn(2)
    assert peers.registers() == before


def test_the_option_at_a_second_start_founds_nothing(tmp_path, capsys):
    peers = lost_to_most(tmp_path)
    founder = peers.keys[3]
    peers.force(founder).look(peers.live())
    assert peers.foundings[founder].begins(0)
    before = followed(peers)
    for _ in range(2):
        capsys.readouterr()
        forcing = peers.force(founder)
        peers.turn(1)
        forcing.look(peers.live())
        assert not peers.foundings[founder].begins(0)
        assert followed(peers) == before
        assert "was founded here by force before; not again" in capsys.readouterr().err


def test_of_two_peers_that_force_at_once_one_goes_on_and_the_other_follows(tmp_path):
    peers = lost_to_most(tmp_path)
    one, other = peers.keys[3:]
    live = peers.live()
    for key in (one, other):  # neither has heard of the other
        peers.force(key).look(live)
        assert peers.foundings[key].begins(0)
    terms = {key: peers.foundings[key].register(0).term_above + 1 for key in (one, other)}
    assert terms[one] != terms[other]
    peers.hosted |= {key: replica(term=terms[key]) for key in terms}
    winner = max(terms, key=terms.get)
    ((generation, founder),) = followed(peers)
    assert founder == mark(winner)
    assert terms[winner] == last_term_before(generation, founder) + 1
    counts = [register.counts for register in peers.registers()]
    assert [[of(terms[key]) for key in (winner, min(terms, key=terms.get))] for of in counts] == [
        [True, False]
    ] * 2
    assert not any(peers.foundings[key].begins(0) for key in terms), "the other one follows"


def test_an_owner_that_comes_back_after_that_does_not_count_and_neither_does_its_majority(tmp_path):
    peers = lost_to_most(tmp_path)
    founder = peers.keys[3]
    peers.force(founder).look(peers.live())
    found = followed(peers)
    peers.dead -= set(peers.keys[:3])
    peers.hosted[peers.keys[0]] = replica(term=4)
    peers.hosted[peers.keys[1]] = replica(term=4, leads=False)
    for key in peers.keys[:3]:
        peers.start(key)
    assert followed(peers) == found
    assert not any(register.counts(4) for register in peers.registers())


def test_a_part_with_a_live_owner_is_not_founded_by_force(tmp_path):
    peers = Peers(tmp_path, 5, keep=(0, 1))
    peers.turn()
    before = peers.registers()
    forcing = peers.force(peers.keys[4])
    peers.turn(1)
    with pytest.raises(UserError, match="part 0 is owned by p0, which is live: nothing was founded"):
        forcing.look(peers.live())
    assert peers.registers() == before
