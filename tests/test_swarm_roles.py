"""Tests what a peer of a swarm does with each part: begin to keep it, give it up, name the one to own it."""

import pytest

from aedit.launch.swarm import part_view
from aedit.launch.swarm.hosted_part import PartView, Role
from aedit.launch.swarm.run_peer import RecentPeers
from aedit.proto.swarm import PartPlaces, PartReplica, PeerCard, ReplicasFile

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


E, F = (bytes([n]) * 32 for n in (5, 6))


def test_a_part_has_one_replica_too_many_at_most():
    """Found: 32 peers on two cores came to 105 replicas where 24 were wanted."""
    owner, other = {"a": replica(leads=True)}, replica()
    ranked = [D, E, F, A, B, C]
    assert [view(ranked, me, **owner).role(3, 0) for me in (D, E, F)] == [Role.HOST] * 3
    two = {**owner, "b": other}
    assert [view(ranked, me, **two).role(3, 0) for me in (D, E, F)] == [Role.HOST, Role.HOST, Role.WAIT]
    three = {**two, "c": other}
    assert [view(ranked, me, **three).role(3, 0) for me in (D, E, F)] == [Role.HOST, Role.WAIT, Role.WAIT]
    four = {**three, "d": other}
    assert [view(ranked, me, **four).role(3, 0) for me in (E, F)] == [Role.WAIT] * 2, "until one is given up"
    assert view([A, B, C, D], D, **two).role(3, 0) is Role.KEEP
    assert view([A, B, D, C], D, **two).role(3, 0) is Role.HOST


def test_a_peer_that_vanished_a_moment_ago_keeps_its_place_while_most_copies_are_there():
    """Found: cards that came late on a busy machine lost their peers their parts."""
    there = {"a": replica(leads=True), "b": replica()}
    lately = PartView((A, B, D), {A: there["a"], B: there["b"]}, D, placed=(A, C, B, D))
    assert lately.role(3, 0) is Role.KEEP, "C may come back"
    assert view([A, B, D], D, **there).role(3, 0) is Role.HOST
    alone = PartView((A, D, B), {A: there["a"]}, D, placed=(A, C, B, D))
    assert alone.role(3, 0) is Role.HOST, "a single copy is left"
    late = PartView((A, B, D), {A: there["a"], B: replica(in_sync=False)}, D, placed=(A, C, B, D))
    assert late.role(3, 0) is Role.HOST, "a single one in sync"


def test_a_surplus_replica_is_given_up_for_a_peer_that_vanished_a_moment_ago():
    cards = {B: replica(leads=True), C: replica(), D: replica()}
    assert PartView((B, C, D), cards, D, placed=(A, B, C, D)).role(3, 3) is Role.RETIRE
    assert PartView((B, C, D), cards, D, placed=(A, B, C, D)).role(3, 2) is Role.KEEP


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

    def after(live, now_s, within_s=18.0):
        recent.look(live, now_s)
        return recent.within(within_s)

    assert after(everybody, 0.0) == {A, B, C}
    alone = {A: card(A)}
    assert after(alone, 5.9, 6.0) == {A, B, C}
    assert after(alone, 6.0, 6.0) == {A}
    assert after(alone, 17.0) == {A, B, C}
    assert view([A]).places(3, len(after(alone, 17.9))).least == 2
    assert after(alone, 18.5) == {A}
    assert after(everybody, 19.0) == {A, B, C}
    assert after({**everybody, C: card(C, leaving=True)}, 19.5) == {A, B}
    assert after({A: card(A), B: card(B), C: card(C, address="")}, 38.0) == {A, B}, "a client keeps nothing"
