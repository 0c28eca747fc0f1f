"""Tests gossip between peers in virtual time: who is believed, how news spread, partitions and floods."""

import math
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.swarm import Network, Peer, card_of, data_of, key_of

from aedit.proto.rpc import PROTOCOL, Refusal
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm import encoded_card
from aedit.proto.swarm.dialing import DialList, Evidence
from aedit.proto.swarm.exchange import MOST_CARDS, MOST_KNOWN

HOST = "10.0.0.1:7001"


def pair():
    """Return two peers that have their own cards and do not know each other."""
    peers = Peer(0), Peer(1)
    for peer in peers:
        peer.renew(0.0)
    return peers


def ask(caller, other, now=0.0, **changes):
    """Return a request, and the answer to it with these changes."""
    request = caller.exchanges.request(other.listens)
    reply = other.exchanges.answer(request, now)
    for name, value in changes.items():
        reply.ClearField(name)
        if isinstance(value, list):
            getattr(reply, name).extend(value)
        else:
            setattr(reply, name, value)
    return request, reply


def network(count, *, hints=1, **options):
    """Return peers of which each has got the addresses of `hints` others."""
    net = Network([Peer(number) for number in range(count)], **options)
    chance = random.Random(0)
    for peer in net.peers[1:]:
        for other in chance.sample(net.peers[: peer.number], min(hints, peer.number)):
            peer.exchanges.hint(other.listens, 0.0)
    return net


def complete(net, peers=None):
    peers = net.peers if peers is None else peers
    names = {f"p{peer.number}" for peer in peers}
    return lambda: all(peer.sees(net.now) == names for peer in peers)


# -- one call


def test_the_one_that_answers_counts_for_the_caller_and_the_caller_must_answer_in_turn():
    alpha, beta = pair()
    alpha.exchanges.take(beta.listens, *ask(alpha, beta), 0.0)
    assert alpha.sees(0.0) == {"p0", "p1"}
    assert beta.sees(0.0) == {"p1"}
    assert beta.exchanges.targets(0.0, 3, 8) == [alpha.listens]
    beta.exchanges.take(alpha.listens, *ask(beta, alpha), 0.0)
    assert beta.sees(0.0) == {"p0", "p1"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"signature": bytes(64)}, "has not signed our nonce with the key of 'p1'"),
        ({"signature": b""}, "has not signed our nonce"),
        ({"card": b"garbage"}, "its card is refused: the card has the version 103"),
        ({"card": data_of(key_of(9), run="other")}, "its card is refused: run is 'other'"),
        ({"card": data_of(key_of(9), name="q")}, "has not signed our nonce with the key of 'q'"),
        ({"protocol": 4}, "protocol is 4; this peer speaks"),
        ({"cards": [b""] * (MOST_CARDS + 1)}, "it sends 257 cards; at most 256"),
        ({"challenge": bytes(33)}, "its challenge has 33 bytes; expected 32"),
    ],
)
def test_an_answer_that_proves_nothing_is_refused_by_name(changes, named):
    alpha, beta = pair()
    with pytest.raises(ValueError, match=named):
        alpha.exchanges.take(beta.listens, *ask(alpha, beta, **changes), 0.0)
    assert alpha.sees(0.0) == {"p0"}


def test_an_answer_to_another_call_or_another_caller_is_refused():
    alpha, beta = pair()
    other = Peer(2)
    other.renew(0.0)
    _, earlier = ask(alpha, beta)
    _, for_other = ask(other, beta)
    for reply in (earlier, for_other):
        with pytest.raises(ValueError, match="has not signed our nonce"):
            alpha.exchanges.take(beta.listens, alpha.exchanges.request(beta.listens), reply, 0.0)


def test_a_peer_counts_only_after_an_answer_at_the_address_on_its_card():
    alpha, beta = pair()
    alpha.exchanges.take("relay:1", *ask(alpha, beta), 0.0)
    assert alpha.sees(0.0) == {"p0"}
    assert alpha.exchanges.targets(0.0, 3, 8) == [beta.listens]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nonce": bytes(31)}, "nonce has 31 bytes; expected 32"),
        ({"protocol": 4}, "protocol is 4; this peer speaks"),
        ({"known": [pb.KnownCard()] * (MOST_KNOWN + 1)}, "known has 2049 entries; at most 2048"),
        ({"card": b"\x01garbage"}, "your card is refused: "),
        ({"card": data_of(key_of(9), run="other")}, "your card is refused: run is 'other'"),
    ],
)
def test_a_request_that_is_none_is_refused_by_name(changes, named):
    alpha, beta = pair()
    request = alpha.exchanges.request(beta.listens)
    for name, value in changes.items():
        request.ClearField(name)
        getattr(request, name).extend(value) if isinstance(value, list) else setattr(request, name, value)
    with pytest.raises((ValueError, Refusal), match=named):
        beta.exchanges.answer(request, 0.0)


def test_a_peer_without_a_card_yet_asks_to_be_called_later():
    alpha, beta = Peer(0), Peer(1)
    alpha.renew(0.0)
    with pytest.raises(Refusal, match="this peer is starting"):
        beta.exchanges.answer(alpha.exchanges.request(beta.listens), 0.0)


def test_a_client_counts_once_it_has_signed_a_challenge_and_a_copied_proof_is_worth_nothing():
    client, beta, thief = Peer(0, client=True), Peer(1), Peer(2, client=True)
    for peer in (client, beta, thief):
        peer.renew(0.0)
    client.exchanges.take(beta.listens, *ask(client, beta), 0.0)
    assert beta.sees(0.0) == {"p1"}
    request = client.exchanges.request(beta.listens)
    stolen = thief.exchanges.request(beta.listens)
    stolen.proof = request.proof
    beta.exchanges.answer(stolen, 0.0)
    assert beta.sees(0.0) == {"p1"}
    beta.exchanges.answer(request, 0.0)
    assert beta.sees(0.0) == {"p0", "p1"}
    assert beta.sees(10.0) == {"p1"}
    client.renew(700.0)
    old = client.exchanges.request(beta.listens)
    beta.exchanges.answer(old, 700.0)  # its challenge is too old by now
    assert beta.sees(700.0) == {"p1"}


def test_a_peer_with_a_lower_serial_than_before_is_told_and_comes_back():
    net = network(3)
    net.rounds_until(complete(net), 10)
    before = net.peers[2]
    before.serial = 1000
    before.renew(net.now)
    net.round()
    after = Peer(2)
    after.exchanges.hint(net.peers[0].listens, net.now)
    net.peers[2] = net.by_address[before.listens] = after
    for _ in range(4):
        net.round()
    assert after.known.own_serial > 1000 > after.serial
    after.serial = after.known.own_serial  # as Serials.next(above=...)
    net.rounds_until(complete(net), 15)


def test_two_addresses_of_oneself_are_not_called_again():
    (alpha, _) = pair()
    alpha.exchanges.hint("localhost:7001", 0.0)
    assert alpha.exchanges.targets(0.0, 3, 8) == ["localhost:7001"]
    alpha.exchanges.take("localhost:7001", *ask(alpha, alpha), 0.0)
    assert alpha.exchanges.targets(100.0, 3, 8) == []


def test_a_card_of_discovery_is_a_hint_and_not_a_member():
    alpha, beta = pair()
    alpha.exchanges.hint(beta.known.own_card, 0.0)
    alpha.exchanges.hint(b"garbage", 0.0)
    alpha.exchanges.hint("no address", 0.0)
    assert alpha.sees(0.0) == {"p0"}
    assert alpha.exchanges.targets(0.0, 3, 8) == [beta.listens]


# -- many peers


@pytest.mark.parametrize("count", [12, 32])
def test_all_peers_know_each_other_soon_though_each_knew_one(count):
    net = network(count)
    # Each peer has to call each other one: 8 new and 3 known ones in a round.
    rounds = net.rounds_until(complete(net), 12 + count // 4)
    assert rounds >= (count - 1) / 11
    before = sum(peer.calls for peer in net.peers)
    for _ in range(6):
        net.round()
        assert complete(net)()
    assert (sum(peer.calls for peer in net.peers) - before) / 6 / count <= 3.5


def test_every_live_peer_is_called_once_before_one_is_called_again():
    net = network(10)
    net.rounds_until(complete(net), 30)
    peer = net.peers[4]
    peer.exchanges._deck.clear()
    for _ in range(4):
        passed = [peer.exchanges.targets(net.now, 3, 0) for _ in range(3)]
        assert sorted(address for called in passed for address in called) == sorted(
            p.listens for p in net.peers if p is not peer
        )


def test_a_killed_peer_is_gone_for_all_after_its_lease_and_no_replay_keeps_it():
    net = network(24)
    net.rounds_until(complete(net), 30)
    gone = net.peers[5]
    last = gone.known.own_card
    net.down.add(gone)
    rest = [peer for peer in net.peers if peer is not gone]

    def replayed():
        for peer in rest:
            peer.exchanges.hint(last, net.now)
        return complete(net, rest)()

    assert net.rounds_until(replayed, 20) <= 14  # the lease, and the rounds that its last card needs
    net.down.clear()
    net.rounds_until(complete(net), 90)  # pauses between calls to a dead address grow to a minute


def test_a_peer_that_leaves_is_not_called_any_more_until_it_comes_back():
    """Found: 58 peers called each of six that had left every 4 s, and tried until the deadline."""
    net = network(6)
    net.rounds_until(complete(net), 30)
    gone, rest = net.peers[3], [peer for peer in net.peers if peer.number != 3]
    gone.serial += 1
    leaving = card_of(gone.key, gone.serial, name="p3", address=gone.card_address, lease_s=10.0, leaving=True)
    gone.known.renew(encoded_card(leaving, gone.key.private), net.now)
    for peer in rest:
        net.call(peer, gone.listens)
    net.down.add(gone)
    for _ in range(40):
        for peer in rest:
            assert gone.listens not in peer.exchanges.targets(net.now, 5, 8)
        net.round()
    assert complete(net, rest)()
    net.down.clear()
    net.rounds_until(complete(net), 5)


def test_a_strangers_card_that_leaves_from_the_address_of_another_peer_changes_nothing():
    net = network(2)
    net.rounds_until(complete(net), 10)
    first, second = net.peers
    net.down.add(second)
    for _ in range(15):  # the lease of the second one passes
        net.round()
    stranger = data_of(key_of(77), 1, address=second.listens, leaving=True)
    first.exchanges.hint(stranger, net.now)
    called = {address for n in range(90) for address in first.exchanges.targets(net.now + n, 3, 8)}
    assert second.listens in called
    net.now += 90
    liar = Peer(98)
    lie = card_of(liar.key, 1, name="p98", address=second.listens, leaving=True)
    liar.known.renew(encoded_card(lie, liar.key.private), net.now)
    request, reply = ask(first, liar, net.now)
    first.exchanges.take(liar.listens, request, reply, net.now)
    called = {address for n in range(90) for address in first.exchanges.targets(net.now + n, 3, 8)}
    assert second.listens in called


def test_after_a_partition_both_halves_know_their_own_and_find_each_other_again():
    net = network(9)
    net.rounds_until(complete(net), 30)
    left, right = net.peers[:3], net.peers[3:]
    net.cut = dict.fromkeys(left, "left")
    for half in (left, right):
        net.rounds_until(complete(net, half), 20)
    for _ in range(30):
        net.round()
    assert complete(net, left)()
    assert complete(net, right)()
    net.cut = {}
    net.rounds_until(complete(net), 75)


def test_peers_that_restart_at_once_find_each_other_by_the_addresses_they_kept():
    net = Network([Peer(number) for number in range(6)])
    for peer in net.peers:
        for other in net.peers:
            peer.exchanges.remember(other.listens, 0.0)
    net.rounds_until(complete(net), 5)


def test_a_thousand_peers_in_the_records_of_discovery_that_are_not_there_cost_a_bounded_number_of_calls():
    """A newcomer among them is found, and those who know each other lose nobody."""
    net = network(8)
    net.rounds_until(complete(net), 20)
    sybils = [
        data_of(key_of(5000 + n), name="sybil", address=f"10.9.{n >> 8}.{n & 255}:7001") for n in range(1000)
    ]
    late = Peer(8)
    net.peers.append(late)
    net.by_address[late.listens] = late
    late.exchanges.hint(net.peers[0].listens, net.now)
    calls = [peer.calls for peer in net.peers]
    for _ in range(30):
        for peer in net.peers[:3]:
            for data in sybils[:: 10 if net.rounds % 10 else 1]:
                peer.exchanges.hint(data, net.now)
        net.round()
        assert all(len(peer.sees(net.now)) >= 8 for peer in net.peers[:8])
    assert complete(net)()
    assert all(peer.calls - before <= 30 * 11 for peer, before in zip(net.peers, calls, strict=True))


def test_a_peer_that_shows_two_cards_of_one_serial_is_shut_out_by_all():
    net = network(12)
    net.rounds_until(complete(net), 30)
    liar = net.peers[3]
    twin = card_of(liar.key, liar.serial, name="p3", address="10.6.6.6:1")
    net.peers[0].exchanges.hint(encoded_card(twin, liar.key.private), net.now)
    liar.renew_every = 10**9
    rest = [peer for peer in net.peers if peer is not liar]
    assert net.rounds_until(complete(net, rest), 10) <= 8
    assert all(liar.key.public in peer.known.faults for peer in rest)


def test_news_spread_over_a_thousand_peers_in_rounds_that_grow_with_the_logarithm():
    """Every peer pulls from three others in a round; pull gossip needs about log_4(n) + log log n rounds.

    A. Demers and others, "Epidemic algorithms for replicated database maintenance", 1987. The independent
    simulation draws callees at random and counts rounds in plain integers.
    """
    count, chance = 1000, random.Random(1)

    def simulated():
        knows, rounds = {0}, 0
        while len(knows) < count:
            knows |= {n for n in range(count) if any(chance.randrange(count) in knows for _ in range(3))}
            rounds += 1
        return rounds

    typical = max(simulated() for _ in range(5))
    peers = [Peer(n, lease_s=300.0, limit=4) for n in range(count)]
    subject = peers[0]
    for peer in peers:
        peer.renew(0.0)
        peer.known.offer(subject.known.own_card, 0.0)
        peer.known.confirm(subject.key.public, 0.0)
    subject.renew(1.0)
    heard, rounds = {0}, 0
    while len(heard) < count:
        called = [(n, chance.choices(range(count), k=3)) for n in range(count) if n not in heard]
        # Only those who have heard can tell, so that other calls need not be made.
        for n, source in [(n, peers[other]) for n, others in called for other in others if other in heard]:
            peers[n].exchanges.take(source.listens, *ask(peers[n], source, 1.0), 1.0)
        heard |= {n for n, _ in called if peers[n].known.live(1.0)[subject.key.public].serial == 2}
        rounds += 1
    assert rounds <= typical + 3 <= math.log(count, 2) + 5


# -- the list of addresses


def test_addresses_that_have_answered_are_displaced_by_no_number_of_hints():
    dials = DialList(10, random.Random(0))
    for n in range(10):
        dials.add(f"10.0.0.{n}:1", Evidence.HINT, 0.0)
    for n in range(4):
        dials.answered(f"10.1.0.{n}:1", 0.0)
    for n in range(1000):
        dials.add(f"10.2.{n >> 8}.{n & 255}:1", Evidence.CALLED, 0.0)
    assert len(dials) == 10
    dials.add("10.3.0.1:1", Evidence.ANSWERED, 0.0)  # in place of one that has not answered
    for n in range(10):
        dials.add(f"10.4.0.{n}:1", Evidence.ANSWERED, 0.0)
        dials.add(f"10.5.0.{n}:1", Evidence.HINT, 0.0)
    assert len(dials) == 10
    assert {a for a in dials.due(0.5, 10) if a.startswith("10.5")} == set()
    assert {a for a in dials.due(100.0, 10) if a.startswith("10.1")} == {f"10.1.0.{n}:1" for n in range(4)}


def test_a_dead_address_is_called_less_and_less_often_and_a_mere_hint_is_forgotten():
    dials = DialList(10, random.Random(0))
    dials.add(HOST, Evidence.HINT, 0.0)
    dials.answered("10.0.0.2:1", 0.0)
    times = {HOST: [], "10.0.0.2:1": []}
    for now in range(600):
        for address in dials.due(float(now), 8):
            times[address].append(now)
            dials.failed(address)
    assert len(times[HOST]) == 8
    assert 25 <= len(times["10.0.0.2:1"]) <= 45, "20 times in the first minute or so, then once a minute"
    assert max(b - a for a, b in zip(times["10.0.0.2:1"], times["10.0.0.2:1"][1:], strict=False)) <= 61
    assert len(dials) == 1


# -- garbage

BYTES = st.binary(max_size=80)
NUMBERS = st.integers(0, 2**64 - 1)
REQUESTS = st.builds(
    pb.ExchangeRequest,
    protocol=st.sampled_from([PROTOCOL, 0, 2**32 - 1]),
    nonce=st.one_of(st.binary(min_size=32, max_size=32), BYTES),
    card=st.one_of(
        BYTES, st.sampled_from([data_of(key_of(40)), data_of(key_of(2), 9), data_of(key_of(1), 9)])
    ),
    known=st.lists(st.builds(pb.KnownCard, key=BYTES, serial=NUMBERS), max_size=4),
    proof=BYTES,
)
CARDS = st.lists(st.one_of(BYTES, st.just(data_of(key_of(41)))), max_size=4)
REPLIES = st.builds(
    pb.ExchangeReply,
    protocol=st.sampled_from([PROTOCOL, 0]),
    card=st.one_of(
        BYTES, st.sampled_from([data_of(key_of(40)), data_of(key_of(2), 9), data_of(key_of(1), 9)])
    ),
    signature=st.one_of(BYTES, st.binary(min_size=64, max_size=64)),
    cards=CARDS,
    challenge=BYTES,
    contradictions=st.lists(st.builds(pb.Contradiction, one=BYTES, other=BYTES), max_size=2),
)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, REPLIES)
def test_no_request_and_no_reply_makes_a_stranger_a_member_or_raises_anything_else(request, reply):
    alpha, beta = pair()
    with suppress(ValueError, Refusal):
        answer = beta.exchanges.answer(request, 0.0)
        assert answer.card == beta.known.own_card
    with pytest.raises(ValueError, match=r"."):
        alpha.exchanges.take(beta.listens, alpha.exchanges.request(beta.listens), reply, 0.0)
    assert (alpha.sees(0.0), beta.sees(0.0)) == ({"p0"}, {"p1"})
