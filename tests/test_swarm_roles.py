"""Tests what a peer of a swarm does with each part: begin to keep it, give it up, name the one to own it."""

import pytest

from aedit.launch.swarm.recent_peers import RecentPeers
from aedit.launch.swarm.roles import PartView, Role, part_view
from aedit.proto.swarm.card import PartReplica, PeerCard
from aedit.proto.swarm.replicas_file import PartPlaces, ReplicasFile

A, B, C, D = (bytes([n]) * 32 for n in range(1, 5))


def replica(leads=False, in_sync=True, term=1, address="h:1"):
    return PartReplica(address=address, term=term, leads=leads, in_sync=in_sync)


def view(ranked, me=A, **replicas):
    keys = {"a": A, "b": B, "c": C, "d": D}
    return PartView(tuple(ranked), {keys[name]: one for name, one in replicas.items()}, me)


def test_a_chosen_peer_begins_to_keep_a_part_once_somebody_owns_it():
    assert view([B, A, C], B, a=replica(leads=True)).role(2, 2) is Role.HOST
    assert view([B, A, C], B, a=replica()).role(2, 2) is Role.KEEP, "nobody leads: there is nothing to follow"
    assert view([B, A, C], C, a=replica(leads=True)).role(2, 2) is Role.KEEP, "not among the first two"


def test_a_replica_is_given_up_only_when_as_many_others_are_agreed_on_as_are_wanted():
    cards = {"a": replica(leads=True), "b": replica(), "c": replica()}
    assert view([A, B, C], C, **cards).role(2, 2) is Role.RETIRE
    assert view([A, B, C], C, **cards).role(2, 1) is Role.KEEP
    assert view([A, B, C], C, **cards).role(2, 0) is Role.KEEP, "the owner still counts on it"
    assert view([A, C, B], C, **cards).role(2, 2) is Role.KEEP, "it is chosen"


def test_an_owner_never_gives_its_part_up_by_itself():
    assert view([A, B, C], C, a=replica(), b=replica(), c=replica(leads=True)).role(2, 2) is Role.KEEP


def test_the_best_ranked_replica_in_sync_is_to_own_the_part():
    assert view([A, B, C], a=replica(in_sync=False), b=replica(), c=replica(leads=True)).first() == B
    assert view([A, B, C]).first() is None


def test_of_two_that_say_they_own_a_part_the_higher_term_does():
    assert view([A, B], C, a=replica(leads=True, term=3), b=replica(leads=True, term=5)).owner == B


def test_of_two_that_say_they_own_a_part_the_one_that_is_followed_does():
    """Found: one card with a term of 2^62 was the owner for everybody."""
    false = replica(leads=True, term=2**62)
    assert view([A, B, C], D, a=false, b=replica(leads=True, term=3), c=replica(term=3)).owner == B
    late = replica(term=3, in_sync=False)
    assert view([A, B, C], D, a=false, b=replica(leads=True, term=3), c=late).owner == A, "nobody follows B"


def test_the_own_replica_is_believed_more_than_all_cards():
    """Found: false followers of a false owner would outnumber those that are there."""
    many = {"b": replica(leads=True, term=9), "c": replica(term=9), "d": replica(term=9)}
    assert view([B, C, D, A], A, a=replica(leads=True, term=3), **many).owner == A
    following = {"a": replica(term=3), "b": replica(leads=True, term=3)}
    assert view([C, D, B, A], A, **following, c=replica(leads=True, term=9), d=replica(term=9)).owner == B


@pytest.mark.parametrize("change", [{"leaving": True}, {"address": ""}])
def test_clients_and_peers_that_leave_are_not_ranked(change):
    found = part_view("r", 0, {A: card(A), B: card(B, **change)})
    assert found.ranked == (A,)


def test_replicas_are_named_by_rank_then_those_that_are_not_ranked():
    replicas = {
        "a": replica(leads=True, address="a:1"),
        "b": replica(address="b:1"),
        "c": replica(address="c:1"),
    }
    places = view([B, A], **replicas).places(3)
    assert (places.replicas, places.owner, places.first) == (("b:1", "a:1", "c:1"), "a:1", "b:1")


def test_the_file_of_replicas_is_read_as_it_was_written_and_again_when_it_changes(tmp_path):
    reads, writes = (ReplicasFile(tmp_path / "replicas.json") for _ in range(2))
    assert reads.parts() == ()
    assert reads.part(3) == PartPlaces()
    writes.write([view([A], a=replica(leads=True)).places(3)])
    assert reads.part(0) == PartPlaces(("h:1",), "h:1", "h:1", 1, (A.hex(),))
    writes.write([PartPlaces(("x:2",), "", "", 2), PartPlaces()])
    assert reads.parts() == (PartPlaces(("x:2",), "", "", 2), PartPlaces())


@pytest.mark.parametrize(
    ("peers", "copies", "least"), [(1, 3, 1), (2, 3, 2), (6, 3, 2), (6, 5, 3), (6, 1, 1), (0, 3, 1)]
)
def test_most_copies_must_confirm_or_all_peers_where_there_are_fewer(peers, copies, least):
    assert view([A, B, C, D, b"5", b"6"][:peers]).places(copies).least == least


def card(key, **values):
    return PeerCard(run="r", name="n", public_key=key, serial=1, **{"address": "h:1", **values})


def test_a_peer_that_has_vanished_counts_for_a_while_and_one_that_leaves_does_not():
    """Found: peers of a busy machine heard from nobody for a lease, and an owner there acknowledged alone."""
    recent, everybody = RecentPeers(18.0), {key: card(key) for key in (A, B, C)}
    assert recent.count(everybody, 0.0) == 3
    alone = {A: card(A)}
    assert recent.count(alone, 17.0) == 3
    assert view([A]).places(3, recent.count(alone, 17.9)).least == 2
    assert recent.count(alone, 18.5) == 1
    assert recent.count(everybody, 19.0) == 3
    assert recent.count({**everybody, C: card(C, leaving=True)}, 19.5) == 2
    assert recent.count({**everybody, C: card(C, address="")}, 20.0) == 2, "a client keeps nothing"
