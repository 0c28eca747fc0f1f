"""Tests which peers count: leases, replays, forged and contradicting cards, and bounds on memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.swarm import RUN, card_of, data_of, key_of, replica

from aedit.proto.swarm import KnownPeers, Serials, encoded_card

OWN, ALPHA, BETA = key_of(1), key_of(2), key_of(3)


def known(**options):
    return KnownPeers(RUN, OWN.public, **options)


def alive(peers, now):
    return {card.name for card in peers.live(now).values()}


def member(peers, key=ALPHA, serial=1, now=0.0, **changes):
    peers.offer(data_of(key, serial, **changes), now)
    return peers.confirm(key.public, now)


def test_a_card_counts_once_its_key_is_confirmed_and_until_its_lease_ends():
    peers = known()
    assert peers.offer(data_of(ALPHA), 0.0).kind == "new"
    assert alive(peers, 0.0) == set()
    assert peers.confirm(ALPHA.public, 1.0)
    assert alive(peers, 1.0) == alive(peers, 9.9) == {"alpha"}
    assert alive(peers, 10.0) == set()  # from the first sight of the card, not from the confirmation


def test_a_newer_card_from_anybody_renews_a_live_peer():
    peers = known()
    member(peers)
    assert peers.offer(data_of(ALPHA, 2, steps_per_s=4.0), 9.0).kind == "newer"
    assert peers.live(18.9)[ALPHA.public].steps_per_s == 4.0
    assert alive(peers, 19.0) == set()


@pytest.mark.parametrize("changes", [{"address": "10.0.0.9:7001"}, {"fingerprint": "ab" * 32}])
def test_a_peer_that_names_another_place_must_be_confirmed_again(changes):
    """Found: it went on to count at an address, or with a certificate, at which it had never answered."""
    peers = known()
    member(peers)
    assert peers.offer(data_of(ALPHA, 2, **changes), 1.0).kind == "new"
    assert alive(peers, 1.0) == set()
    assert peers.confirm(ALPHA.public, 2.0)
    assert alive(peers, 2.0) == {"alpha"}


def test_one_certificate_is_one_peer_while_that_one_counts():
    peers, elsewhere = known(), {"address": "10.0.0.2:7001", "name": "beta"}
    peers.offer(data_of(ALPHA), 0.0)
    peers.offer(data_of(BETA, **elsewhere), 5.0)
    assert peers.confirm(ALPHA.public, 1.0, "cert")
    assert not peers.confirm(BETA.public, 6.0, "cert")
    assert peers.twin(card_of(BETA, **elsewhere), "cert", 6.0).name == "alpha"
    assert alive(peers, 6.0) == {"alpha"}
    assert peers.confirm(ALPHA.public, 7.0, "cert"), "the same peer again"
    assert peers.confirm(BETA.public, 10.0, "cert"), "the lease of the first one has passed"
    assert alive(peers, 10.0) == {"beta"}
    assert peers.twin(card_of(BETA, **elsewhere), "cert", 10.0) is None


def test_a_new_key_takes_the_place_of_the_old_one_at_its_address_with_its_certificate():
    peers = known()
    peers.offer(data_of(ALPHA), 0.0)
    peers.offer(data_of(BETA, name="beta"), 0.0)
    assert peers.confirm(ALPHA.public, 0.0, "cert")
    assert peers.confirm(BETA.public, 1.0, "cert"), "its folder was deleted, and it came back"
    assert alive(peers, 1.0) == {"beta"}


def test_a_peer_whose_lease_has_ended_must_be_confirmed_again():
    peers = known()
    member(peers)
    assert peers.offer(data_of(ALPHA, 2), 10.0).kind == "new"
    assert alive(peers, 10.0) == set()
    assert peers.confirm(ALPHA.public, 11.0)
    assert alive(peers, 11.0) == {"alpha"}


def test_replayed_and_older_cards_keep_nobody_alive():
    peers = known()
    old, new = data_of(ALPHA, 1), data_of(ALPHA, 2)
    peers.offer(old, 0.0)
    peers.offer(new, 1.0)
    peers.confirm(ALPHA.public, 1.0)
    for now in range(2, 11):
        assert peers.offer(old, now).kind == peers.offer(new, now).kind == "known"
        peers.confirm(ALPHA.public, now)
    assert peers.live(10.9)[ALPHA.public].serial == 2
    assert alive(peers, 11.0) == set()
    assert not peers.confirm(ALPHA.public, 11.0)


def test_nobody_counts_without_a_card_or_with_one_that_is_forged_or_of_another_run():
    peers = known()
    assert not peers.confirm(ALPHA.public, 0.0)
    forged = bytearray(data_of(ALPHA))
    forged[-1] ^= 1
    assert peers.offer(bytes(forged), 0.0).kind == "refused"
    stolen = data_of(ALPHA)[:1] + data_of(BETA)[1:65] + data_of(ALPHA)[65:]
    assert "not signed with its own key" in peers.offer(stolen, 0.0).reason
    assert "run is 'other'; this peer is in 'run-1'" in peers.offer(data_of(ALPHA, run="other"), 0.0).reason
    assert not peers.confirm(ALPHA.public, 0.0)


def test_two_cards_of_one_serial_shut_the_key_out_and_name_it():
    peers = known()
    member(peers)
    other = data_of(ALPHA, 1, address="10.0.0.9:1")
    assert "two different cards of 'alpha' have the serial 1" in peers.offer(other, 1.0).reason
    assert alive(peers, 1.0) == set()
    assert "shut out" in peers.offer(data_of(ALPHA, 3), 2.0).reason
    assert not peers.confirm(ALPHA.public, 2.0)
    assert not peers.allows(ALPHA.public)
    (fault,) = peers.faults.values()

    told = known()
    assert not told.contradict(fault.one, fault.other, 0.0)  # a key that it does not know
    member(told, serial=7)
    member(told, BETA, name="beta", address="10.0.0.2:7001")
    for one, other in (
        (fault.one, fault.one),
        (fault.one, data_of(ALPHA, 2)),
        (fault.one, data_of(BETA)),
        (fault.one, b"garbage"),
    ):
        assert not told.contradict(one, other, 0.0)
    assert alive(told, 0.0) == {"alpha", "beta"}
    assert told.contradict(fault.one, fault.other, 0.0)
    assert alive(told, 0.0) == {"beta"}


def test_a_caller_is_told_of_peers_that_count_and_of_its_own_newest_card():
    peers, card = known(), data_of(ALPHA, 7)
    peers.offer(card, 0.0)
    peers.offer(data_of(BETA, 2, address="10.0.0.2:1"), 0.0)
    peers.confirm(ALPHA.public, 0.0)
    assert peers.newer({}, b"", 0.0) == [card]
    assert peers.newer({ALPHA.public[:16]: 6}, b"", 0.0) == [card]
    assert peers.newer({ALPHA.public[:16]: 7}, b"", 0.0) == []
    assert peers.newer({}, b"", 10.0) == []
    assert peers.newer({ALPHA.public[:16]: 1}, ALPHA.public, 10.0) == [card]
    assert peers.serials() == {ALPHA.public[:16]: 7, BETA.public[:16]: 2, OWN.public[:16]: 0}


def test_a_card_signed_twice_is_no_contradiction():
    peers = known()
    member(peers, parts={1: replica()})
    assert peers.offer(data_of(ALPHA, parts={1: replica()}), 1.0).kind == "known"
    assert not peers.faults


def test_a_clock_that_goes_back_or_jumps_ahead_prolongs_no_lease():
    peers = known()
    member(peers, now=100.0)
    assert alive(peers, 50.0) == {"alpha"}
    peers.offer(data_of(ALPHA, 2), 50.0)  # counts from 100
    assert alive(peers, 109.9) == {"alpha"}
    assert alive(peers, 1e9) == set()
    assert alive(peers, 110.0) == set()


def test_of_two_keys_at_one_address_the_one_that_answered_last_counts():
    peers = known()
    member(peers)
    assert member(peers, BETA, name="beta")
    assert alive(peers, 0.0) == {"beta"}
    for key in (key_of(20), key_of(21)):  # clients have no address in common
        assert member(peers, key, name=f"client-{key.public.hex()[:4]}", address="")
    assert len(alive(peers, 0.0)) == 3


def test_only_allowed_keys_are_taken():
    peers = known(allow=[ALPHA.public])
    assert member(peers)
    assert (
        f"key {BETA.public.hex()} of 'alpha' is not in swarm.allow" in peers.offer(data_of(BETA), 0.0).reason
    )
    assert not peers.allows(BETA.public)


def test_a_flood_of_self_made_keys_displaces_no_peer_and_takes_bounded_memory():
    peers = known(limit=8)
    member(peers)
    for number in range(100, 200):
        assert peers.offer(data_of(key_of(number), address=f"10.0.1.{number}:1"), 1.0).kind == "new"
    assert alive(peers, 1.0) == {"alpha"}
    assert len(peers.serials()) <= 2 * 8 + 1
    assert peers.offer(data_of(ALPHA, 2), 1.0).kind == "newer"
    confirmed = [member(peers, key_of(n), now=2.0, address=f"10.0.2.{n}:1") for n in range(200, 220)]
    assert sum(confirmed) == 7
    assert len(peers.live(2.0)) == 8


def test_the_own_card_counts_and_others_show_its_highest_serial():
    peers = known()
    assert (peers.own_card, peers.own_serial, peers.live(0.0)) == (b"", 0, {})
    peers.renew(data_of(OWN, 3, name="own"), 0.0)
    assert alive(peers, 1e6) == {"own"}
    for data in (data_of(OWN, 3, name="other"), data_of(OWN, 2), data_of(ALPHA, 4), data_of(OWN, 4, run="x")):
        with pytest.raises(ValueError, match="own card"):
            peers.renew(data, 1.0)
    assert peers.offer(data_of(OWN, 9, name="earlier"), 1.0).kind == "own"
    assert (peers.own_serial, peers.state) == (9, "")
    assert alive(peers, 1.0) == {"own"}
    peers.offer(data_of(OWN, 3, name="twin", address="10.0.0.7:1"), 1.0)
    assert "another process uses this peer's key" in peers.state
    assert "10.0.0.7:1" in peers.state


def test_serials_grow_over_restarts_with_a_clock_that_is_wrong(tmp_path):
    path = tmp_path / "serial"
    first = Serials(path, lambda: 1000.0)
    given = [first.next() for _ in range(5000)]
    assert given == sorted(set(given))
    assert given[0] > 1_000_000
    again = Serials(path, lambda: 0.0)
    assert again.next() > given[-1]
    assert again.next(above=10**15) == 10**15 + 1
    assert Serials(path, lambda: 0.0).next() > 10**15 + 1
    path.write_text("x")
    with pytest.raises(ValueError, match="does not contain a number: delete it"):
        Serials(path)


KEYS = [key_of(number) for number in (30, 31, 32)]
CARDS = {
    (k, serial, name): encoded_card(
        card_of(KEYS[k], serial, name=name, address=f"10.0.0.{k}:1"), KEYS[k].private
    )
    for k in range(3)
    for serial in (1, 2, 3)
    for name in ("same", "other")
}
EVENTS = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from(sorted(CARDS)), st.floats(0, 8)),
    st.tuples(st.just("confirm"), st.integers(0, 2), st.floats(0, 8)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_cards_and_confirmations_gives_what_a_plain_model_gives(events):
    """The model keeps all that has happened, and asks the definition at the end of each step."""
    peers, now = known(), 0.0
    best, confirmed, shut = {}, {}, set()
    for kind, what, step in events:
        now += step
        k = what[0] if kind == "offer" else what
        if k in best and now - best[k][2] >= 10.0:
            confirmed[k] = False
        if kind == "offer":
            peers.offer(CARDS[what], now)
            _, serial, name = what
            if k in best and serial == best[k][0] and name != best[k][1]:
                shut.add(k)
            elif k not in best or serial > best[k][0]:
                best[k] = (serial, name, now)
        else:
            peers.confirm(KEYS[what].public, now)
            confirmed[k] = confirmed.get(k) or (k in best and now - best[k][2] < 10.0)
        expected = {
            KEYS[k].public: best[k][0]
            for k in best
            if confirmed.get(k) and k not in shut and now - best[k][2] < 10.0
        }
        assert {key: card.serial for key, card in peers.live(now).items()} == expected
