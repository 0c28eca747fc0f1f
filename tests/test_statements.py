"""Tests statements of owners: form, signatures, what contradicts what, and the search for contradictions."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.statements import OWNER, statement, statement_of
from kit.swarm import RUN, card_of, data_of, key_of

from aedit.proto.rpc import contradict, parsed_statement, place_of, signed
from aedit.proto.rpc import statement as wire
from aedit.proto.rpc.statement import is_signed_statement
from aedit.proto.swarm import card, statements
from aedit.proto.swarm.statements import Statements, contradiction

OTHER = key_of(78)


# -- form and signature


def test_a_statement_travels_and_its_signature_is_plain_ed25519_over_purpose_and_message():
    data = statement(4)
    assert parsed_statement(data) == statement_of(4)
    assert is_signed_statement(data)
    Ed25519PublicKey.from_public_bytes(OWNER.public).verify(
        data[1:65], b"aedit statement of an anchor 1\n" + data[65:]
    )
    assert len(data) < 256


def test_two_statements_have_one_place_on_the_wire_if_they_are_about_the_same():
    changes = (
        {},
        {"term": 4},
        {"version": 8},
        {"unit": 300},
        {"part": 0},
        {"lineage": "f"},
        {"run": "other"},
    )
    made = [statement_of(value, **one) for one in changes for value in (0, 1)]
    for one in made:
        for other in made:
            same = place_of(signed(one, OWNER)) == place_of(signed(other, OWNER))
            assert same == (one.place == other.place)
    assert place_of(statement(0, key=OTHER)) != place_of(statement(0))


def test_every_changed_byte_is_refused():
    data = statement()
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        try:
            assert not is_signed_statement(changed)
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run": ""}, "run '' is not 1 to 64 letters"),
        ({"run": "a\nb"}, "run "),
        ({"part": 4096}, "part is 4096"),
        ({"lineage": ""}, "lineage ''"),
        ({"lineage": "\u00e9"}, "lineage"),
        ({"term": 0}, r"term is 0; it must be in \[1, "),
        ({"version": 0}, "version is 0"),
        ({"sha256": bytes(31)}, "sha256 has 31 bytes; expected 32"),
        ({"public_key": bytes(31)}, "public_key has 31 bytes"),
    ],
)
def test_values_out_of_bounds_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        signed(statement_of(**changes), OWNER)


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\x02" + bytes(64), statement()[:-1], statement() + b"\x50\x01", bytes(600)]
)
def test_what_is_no_statement_is_refused(data):
    with pytest.raises(ValueError, match=r"statement|expected|must|is not"):
        parsed_statement(data)


def test_a_signature_of_a_card_is_none_of_a_statement_and_the_other_way_round():
    assert card.VERSION != wire.VERSION
    body = statement()[65:]
    as_card = OWNER.private.sign(card.PURPOSE + body)
    assert not is_signed_statement(bytes([wire.VERSION]) + as_card + body)
    made = card_of(OWNER)
    as_statement = OWNER.private.sign(wire.PURPOSE + card._body(made))
    with pytest.raises(ValueError, match="not signed with its own key"):
        card.decoded_card(bytes([card.VERSION]) + as_statement + card._body(made))


# -- proofs


def test_two_values_of_one_version_are_a_proof():
    assert contradict(statement(1), statement(2)) == statement_of(1)
    found = contradiction(statement(1), statement(2))
    assert (found.run, found.public_key) == (RUN, OWNER.public)
    assert found.reason == "it has signed two values of version 7 of unit 5 (part 1, term 3)"


@pytest.mark.parametrize(
    "other",
    [
        statement(1),
        statement(2, term=4),
        statement(2, lineage="fedcba9876543210"),
        statement(2, version=8),
        statement(2, unit=6),
        statement(2, part=2),
        statement(2, run="another"),
        statement(2, key=OTHER),
        statement(2)[:1] + statement(1)[1:65] + statement(2)[65:],
        data_of(OWNER),
        b"",
    ],
    ids=["same", "term", "journal", "version", "unit", "part", "run", "key", "forged", "card", "nothing"],
)
def test_two_honest_statements_or_a_forged_one_prove_nothing(other):
    for pair in ((statement(1), other), (other, statement(1))):
        assert contradict(*pair) is None
        assert contradiction(*pair) is None


# -- the search


def test_what_the_own_node_received_is_compared_with_what_others_have():
    peer = Statements(RUN)
    assert peer.received([statement(1)]) == []
    assert peer.received_from(b"b", [statement(1), statement(2, version=8)]) == []
    assert peer.received_from(b"c", [statement(2)]) == [
        (statement(2), statement(1)),
        (statement(2), statement(1)),
    ]
    assert peer.received([statement(3, version=8)]) == [(statement(3, version=8), statement(2, version=8))]


def test_a_node_that_is_showntwo_values_itself_has_the_proof():
    assert Statements(RUN).received([statement(1), statement(2)]) == [(statement(2), statement(1))]


def test_statements_of_another_run_and_what_is_none_are_ignored():
    peer = Statements(RUN)
    peer.received([statement(1), statement(1, run="x"), b"garbage"])
    assert peer.unsent("h:1") == [statement(1)]
    assert peer.received_from(b"b", [statement(2, run="x"), b"", bytes(5000)]) == []


def test_a_forged_statement_accuses_nobody_and_hides_nothing():
    peer, forged = Statements(RUN), statement(2)[:1] + bytes(64) + statement(2)[65:]
    peer.received([statement(1)])
    assert peer.received_from(b"liar", [forged]) == []
    early = Statements(RUN)
    assert early.received_from(b"liar", [forged]) == []
    assert early.received([statement(1)]) == []
    assert early.received_from(b"c", [statement(2)]) == [(statement(2), statement(1))]


def test_a_forged_statement_costs_one_look_at_a_signature(monkeypatch):
    looked = []

    def counted(data):
        looked.append(data)
        return is_signed_statement(data)

    monkeypatch.setattr(statements, "is_signed_statement", counted)
    peer = Statements(RUN)
    many = [statement(1, version=v) for v in range(1, 100)]
    peer.received(many)
    peer.received_from(b"b", many)
    assert looked == []
    peer.received_from(b"liar", [data[:1] + bytes(64) + statement(2, version=1)[65:] for data in many])
    assert len(looked) == 1


def test_a_sender_displaces_only_what_it_has_sent_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(statements, "MOST_KEPT", 8)
    monkeypatch.setattr(statements, "MOST_SENDERS", 3)
    peer = Statements(RUN)
    peer.received([statement(1)])
    peer.received_from(b"b", [statement(1, version=8)])
    peer.received_from(b"liar", [statement(0, version=v, key=OTHER) for v in range(1, 50)])
    assert peer.received_from(b"c", [statement(2)]) != []
    assert peer.received_from(b"b", [statement(2, version=8)]) != []
    for number in range(20):
        peer.received_from(bytes([number]), [statement(1)])
    assert len(peer._of_peers) == 3
    assert all(len(one.kept) <= 8 for one in (peer._own, *peer._of_peers.values()))


def test_a_peer_is_sent_each_statement_once_and_of_many_the_newest(monkeypatch):
    monkeypatch.setattr(statements, "MOST_SENT", 3)
    peer = Statements(RUN)
    made = [statement(1, version=v) for v in range(1, 6)]
    peer.received(made)
    assert peer.unsent("a:1") == made[2:]
    peer.sent("a:1", made[2:])
    assert peer.unsent("a:1") == []
    assert peer.unsent("b:1") == made[2:]
    peer.received([*made, statement(1, version=6)])
    assert peer.unsent("a:1") == [statement(1, version=6)]


# -- an honest owner


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_an_honest_history_never_yields_a_proof(data):
    """Terms grow; a version that goes back does so in a higher term, or in another journal."""
    owners = [key_of(200 + n) for n in range(3)]
    term, version, values, shown = 1, 1, {1: 0}, []
    owner, lineage = owners[0], 0
    for step in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["merge", "elect", "refound", "lost"]))
        if kind == "merge":
            version += 1
            values[version] = step
        elif kind == "elect":  # a hand-over or a failover: the new owner may be the former one
            term, owner = term + data.draw(st.integers(1, 3)), data.draw(st.sampled_from(owners))
        elif kind == "lost":  # followers that lie about their disks: a version goes back, in a higher term
            term, owner = term + 1, data.draw(st.sampled_from(owners))
            version = max(1, version - 1)
            values[version] = 100 + step
        elif kind == "refound":  # the journal is lost: another one begins, under whatever term
            lineage, term, version, values = lineage + 1, 1, 1, {1: 200 + step % 50}
        place = {"key": owner, "term": term, "version": version, "lineage": f"{lineage:016x}"}
        shown.append(statement(values[version], **place))
    peer = Statements(RUN)
    found = (
        peer.received(shown[::2]) + peer.received_from(b"b", shown[1::2]) + peer.received_from(b"c", shown)
    )
    assert found == []
