"""Tests proofs against owners: how they spread and last, what they stop, and that no false one counts."""

import json

import pytest
from kit.statements import OWNER, statement
from kit.swarm import RUN, Network, Peer, card_of, data_of, key_of, replica

from aedit.async_sgd.service import Signer
from aedit.launch.cli.main import main
from aedit.launch.swarm import part_view
from aedit.proto.rpc import parsed_statement
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm import KnownPeers, PartPlaces, Proofs, ReplicasFile, encoded_card, read_proof
from aedit.proto.swarm.exchange import MOST_SENT
from aedit.proto.swarm.statements import contradiction, proof_text

LIAR = key_of(1)  # that of peer 0 of a network
TRUE, FALSE = statement(1, key=LIAR), statement(2, key=LIAR)


def network(count, clients=()):
    """Return a network in which everybody knows everybody."""
    net = Network([Peer(number, client=number in clients) for number in range(count)])
    for peer in net.peers:
        for other in net.peers:
            if other is not peer:
                peer.exchanges.hint(other.listens, 0.0)
    for _ in range(6):
        net.round()
    return net


def accused(net):
    return [peer.number for peer in net.peers if LIAR.public in peer.known.faults]


# -- how they spread


def test_two_nodes_with_different_anchors_find_out_and_everybody_shuts_the_owner_out():
    net = network(5)
    net.peers[2].exchanges.received([TRUE], net.now)
    net.peers[4].exchanges.received([FALSE], net.now)
    net.rounds_until(lambda: accused(net) == [1, 2, 3, 4], 12)
    net.rounds_until(lambda: all("p0" not in peer.sees(net.now) for peer in net.peers[1:]), 12)
    assert all(peer.sees(net.now) >= {"p1", "p2", "p3", "p4"} for peer in net.peers[1:])
    assert "others have proof against this peer's key" in net.peers[0].known.state


def test_clients_that_cannot_call_each_other_are_compared_by_others():
    net = network(4, clients=(2, 3))
    net.peers[2].exchanges.received([TRUE], net.now)
    net.peers[3].exchanges.received([FALSE], net.now)
    net.rounds_until(lambda: accused(net) == [1, 2, 3], 12)


def test_equal_statements_and_those_of_other_terms_and_keys_accuse_nobody():
    net = network(5)
    for peer in net.peers:
        mine = [TRUE, statement(peer.number, key=peer.key), statement(9, key=LIAR, term=4 + peer.number)]
        peer.exchanges.received(mine, net.now)
    for _ in range(10):
        net.round()
    assert all(dict(peer.known.faults) == {} for peer in net.peers)


def test_statements_count_only_from_a_caller_that_has_shown_its_key():
    net = network(3)
    one, other = net.peers[1:]
    one.exchanges.received([TRUE], net.now)
    request = other.exchanges.request(one.listens)
    request.statements.append(FALSE)
    request.proof = bytes(64)
    one.exchanges.answer(request, net.now)
    assert accused(net) == []
    request = other.exchanges.request(one.listens)
    request.statements.append(FALSE)
    one.exchanges.answer(request, net.now)
    assert accused(net) == [1]


def test_more_statements_than_one_call_may_have_are_refused():
    net = network(2)
    request = net.peers[0].exchanges.request(net.peers[1].listens)
    request.statements.extend([TRUE] * (MOST_SENT + 1))
    with pytest.raises(ValueError, match="statements has 129 entries; at most 128 are allowed"):
        net.peers[1].exchanges.answer(request, net.now)


FORGED = FALSE[:1] + bytes(64) + FALSE[65:]


@pytest.mark.parametrize(
    "pair",
    [(TRUE, TRUE), (TRUE, FORGED), (FORGED, TRUE), (TRUE, statement(2)), (TRUE, b""), (b"\x02", b"\x02")],
    ids=["one", "forged", "forged first", "of another key", "half", "nothing"],
)
def test_a_false_proof_is_refused_whoever_shows_it(pair):
    net = network(3)
    reply = net.peers[2].exchanges.answer(
        request := net.peers[1].exchanges.request(net.peers[2].listens), 6.0
    )
    reply.contradictions.append(pb.Contradiction(one=pair[0], other=pair[1]))
    net.peers[1].exchanges.take(net.peers[2].listens, request, reply, 6.0)
    assert accused(net) == []
    assert "p0" in net.peers[1].sees(6.0)


def test_a_proof_of_another_run_does_not_count():
    peers = KnownPeers(RUN, OWNER.public)
    peers.offer(data_of(LIAR), 0.0)
    other = [statement(value, key=LIAR, run="other") for value in (1, 2)]
    assert contradiction(*other) is not None
    assert not peers.contradict(*other, 0.0)
    assert peers.contradict(TRUE, FALSE, 0.0)
    assert not peers.allows(LIAR.public)


# -- how they last


def test_a_proof_is_kept_on_disk_once_and_counts_after_a_restart(tmp_path):
    peers = KnownPeers(RUN, OWNER.public)
    peers.offer(data_of(LIAR, 1, name="mallory"), 0.0)
    assert peers.contradict(TRUE, FALSE, 0.0)
    proofs = Proofs(tmp_path / "proofs")
    proofs.keep(peers.faults)
    (path,) = (tmp_path / "proofs").glob("*.json")
    assert "'mallory': it has signed two values of version 7" in json.loads(path.read_text())["reason"]
    path.touch(mode=0o600)
    before = path.stat().st_mtime_ns
    proofs.keep(peers.faults)
    assert path.stat().st_mtime_ns == before

    again = KnownPeers(RUN, OWNER.public)
    for found in Proofs(tmp_path / "proofs").load():
        again.shut_out(found)
    assert again.offer(data_of(LIAR, 9), 0.0).kind == "refused"
    assert not again.allows(LIAR.public)


def test_files_that_prove_nothing_are_left_out(tmp_path, caplog):
    proofs = tmp_path / "proofs"
    proofs.mkdir()
    true = proof_text(contradiction(TRUE, FALSE))
    told = json.loads(true)
    for name, text in {
        "a": "",
        "b": "[]",
        "c": json.dumps(told | {"other": told["one"]}),
        "d": json.dumps(told | {"one": "zz"}),
        "e": json.dumps(told | {"other": FORGED.hex()}),
        "f": true,
    }.items():
        (proofs / f"{name}.json").write_text(text)
    assert [found.public_key for found in Proofs(proofs).load()] == [LIAR.public]
    assert len(caplog.messages) == 5


def test_two_cards_are_no_lasting_proof(tmp_path):
    peers = KnownPeers(RUN, OWNER.public)
    peers.offer(data_of(LIAR, 1), 0.0)
    peers.offer(data_of(LIAR, 1, name="twin"), 0.0)
    assert LIAR.public in peers.faults
    Proofs(tmp_path / "proofs").keep(peers.faults)
    assert not (tmp_path / "proofs").exists()


def test_anybody_can_check_a_proof_with_a_command(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(proof_text(contradiction(TRUE, FALSE)))
    assert main(["audit", str(path)]) == 1
    said = capsys.readouterr().out
    assert LIAR.public.hex() in said
    assert all(parsed_statement(data).sha256.hex() in said for data in (TRUE, FALSE))
    path.write_text(path.read_text().replace(FALSE.hex(), TRUE.hex()))
    assert main(["audit", str(path)]) == 2
    assert "not two signed values of one version" in capsys.readouterr().err


def test_two_cards_in_a_file_are_no_proof_against_an_owner(tmp_path, capsys):
    path = tmp_path / "x.json"
    cards = [encoded_card(card_of(LIAR, 1, name=name), LIAR.private).hex() for name in ("a", "b")]
    path.write_text(json.dumps({"one": cards[0], "other": cards[1]}))
    assert read_proof(path).statement is None
    assert main(["audit", str(path)]) == 2
    assert "two processes with one key" in capsys.readouterr().err


# -- what they stop


def test_a_peer_that_is_shut_out_is_not_ranked_and_owns_and_keeps_nothing():
    peers = KnownPeers(RUN, OWNER.public)
    for key, number in ((LIAR, 1), (key_of(2), 2)):
        parts = {0: replica(f"10.0.0.{number}:7100", leads=number == 1)}
        peers.offer(data_of(key, address=f"10.0.0.{number}:7001", parts=parts), 0.0)
        assert peers.confirm(key.public, 0.0)
    assert part_view(RUN, 0, peers.live(0.0)).owner == LIAR.public
    peers.contradict(TRUE, FALSE, 0.0)
    view = part_view(RUN, 0, peers.live(0.0))
    assert (view.ranked, view.owner, set(view.replicas)) == ((key_of(2).public,), None, {key_of(2).public})


A, B = "aa" * 32, "bb" * 32


def test_an_address_is_shut_out_with_all_keys_that_named_it_and_not_with_one_of_them(tmp_path):
    file, reads = (ReplicasFile(tmp_path / "replicas.json") for _ in range(2))
    file.write([PartPlaces(("x:1", "x:1", "y:1"), "x:1", keys=(A, B, A))])
    assert set(reads.keys_of("x:1")) == {A, B}
    assert set(reads.keys_of("y:1")) == {A}
    file.write([PartPlaces(("x:1",), "x:1", keys=(B,))], [A])
    assert set(reads.keys_of("x:1")) == {B}
    assert set(reads.keys_of("y:1")) == set()
    assert not reads.is_shut_out("x:1"), "a liar that names the address of another peer takes only itself out"
    assert reads.is_shut_out("y:1"), "a liar that names its own address no more stays out"
    assert not reads.is_shut_out("z:1")
    file.write([PartPlaces()], [A, B])
    assert reads.is_shut_out("x:1")


# -- what is signed


def test_a_version_is_signed_once_and_never_with_another_value(monkeypatch):
    signer, digests = Signer(LIAR, RUN, 2), [bytes([n]) * 32 for n in range(2)]
    first = signer.statement("0" * 16, 1, 5, 7, digests[0])
    assert signer.statement("0" * 16, 1, 5, 7, digests[0]) is first
    found = parsed_statement(first)
    assert (found.run, found.part, found.term, found.unit, found.version) == (RUN, 2, 1, 5, 7)
    with pytest.raises(ValueError, match="version 7 of unit 5"):
        signer.statement("0" * 16, 1, 5, 7, digests[1])
    for place in (("1" * 16, 1, 5, 7), ("0" * 16, 2, 5, 7), ("0" * 16, 1, 6, 7), ("0" * 16, 1, 5, 8)):
        assert parsed_statement(signer.statement(*place, digests[1])).sha256 == digests[1]
    for version in range(100, 200):
        signer.statement("0" * 16, 1, 5, version, digests[0])
    assert len(signer._made[5]) == 16
