"""Tests what a peer sees, promises and keeps on its disk about parts that are lost."""

from dataclasses import replace

import pytest
from kit.swarm import RUN, card_of, key_of, replica

from aedit.launch.swarm.foundings import Foundings
from aedit.proto.swarm.founding import mark
from aedit.proto.swarm.placement import ranking
from aedit.proto.wire.lineage import last_term_before

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
    assert state == "lost: founded again once 3 of the 4 peers that knew it agree"


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
