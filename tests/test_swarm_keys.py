"""Tests the keys of a swarm: what a peer may call with them, and that nobody else may, over TLS."""

import shutil
import time
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from kit.gossip import Peer, all_see, call, started
from kit.hub_processes import HubRefused, HubUnreachable, confirmation
from kit.leading_hub import keys_of, leading_hub
from kit.swarm import RUN, key_of
from kit.waiting import until

from aedit.launch.cli.keys import make_keys, revoke
from aedit.launch.config import Placement, RunConfig, check_hub_start, parse_config
from aedit.launch.swarm import Peer as PeerProcess
from aedit.launch.swarm import PeerOptions
from aedit.launch.swarm.peer_service import peer_rows
from aedit.proto.rpc import (
    HubClient,
    Proposal,
    SigningKey,
    client_keys,
    host_certificates,
    identity_of,
    own_endorsement,
    proposal_out,
    server_keys,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.identity import PEER
from aedit.proto.rpc.identity import parse_token as parsed
from aedit.proto.swarm import Certified
from aedit.types import UserError

HERE = ["127.0.0.1"]
STANDBY = 'standby = "127.0.0.1:1"'


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return a folder with keys of two peers, and of others who are none."""
    return keys_of(
        tmp_path_factory.mktemp("keys"),
        ["dora"],
        hosts=(),
        peers={"alice": HERE, "bob": HERE},
        servers={"spare": HERE},
        standbys={"second": HERE},
        readers=["eve"],
    )


def code(asked):
    with pytest.raises(HubRefused) as caught:
        asked()
    return caught.value.code.name


# -- the folders


def test_keys_of_peers_need_no_host_of_a_hub(tmp_path):
    said = make_keys(tmp_path / "keys", (), peers={"alice": ["10.0.0.7"], "bob": HERE})
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["alice", "bob", "ca.crt", "ca.key"]
    assert "to peer alice, valid until" in said
    assert "one token lets them all in" not in said
    folder = tmp_path / "keys" / "alice"
    assert parsed((folder / "token").read_text().strip())[0].role == PEER
    served = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert served.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "aedit hub"
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))
    with pytest.raises(UserError, match="--host: missing"):
        make_keys(tmp_path / "none", ())


def test_a_hub_keeps_its_keys_when_peers_are_added(tmp_path):
    make_keys(tmp_path, HERE)
    before = (tmp_path / "hub" / "token").read_bytes()
    make_keys(tmp_path, (), peers={"alice": HERE})
    assert (tmp_path / "hub" / "token").read_bytes() == before
    assert client_keys(tmp_path / "alice")


def test_a_folder_that_is_made_after_a_revocation_knows_it(tmp_path):
    """Found: it had no list of revoked keys, so that a new peer let the revoked ones in."""
    keys = keys_of(tmp_path, hosts=(), peers={"alice": HERE, "bob": HERE})
    shutil.copytree(keys / "bob", tmp_path / "bob")
    revoke(keys, ["bob"])
    make_keys(keys, (), peers={"carol": HERE})
    carol = Peer(1, server_keys=server_keys(keys / "carol"), client_keys=client_keys(keys / "carol"))
    with started(carol):
        assert code(lambda: call(carol.gossip.address, client_keys(tmp_path / "bob"))) == "UNAUTHENTICATED"


def test_the_keys_of_one_peer_are_not_for_several_nodes(keys):
    swarm = parse_config('name = "r"\n[swarm]\ndiscovery = "file"\n', "here")
    with pytest.raises(UserError, match="are for one peer"):
        check_hub_start(swarm, Placement(nodes=3, local=True, keys=keys / "alice"))
    check_hub_start(swarm, Placement(nodes=1, local=True, keys=keys / "alice"))


def test_a_client_cannot_begin_a_run():
    client = parse_config('name = "r"\n[swarm]\ndiscovery = "file"\nlisten = ""\n', "here")
    with pytest.raises(UserError, match="keeps no part and cannot begin a run"):
        check_hub_start(client, Placement(local=True))


# -- gossip


def gossiping(number, keys, holder, *known, certificates=False, **plan):
    served = server_keys(keys / holder, require_client_certificates=certificates)
    tls = {"server_keys": served, "client_keys": client_keys(keys / holder)}
    tls["certified"] = certified(number, keys / holder)
    return Peer(number, *known, call_timeout_s=1.0, **(tls | plan))


def certified(number, folder):
    """Return the certificates in a folder for a peer with this key."""
    return Certified(host_certificates(folder), own_endorsement(folder, RUN, key_of(number).public))


@pytest.mark.parametrize("certificates", [True, False])
def test_peers_exchange_cards_with_keys_of_peers_and_refuse_others(keys, certificates):
    alice = gossiping(1, keys, "alice", certificates=certificates)
    address = alice.gossip.address
    bob = gossiping(2, keys, "bob", address, certificates=certificates)
    checks = Certified(host_certificates(keys / "dora"))
    behind_nat = Peer(3, address, client=True, client_keys=client_keys(keys / "dora"), certified=checks)
    with started(alice, bob, behind_nat) as peers:
        until(all_see(peers, {"p1", "p2", "p3"}), "two peers, and a client with the keys of a node")
        for name in ("eve", "spare", "second"):
            assert code(lambda name=name: call(address, client_keys(keys / name))) == "PERMISSION_DENIED"
        with pytest.raises(HubUnreachable):
            call(address, None, timeout_s=0.5)


def test_a_peer_counts_only_with_the_certificate_that_its_card_names(keys):
    alice, bob = gossiping(1, keys, "alice"), gossiping(2, keys, "bob")
    claims = replace(certified(3, keys / "bob"), own=certified(1, keys / "alice").own)
    thief = gossiping(3, keys, "bob", certified=claims)
    other_key = gossiping(4, keys, "bob", certified=certified(5, keys / "bob"))
    silent = gossiping(6, keys, "bob", certified=None)
    alice.discovery.given = [peer.gossip.address for peer in (thief, other_key, silent, bob)]
    with started(alice, bob, thief, other_key, silent):
        until(lambda: alice.sees() == {"p1", "p2"}, "the honest peer")
        wanted = (
            "'p3': the key of its certificate has not signed its identity",
            "'p4': the key of its certificate has not signed its identity",
            "'p6': its certificate has 0 bytes",
        )
        for peer, text in zip((thief, other_key, silent), wanted, strict=True):
            with pytest.raises(ValueError, match=text):
                asked(alice, peer)
        assert alice.sees() == {"p1", "p2"}


def test_one_folder_of_keys_is_one_peer_under_however_many_keys_and_addresses(keys):
    alice = gossiping(1, keys, "alice")
    sybils = [gossiping(number, keys, "bob", lease_s=60.0) for number in range(2, 7)]
    with started(alice, *sybils):
        for peer in (*sybils, *sybils):
            with suppress(ValueError):
                asked(alice, peer)
        assert alice.sees() == {"p1", "p2"}
        with pytest.raises(
            ValueError, match=r"'p3' and 'p2' at .* have one certificate: give each peer a fol"
        ):
            asked(alice, sybils[1])


def asked(caller, peer):
    """Let a peer that has a card call another one, and take the answer."""
    until(lambda: caller.known.own_card and peer.known.own_card, "cards")
    address, now = peer.gossip.address, time.monotonic()
    request = caller.gossip._exchanges.request(address)
    reply = peer.gossip._exchanges.answer(request, now)
    caller.gossip._exchanges.take(address, request, reply, now)


def test_the_token_of_one_peer_with_the_certificate_of_another_is_refused(tmp_path, keys):
    shutil.copytree(keys / "bob", tmp_path / "mixed")
    shutil.copy(keys / "alice" / "token", tmp_path / "mixed" / "token")
    alice = gossiping(1, keys, "alice", certificates=True)
    with started(alice):
        assert code(lambda: call(alice.gossip.address, client_keys(tmp_path / "mixed"))) == "UNAUTHENTICATED"


def test_a_peer_whose_certificate_is_for_another_host_is_not_believed(tmp_path):
    keys = keys_of(tmp_path, hosts=(), peers={"alice": HERE, "bob": HERE, "carol": ["127.0.0.3"]})
    alice = gossiping(1, keys, "alice")
    elsewhere = gossiping(2, keys, "bob", alice.gossip.address, listen="127.0.0.2:0")
    right = gossiping(3, keys, "carol", alice.gossip.address, listen="127.0.0.3:0")
    with started(alice, elsewhere, right):
        until(lambda: alice.sees() == {"p1", "p3"}, "the peer at its own host")
        until(lambda: right.sees() == {"p1", "p3"}, "the same there")
        assert alice.known.offer(elsewhere.card(), time.monotonic()).kind == "new", "it has called"


def test_a_revoked_peer_is_refused_by_the_others(tmp_path):
    keys = keys_of(tmp_path, hosts=(), peers={"alice": HERE, "bob": HERE})
    alice = gossiping(1, keys, "alice")
    with started(alice):
        bob = client_keys(keys / "bob")
        assert call(alice.gossip.address, bob).card
        revoke(keys, ["bob"])
        assert code(lambda: call(alice.gossip.address, bob)) == "UNAUTHENTICATED"


# -- the hub of a part, which has the keys of its peer


@pytest.mark.parametrize("certificates", ["true", "false"])
def test_a_peer_may_call_the_hub_of_another_as_node_and_as_follower(tmp_path, keys, certificates):
    more = f"{STANDBY}\ncertificates = {certificates}"
    with leading_hub(tmp_path, more, keys, holder="alice") as hub:
        node = hub.node("bob", "bob").found()
        assert node.push(0).accepted
        assert node.anchor(0)[0]
        assert node.status()["nodes"][0]["name"] == "bob"
        peer = hub.client("bob")
        assert next(chunk.data for chunk in peer.tail(pb.TailRequest(segment=1)) if chunk.data)
        peer.confirm(confirmation())
        assert hub.followers
        assert not peer.propose(proposal()).granted
        assert peer.take_over(pb.TakeOverRequest(who=node.who)).leads
        assert code(hub.node("carol", "bob").join) == "PERMISSION_DENIED", "a node has the name of its keys"


def proposal():
    key = SigningKey()
    asked = Proposal(2, 0, identity_of(key.public), (1, 2), (1, 1, 100))
    return pb.ProposeRequest(run="run", proposal=proposal_out(asked, key))


def test_only_peers_follow_and_vote(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys, holder="alice") as hub:
        hub.node("bob", "bob").found()
        for name in ("dora", "eve", "spare"):
            other = hub.client(name)
            assert (
                code(lambda other=other: next(iter(other.tail(pb.TailRequest(segment=1)))))
                == "PERMISSION_DENIED"
            )
            assert code(lambda other=other: other.confirm(pb.ConfirmRequest())) == "PERMISSION_DENIED"
            assert code(lambda other=other: other.propose(proposal())) == "PERMISSION_DENIED"
        assert hub.node("dora", "dora").join().node == 1, "a client trains with the keys of a node"


def calls_of(hub, node, name):
    """Return every call that peers make at the hub of a part, with the keys of `name`; "" for none."""
    client = hub.client(name)
    member = hub.node("bob", name)
    member.who, member.seqs, member.versions = node.who, list(node.seqs), list(node.versions)
    return {
        "Hello": lambda: client.hello(pb.HelloRequest()),
        "Status": lambda: client.status(pb.StatusRequest()),
        "Tail": lambda: next(iter(client.tail(pb.TailRequest(segment=1)))),
        "Confirm": lambda: client.confirm(pb.ConfirmRequest()),
        "Propose": lambda: client.propose(proposal()),
        "TakeOver": lambda: client.take_over(pb.TakeOverRequest(who=node.who)),
        "Join": member.join,
        "Push": lambda: member.push(0, base=1),
        "Pull": lambda: member.anchor(0),
    }


def test_a_revoked_peer_is_refused_every_call(tmp_path):
    keys = keys_of(tmp_path, hosts=(), peers={"alice": HERE, "bob": HERE})
    with leading_hub(tmp_path, STANDBY, keys, holder="alice") as hub:
        calls = calls_of(hub, hub.node("bob", "bob").found(), "bob")
        revoke(keys, ["bob"])
        assert {name: code(asked) for name, asked in calls.items()} == dict.fromkeys(calls, "UNAUTHENTICATED")


def test_without_a_token_no_call_is_answered(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys, holder="alice") as hub:
        node = hub.node("bob", "bob").found()
        tls = grpc.ssl_channel_credentials((keys / "bob" / "ca.crt").read_bytes())
        bare = HubClient(hub.address, tls, call_timeout_s=5.0)
        for asked in (
            lambda: bare.hello(pb.HelloRequest()),
            lambda: next(iter(bare.tail(pb.TailRequest(segment=1)))),
            lambda: bare.propose(proposal()),
            lambda: bare.take_over(pb.TakeOverRequest(who=node.who)),
        ):
            assert code(asked) == "UNAUTHENTICATED"
        with pytest.raises(HubUnreachable):
            HubClient(hub.address, None, call_timeout_s=0.5).status(pb.StatusRequest())


# -- the peer process


def process(folder, text, **options):
    folder.mkdir(exist_ok=True)
    config: RunConfig = parse_config(f'name = "r"\n[swarm]\ndiscovery = "file"\n{text}', "here")
    return PeerProcess(config, PeerOptions(directory=folder, name="n", **options))


def test_a_client_starts_with_the_keys_of_a_node_and_without_any(tmp_path, keys):
    """Found: it was asked for keys of a server, and for --insecure, although nobody calls it."""
    for name, options in (("a", {"keys": keys / "dora"}), ("b", {})):
        client = process(tmp_path / name, 'listen = ""', **options)
        assert client.address == ""
        client.close()


def live_rows(peer):
    """Return the rows of views about the peers that count for `peer`."""
    return peer_rows(peer._known.live(time.monotonic()), peer._key.public, peer._known.faults)


def test_the_processes_of_two_peers_count_with_the_certificates_of_their_folders(tmp_path, keys):
    alice = process(tmp_path / "a", "", keys=keys / "alice")
    bob = process(tmp_path / "b", "", keys=keys / "bob", peers=alice.address)
    client = process(tmp_path / "c", 'listen = ""', keys=keys / "dora", peers=alice.address)
    everybody = (alice, bob, client)
    try:
        for one in everybody:
            one._gossip.start()
        until(lambda: all(len(live_rows(one)) == 3 for one in everybody), "three peers")
        told = {row["certificate"] for row in live_rows(client)}
        made = [own_endorsement(keys / name, "r", b"").fingerprint for name in ("alice", "bob")]
        assert told == {*made, ""}
    finally:
        for one in everybody:
            one.close()


def test_a_peer_asks_for_certificates_where_the_run_does(tmp_path, keys):
    """Found: a copied token alone was enough for the exchange of cards."""
    peer = process(tmp_path / "a", "[hub]\ncertificates = true", keys=keys / "alice")
    try:
        peer._gossip.start()
        stolen = keys_without_certificate(tmp_path / "stolen", keys / "bob")
        with pytest.raises(HubUnreachable):
            call(peer.address, client_keys(stolen), timeout_s=1.0)
        until(lambda: peer._known.own_card, "its card")
        with pytest.raises(HubRefused, match="run is"):  # of another run, but heard
            call(peer.address, client_keys(keys / "bob"))
    finally:
        peer.close()


def keys_without_certificate(folder, keys):
    folder.mkdir()
    for name in ("ca.crt", "token"):
        shutil.copy(keys / name, folder / name)
    return folder


def test_a_peer_that_others_can_reach_needs_keys(tmp_path):
    with pytest.raises(UserError, match="without keys anybody"):
        process(tmp_path / "a", 'listen = "0.0.0.0:0"\nannounce = "10.0.0.1"')
