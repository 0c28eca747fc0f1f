"""Tests who may call what at a hub: roles, names and terms, over real gRPC on loopback."""

import threading
from contextlib import suppress
from itertools import islice

import grpc
import pytest
from kit.hub_processes import HubRefused, HubUnreachable, confirmation, until
from kit.leading_hub import keys_of, leading_hub

from aedit.launch.cli.keys import certificate_in, make_keys, revoke
from aedit.proto.rpc import HubClient, NoNews, channel, client_keys
from aedit.proto.rpc import hub_pb2 as pb

STANDBY = 'standby = "127.0.0.1:1"'
FAR_TERM = 10**9


def refusal(call):
    with pytest.raises(HubRefused) as caught:
        call()
    return caught.value


def code(call):
    return refusal(call).code.name


def first_chunk(client):
    for chunk in client.tail(pb.TailRequest(segment=1)):
        if chunk.data:
            return chunk.data


class Stream(threading.Thread):
    """Reader of the journal, for as long as it may."""

    def __init__(self, client):
        super().__init__(daemon=True)
        self.client, self.num_chunks = client, 0
        self.start()

    def run(self):
        with suppress(HubRefused, HubUnreachable):
            for _ in self.client.tail(pb.TailRequest(segment=1)):
                self.num_chunks += 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return a folder with keys of every role."""
    return keys_of(
        tmp_path_factory.mktemp("roles"),
        ["alice", "bob"],
        servers={"spare": ["127.0.0.1"]},
        standbys={"second": ["127.0.0.1"]},
        readers=["eve"],
    )


# -- replication


@pytest.mark.parametrize("certificates", ["true", "false"])
def test_only_a_hub_or_standby_reads_the_journal_and_confirms_it(tmp_path, keys, certificates):
    with leading_hub(tmp_path, f"{STANDBY}\ncertificates = {certificates}", keys) as hub:
        hub.node("alice", "alice").found()
        for name in ("alice", "spare", "eve"):
            told = refusal(lambda name=name: first_chunk(hub.client(name)))
            assert told.code is grpc.StatusCode.PERMISSION_DENIED
            assert "roles hub, standby" in str(told)
            assert (
                code(lambda name=name: hub.client(name).confirm(pb.ConfirmRequest())) == "PERMISSION_DENIED"
            )
        assert not hub.followers
        for name in ("hub", "second"):
            assert first_chunk(hub.client(name))
            hub.client(name).confirm(confirmation())
        assert hub.followers


def test_the_token_that_all_nodes_share_does_not_replicate(tmp_path):
    with leading_hub(tmp_path, STANDBY, keys_of(tmp_path)) as hub:
        hub.node("a", "nodes").found()
        assert code(lambda: first_chunk(hub.client("nodes"))) == "PERMISSION_DENIED"
        assert code(lambda: hub.client("nodes").confirm(pb.ConfirmRequest())) == "PERMISSION_DENIED"
        assert first_chunk(hub.client("hub"))


def test_more_than_the_journal_has_cannot_be_confirmed(tmp_path):
    with leading_hub(tmp_path, STANDBY) as hub:
        node = hub.node().found()
        told = refusal(lambda: hub.client().confirm(pb.ConfirmRequest(segment=1, offset=2**40)))
        assert "is the newest" in str(told)
        assert not hub.followers
        assert node.push(0).accepted


def test_a_standby_that_waits_for_news_holds_no_thread_of_the_hub(tmp_path):
    """Found: one thread per standby looked for news all the time."""
    with leading_hub(tmp_path, STANDBY) as hub:
        hub.node().found()
        stream = hub.leading.driver.tail(pb.TailRequest(term=1, segment=1))
        assert any(isinstance(one, NoNews) for one in islice(stream, 5)), (
            "all that there is, a sign of life, then nothing for now"
        )
        tails = [hub.client().tail(pb.TailRequest(term=1, segment=1)) for _ in range(6)]
        assert all(next(tail).data for tail in tails)
        assert hub.node("other").join().node == 1
        for tail in tails:  # what is new since
            assert next(chunk for chunk in tail if chunk.data).offset > 0


def test_the_journal_has_no_secret_of_any_node(tmp_path):
    with leading_hub(tmp_path, STANDBY) as hub:
        node = hub.node()
        node.who.session = 0
        reply = node.join()
        hub.leading.ledger.snapshot()
        kept = b"".join(path.read_bytes() for path in (tmp_path / "hub").iterdir() if path.is_file())
        text = kept.decode("latin-1")
        assert str(reply.session) not in text
        assert reply.session.to_bytes(8, "little") not in kept
        assert node.secret not in kept
        assert node.secret.hex() not in text
        assert node.heartbeat().term == 1


# -- names


def test_a_node_has_the_name_of_its_keys(tmp_path, keys):
    with leading_hub(tmp_path, "certificates = true", keys) as hub:
        hub.node("alice", "alice").found()
        told = refusal(hub.node("alice", "bob").join)
        assert told.code is grpc.StatusCode.PERMISSION_DENIED
        assert "for 'bob'" in str(told)
        hub.node("bob", "bob").join()
        for name in ("spare", "eve", "second"):
            assert code(hub.node(name, name).join) == "PERMISSION_DENIED"
        assert [node["name"] for node in hub.node("x", "eve").status()["nodes"]] == ["alice", "bob"]


def test_a_token_of_its_own_fixes_the_name_without_certificates(tmp_path, keys):
    with leading_hub(tmp_path, "", keys) as hub:
        assert code(hub.node("alice", "bob").join) == "PERMISSION_DENIED"
        hub.node("bob", "bob").found()


def test_the_token_of_one_and_the_certificate_of_another_are_not_enough(tmp_path, keys):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, source in (("ca.crt", "bob"), ("node.key", "bob"), ("node.crt", "bob"), ("token", "alice")):
        (mixed / name).write_bytes((keys / source / name).read_bytes())
    with leading_hub(tmp_path, "certificates = true", keys) as hub:
        node = hub.node("alice", "alice")
        node.hub = HubClient(hub.address, client_keys(mixed), call_timeout_s=5.0)
        told = refusal(node.join)
        assert told.code is grpc.StatusCode.UNAUTHENTICATED
        assert "files of one folder" in str(told)


def test_a_reader_looks_and_copies_and_no_more(tmp_path, keys):
    with leading_hub(tmp_path, "", keys) as hub:
        node = hub.node("alice", "alice").found()
        reader = hub.node("eve", "eve")
        assert [node["name"] for node in reader.status()["nodes"]] == ["alice"]
        assert (reader.anchor(0)[1] == node.anchor(0)[1]).all()
        reader.who = node.who  # even with the session of a member
        reader.seqs, reader.versions = list(node.seqs), list(node.versions)
        for call in (reader.join, reader.heartbeat, reader.leave, lambda: reader.push(0)):
            assert code(call) == "PERMISSION_DENIED"


# -- revoking


def test_revoked_keys_are_refused_at_once_and_new_ones_under_the_name_are_taken(tmp_path):
    keys = keys_of(tmp_path, ["alice", "bob"])
    with leading_hub(tmp_path, "certificates = true", keys) as hub:
        alice, bob = hub.node("alice", "alice").found(), hub.node("bob", "bob")
        bob.join()
        alice.heartbeat()
        said = revoke(keys, ["alice"])
        assert str(keys / "hub" / "revoked") in said
        told = refusal(alice.heartbeat)
        assert told.code is grpc.StatusCode.UNAUTHENTICATED
        assert "revoked" in str(told)
        assert bob.heartbeat().nodes == 2
        make_keys(keys, ["127.0.0.1"], ["alice", "bob"])
        again = hub.node("alice", "alice")
        again.join()
        assert again.heartbeat().nodes == 2
        assert code(alice.heartbeat) == "UNAUTHENTICATED"


def test_the_stream_of_a_standby_ends_when_its_keys_are_revoked(tmp_path):
    keys = keys_of(tmp_path, ["alice"], standbys={"second": ["127.0.0.1"], "third": ["127.0.0.1"]})
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        hub.node("alice", "alice").found()
        again, streams = (
            hub.client("second"),
            {name: Stream(hub.client(name)) for name in ("second", "third")},
        )
        until(lambda: all(stream.num_chunks for stream in streams.values()), "the journal")
        revoke(keys, ["second"])
        until(lambda: not streams["second"].is_alive(), "the end of the stream")
        assert streams["third"].is_alive()
        assert code(lambda: first_chunk(again)) == "UNAUTHENTICATED"


# -- certificates that expire


def test_an_open_connection_ends_with_its_certificate(tmp_path, monkeypatch):
    """As found: a node whose connection was open when its certificate expired went on pushing."""
    keys = keys_of(tmp_path, ["alice"], standbys={"second": ["127.0.0.1"]})
    with leading_hub(tmp_path, f"{STANDBY}\ncertificates = true", keys) as hub:
        alice, stream = hub.node("alice", "alice").found(), Stream(hub.client("second"))
        until(lambda: stream.num_chunks, "the journal")
        held, slow = threading.Event(), []

        def push_slowly():
            """Send a push that never ends."""
            with channel(hub.address, client_keys(keys / "alice")) as line:
                call = line.stream_unary("/aedit.v1.Exchange/Push")
                try:
                    call(iter(lambda: held.wait(60) and None, None), timeout=60)
                except grpc.RpcError as error:
                    slow.append(error.code())

        pushing = threading.Thread(target=push_slowly, daemon=True)
        pushing.start()
        until(lambda: hub.process._server._uploads._held, "the slow push")
        ends_s = certificate_in(keys / "alice" / "node.crt").not_valid_after_utc.timestamp()
        monkeypatch.setattr("aedit.proto.rpc.server.wall_s", lambda: ends_s - 1.0)
        alice.heartbeat()
        monkeypatch.setattr("aedit.proto.rpc.server.wall_s", lambda: ends_s + 60.0)
        for call in (lambda: alice.push(0), alice.heartbeat, alice.join):
            told = refusal(call)
            assert told.code is grpc.StatusCode.UNAUTHENTICATED
            assert "the certificate of 'alice' was valid until" in str(told)
        until(lambda: not stream.is_alive(), "the end of the stream")
        until(lambda: slow, "the end of the slow push")
        held.set()


# -- terms


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_term_that_a_member_claims_does_not_end_the_hub(tmp_path, keys, with_keys):
    with leading_hub(tmp_path, STANDBY, keys if with_keys else None) as hub:
        liar, good = (hub.node(name, name if with_keys else "") for name in ("alice", "bob"))
        good.found()
        liar.join()
        true = liar.who.term
        liar.who.term = FAR_TERM
        assert code(liar.heartbeat) == "FAILED_PRECONDITION"
        told = refusal(
            lambda: hub.client("alice" if with_keys else "").take_over(pb.TakeOverRequest(who=liar.who))
        )
        assert "ask the other one" in str(told)
        until(lambda: not hub.leading.guard._asking.locked(), "the answer of the other hub")
        assert not hub.process.is_over
        assert good.merged(0).verdict == pb.MERGED
        liar.who.term = true
        assert liar.heartbeat().term == true


@pytest.mark.parametrize("holder", ["", "second"])
def test_a_term_that_anybody_confirms_does_not_end_the_hub(tmp_path, keys, holder):
    with leading_hub(tmp_path, STANDBY, keys if holder else None) as hub:
        node, liar = hub.node("alice", "alice" if holder else "").found(), hub.client(holder)
        assert code(lambda: liar.confirm(pb.ConfirmRequest(term=FAR_TERM))) == "FAILED_PRECONDITION"
        until(lambda: not hub.leading.guard._asking.locked(), "the answer of the other hub")
        assert not hub.process.is_over
        assert node.push(0).accepted


def test_the_other_hub_is_asked_and_believed(tmp_path):
    with leading_hub(tmp_path, STANDBY) as hub:
        node = hub.node().found()
        hub.leading.guard.trust(other_terms=lambda: (2, ()))
        node.who.term = 2
        assert code(node.heartbeat) == "FAILED_PRECONDITION"
        until(lambda: hub.process.is_over, "the end of the replaced hub")


@pytest.mark.parametrize("led", [2, 0])
def test_a_receipt_of_a_later_term_is_a_loss_only_if_no_other_hub_has_led(tmp_path, led):
    """Found in simulation: a leader that was replaced meanwhile said that its journal had lost records."""
    with leading_hub(tmp_path, STANDBY) as hub:
        node, receipts = hub.node().found(), hub.leading.ledger.receipts
        receipt = receipts.give(((9, 10**6), bytes(32)))
        receipt.process ^= 2
        receipt.mac = receipts._mac(receipt)
        hub.leading.guard.trust(other_terms=lambda: (led, ()))
        node.who.term = 2
        request = pb.HeartbeatRequest(who=node.who, state="training", claim=pb.Claim(receipt=receipt))
        assert code(lambda: node.hub.heartbeat(request)) == "FAILED_PRECONDITION"
        until(lambda: hub.process.is_over, "the end of the hub")
        assert ("has lost what was acknowledged" in hub.leading.guard.lacking) == (not led)


# -- sequence numbers


def test_a_number_from_far_ahead_is_refused_and_burns_nothing(tmp_path):
    with leading_hub(tmp_path) as hub:
        node = hub.node().found()
        before = hub.leading.ledger.journal.position
        true = node.seqs[0]
        node.seqs[0] = 2**64 - 2
        told = refusal(lambda: node.push(0, base=1))
        assert told.code is grpc.StatusCode.NOT_FOUND
        assert f"where {true + 1} was due" in str(told)
        assert hub.leading.ledger.journal.position == before
        assert list(node.join().seqs) == [true, 1]
        assert node.push(0).accepted


def test_a_member_that_goes_on_skipping_numbers_is_excluded_and_one_that_joins_again_is_not(tmp_path):
    """Found: refusals for gaps cost nothing, however many there were."""
    with leading_hub(tmp_path, "grace = 0.0") as hub:
        honest, liar = hub.node().found(), hub.node("liar")
        liar.join()
        for _ in range(20):
            honest.seqs[0] += 1  # as if the hub had lost one
            assert refusal(lambda: honest.push(0)).code is grpc.StatusCode.NOT_FOUND
            honest.join()
            honest.merged(0)
        codes = []
        for _ in range(11):
            liar.seqs[0] += 5
            codes.append(refusal(lambda: liar.push(0, base=1)).code.name)
        assert codes == ["NOT_FOUND"] * 10 + ["PERMISSION_DENIED"]  # two are free, eight are violations
        assert hub.leading.ledger.hub.state.members[0].violations == 0
