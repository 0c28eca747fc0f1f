"""Tests what a member's name is worth: who may take it, how many of them, and what an exclusion holds for."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from kit.agents import exchange, node, plan
from kit.hub_machine import World, joiner, kinds, poison, world
from kit.hub_machine import plan as hub_plan
from kit.hub_processes import HubRefused
from kit.leading_hub import keys_of, leading_hub
from kit.statements import statement
from kit.swarm import card_of, key_of

from aedit.async_sgd.hub import CERTIFIED, Denied, HubState
from aedit.async_sgd.rules import Left, PushFilterConfig
from aedit.async_sgd.service import fingerprint
from aedit.async_sgd.service.request_guard import is_local, known_by, origin_of
from aedit.async_sgd.service.server_directory import Directory
from aedit.launch.config import RunConfig
from aedit.launch.hub.uplink import name_at_parent
from aedit.launch.records import HubSample, claimed
from aedit.launch.records.records import Notice
from aedit.proto.agent import NodeRefused, rejoin_secret
from aedit.proto.rpc import Caller, Refusal, parsed_statement
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc.directory_pb2 import ServerCard
from aedit.proto.rpc.rollouts_pb2 import Opened
from aedit.proto.swarm import decoded_card, encoded_card
from aedit.proto.versions.manifest import check_line
from aedit.spec_rollout.audit import Origin
from aedit.spec_rollout.remote.connection import Connection, Violation
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL
from aedit.system import host_name
from aedit.types import LONGEST_NAME, TensorLayout, UnitLayout, UserError, name_fault


def refusal(call):
    with pytest.raises(HubRefused) as caught:
        call()
    return caught.value


def denied(call):
    with pytest.raises(Denied) as caught:
        call()
    return caught.value


# -- what is a name

GOOD_NAMES = ("a", "Node-7.example_org", "..a", "-", "x" * 64)
BAD_NAMES = (
    *("", ".", "..", "../../x", "/etc/passwd", "a/b", "a\\b", "a b", "a:b"),
    *("a\n", "a\0", "\ud800", "\x1b[2J"),
    # Letters and digits of other scripts: Cyrillic, with an accent, of full width, Arabic, of mathematics.
    *("n\u043ede", "\u00e4", "\uff41", "a\u0661", "\U0001d41a", "a\u200b"),
)
ENCODABLE = [name for name in BAD_NAMES if name != "\ud800"]  # no message can have the other one


def accepts_run(name):
    return RunConfig(name=name)


def accepts_member(name):
    return world(1).join(name)


def accepts_server(name):
    return Directory(HubState(), most=8, lease_s=9.0).announce(
        ServerCard(name=name, address="10.0.0.1:7001", process=1, public_key=bytes(32)), 0.0
    )


def accepts_peer(name):
    key = key_of(1)
    return decoded_card(encoded_card(replace(card_of(key), name=name), key.private))


def accepts_run_of_a_card(name):
    key = key_of(1)
    return decoded_card(encoded_card(replace(card_of(key), run=name), key.private))


def accepts_run_of_a_statement(name):
    return parsed_statement(statement(1, run=name))


@pytest.mark.parametrize(
    "accepts",
    [
        accepts_run, accepts_member, accepts_server, accepts_peer, accepts_run_of_a_card, check_line,
        accepts_run_of_a_statement,
    ],
)  # fmt: skip
def test_a_name_is_a_plain_one_wherever_it_arrives(accepts):
    for name in GOOD_NAMES:
        accepts(name)
    for name in (*ENCODABLE, "x" * 129):
        with pytest.raises((ValueError, Denied), match=r"is not 1 to (64|128) letters"):
            accepts(name)


def test_a_rollout_server_that_answers_has_a_name():
    origin = Origin("run", "line", "")
    for name in (*ENCODABLE, "x" * 129):
        with pytest.raises(Violation, match="is not 1 to 128 letters"):
            Connection.open(None, Opened(server=name, protocol=ROLLOUT_PROTOCOL), origin)
    for name in GOOD_NAMES:
        with pytest.raises(Violation, match="its key has 0 bytes"):  # the next thing that is checked
            Connection.open(None, Opened(server=name, protocol=ROLLOUT_PROTOCOL), origin)
    older = ROLLOUT_PROTOCOL - 1
    with pytest.raises(Violation, match=f"it speaks protocol {older}, expected {ROLLOUT_PROTOCOL}"):
        Connection.open(None, Opened(server="a", protocol=older), origin)


def test_a_name_on_the_command_line_becomes_no_path_before_it_was_checked(tmp_path):
    for name in (*BAD_NAMES, "x" * 129):
        with pytest.raises(UserError, match=r"--as: .* is not 1 to 128 letters"), claimed(tmp_path, name):
            pass
    assert not list(tmp_path.rglob("*"))


def test_a_host_name_is_made_a_name(monkeypatch):
    for found in (*BAD_NAMES, "x" * 300, "..."):
        monkeypatch.setattr("socket.gethostname", lambda found=found: found)
        assert not name_fault(f"{host_name()}-{'0' * 6}", 71)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-3.example.org")
    assert host_name() == "gpu-3.example.org"


@pytest.mark.parametrize("run", ["text", "x" * LONGEST_NAME])
@pytest.mark.parametrize("address", ["10.0.0.1:7000", "[fe80::1]:7000", f"{'h' * 253}:65535"])
def test_the_hub_of_a_region_has_a_name_at_its_parent(run, address):
    """As found: the parent refused `hub of text at 10.0.0.1:7000`, so that no region was ever heard."""
    name = name_at_parent(run, address)
    assert not name_fault(name)
    assert name.startswith(f"hub-of-{run[:32]}-at-")
    assert name.endswith(address.rpartition(":")[2])


def test_a_running_hub_takes_no_path_as_the_name_of_a_node(tmp_path):
    with leading_hub(tmp_path) as hub:
        for name in ENCODABLE:
            told = refusal(hub.node(name).join)
            assert told.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "choose another one with --as" in str(told)
        assert hub.node("a").found().status()["nodes"][0]["name"] == "a"


# -- the place of a live member


@pytest.mark.parametrize("shared", [True, False])
def test_joins_under_the_names_of_live_members_end_nobody(tmp_path, shared):
    """As found: three Joins with names from `status` ended all node processes."""
    keys = keys_of(tmp_path) if shared else None
    with leading_hub(tmp_path, "", keys) as hub:
        own = "nodes" if shared else ""
        nodes = [hub.node(name, own, secret=name.encode()).found() for name in ("a", "b", "c")]
        for name in [one["name"] for one in nodes[0].status()["nodes"]]:
            for secret in (b"", b"guessed"):
                told = refusal(hub.node(name, own, secret=secret).join)
                assert told.code is grpc.StatusCode.ALREADY_EXISTS
                assert "its own run directory" in str(told)
                assert "wait until 60 s" in str(told)
        assert [one.heartbeat().nodes for one in nodes] == [3, 3, 3]


def test_a_node_that_has_crashed_comes_back_at_once_with_the_secret_of_its_directory(tmp_path):
    with leading_hub(tmp_path) as hub:
        before = hub.node("a").found()
        again = hub.node("a")
        assert again.join().node == before.who.node
        assert refusal(before.heartbeat).code is grpc.StatusCode.ABORTED
        assert again.heartbeat().nodes == 1


def test_keys_with_a_name_are_a_proof_of_it(tmp_path):
    keys = keys_of(tmp_path, ["a"])
    with leading_hub(tmp_path, "", keys) as hub:
        before = hub.node("a", "a", secret=b"").found()
        again = hub.node("a", "a", secret=b"")
        assert again.join().node == before.who.node


def test_an_agent_waits_for_its_predecessor_to_be_given_up_and_then_takes_its_place(tmp_path):
    with leading_hub(tmp_path, expire_s=2.0) as hub:
        silent = hub.node("a", numels=(22, 5000)).found()
        settings = {"run": "run", "heartbeat_s": 0.1, "expire_s": 2.0, "rejoin": "ab" * 16}
        made = plan([hub.address], name="a", **settings)
        made = replace(made, units=tuple(units_of(silent)), num_samples=1000, facts=(("seed", "0"),))
        with node(made) as link:
            assert all(link.join(20.0))
        assert refusal(silent.heartbeat).code is grpc.StatusCode.ABORTED


def test_an_agent_ends_with_the_reason_when_another_node_keeps_its_name(tmp_path):
    with leading_hub(tmp_path, expire_s=1.2) as hub:
        other = hub.node("a", numels=(22, 5000)).found()
        settings = {"run": "run", "heartbeat_s": 0.05, "expire_s": 0.2, "rejoin": "ab" * 16}
        made = plan([hub.address], name="a", **settings)
        made = replace(made, units=tuple(units_of(other)), num_samples=1000, facts=(("seed", "0"),))
        with node(made) as link, living(other), pytest.raises(NodeRefused, match="a node a is in the run"):
            link.join(20.0)
        assert other.heartbeat().nodes == 1


@contextmanager
def living(client):
    """Send heartbeats of a node until the block ends."""
    over = threading.Event()

    def beat():
        while not over.wait(0.1):
            client.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def units_of(client):
    return [UnitLayout(f"unit{i}", (TensorLayout("w", (n,)),)) for i, n in enumerate(client.numels)]


def test_a_secret_is_kept_in_a_file_of_its_owner_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "rejoin" / "a"
    first = rejoin_secret(path)
    assert rejoin_secret(path) == first
    assert len(bytes.fromhex(first)) == 16
    assert path.stat().st_mode & 0o777 == 0o600
    assert rejoin_secret(None) != rejoin_secret(None)
    path.write_text("zz")
    with pytest.raises(UserError, match=f"{path} holds no secret"):
        rejoin_secret(path)


# -- many names


def test_one_origin_takes_only_so_many_names(tmp_path):
    """As found: six invented names outvoted five nodes, and 256 took all seats."""
    made = World(hub_plan())
    made.join("own", origin="host 10.0.0.1", most_names=3)
    for name in ("x", "y", "z"):
        made.join(name, origin="host 10.6.6.6", most_names=3)
    told = denied(lambda: made.join("w", origin="host 10.6.6.6", most_names=3))
    assert told.kind == "full"
    assert "hub.limits.names" in told.reason
    made.do(made.hub.leave(made.hub.state.names["x"]))
    assert denied(lambda: made.join("w", origin="host 10.6.6.6", most_names=3)).kind == "full"
    assert made.join("x", origin="host 10.6.6.6", most_names=3) == 1
    made.join("v", origin="host 10.0.0.1", most_names=3)


def test_names_of_a_host_are_counted_by_address_and_ipv6_network():
    assert origin_of("ipv4:10.0.0.5") == "host 10.0.0.5"
    assert origin_of("ipv6:%5B2001:db8::5%5D") == origin_of("ipv6:%5B2001:db8::77:1%5D")
    assert origin_of("ipv6:%5B2001:db8:0:1::5%5D") != origin_of("ipv6:%5B2001:db8::5%5D")
    assert is_local("ipv4:127.0.0.1")
    assert is_local("ipv6:%5B::1%5D")
    assert not is_local("ipv4:10.0.0.5")


def test_limits_and_proofs_come_from_the_caller_and_not_from_its_message():
    request = pb.JoinRequest(name="a", rejoin=b"secret", process=7)
    request.who.session = 9
    config = World(hub_plan()).hub.config.limits
    far = known_by(joiner("a"), request, Caller("ipv4:10.0.0.5"), config)
    assert (far.origin, far.most_names) == ("host 10.0.0.5", config.names)
    assert far.proof not in ("", CERTIFIED)
    assert (far.session, far.process) == (fingerprint(9), fingerprint(7))
    here = known_by(joiner("a"), request, Caller("ipv4:127.0.0.1"), config)
    assert here.most_names == config.nodes
    named = known_by(joiner("a"), request, Caller("ipv4:10.0.0.5", "a", "node"), config)
    assert (named.origin, named.proof) == ("keys of a", CERTIFIED)
    request.rejoin = b"x" * 65
    with pytest.raises(Refusal, match="rejoin has 65 bytes"):
        known_by(joiner("a"), request, Caller("ipv4:10.0.0.5"), config)


@pytest.mark.parametrize("donor", ["10.6.6.6:80", "127.0.0.1:80", "example.org:80", "10.0.0.5:0", "10.0.0.5"])
def test_a_node_cannot_send_others_elsewhere_for_anchors(donor):
    request = pb.JoinRequest(name="a", donor=donor)
    config = World(hub_plan()).hub.config.limits
    with pytest.raises(Refusal, match="donor"):
        known_by(joiner("a"), request, Caller("ipv4:10.0.0.5"), config)
    request.donor = "10.0.0.5:7002"
    known_by(joiner("a"), request, Caller("ipv4:10.0.0.5"), config)
    request.donor = "127.0.0.1:7002"
    known_by(joiner("a"), request, Caller("ipv4:127.0.0.1"), config)


# -- exclusion


def test_an_exclusion_is_not_undone_by_another_name(tmp_path):
    """As found: being put out was undone by renaming."""
    made = World(hub_plan(world(push_filter=PushFilterConfig(violations=2)).plan.hub))
    made.join("good", origin="host 10.0.0.1")
    made.join("bad", origin="host 10.6.6.6")
    made.join("neighbour", origin="host 10.6.6.6")
    made.found()
    while not any(kind is Left for kind in kinds(poison(made, 1))):
        pass
    for name in ("bad", "bad2"):
        told = denied(lambda name=name: made.join(name, origin="host 10.6.6.6"))
        assert told.kind == "excluded"
    assert made.join("neighbour", origin="host 10.6.6.6") == 2  # it was there before
    made.join("bad2", origin="host 10.0.0.2")


def test_a_name_with_keys_of_its_own_is_never_taken_without_them():
    made = World(hub_plan())
    made.join("a", proof=CERTIFIED, origin="keys of a")
    made.join("b", proof=CERTIFIED, origin="keys of b")
    made.do(made.hub.leave(0))
    assert denied(lambda: made.join("a", proof="guessed", origin="host 10.6.6.6")).kind == "foreign"
    assert made.join("a", proof=CERTIFIED, origin="keys of a") == 0


# -- what a member says of itself


def test_escapes_in_a_members_state_do_not_reach_a_terminal(tmp_path):
    """As found: terminal escapes in a member's state reached the operator's screen."""
    escape = "\x1b]0;owned\x07\x1b[2J\u202e"
    with leading_hub(tmp_path) as hub:
        node = hub.node().found()
        node.hub.heartbeat(pb.HeartbeatRequest(who=node.who, state=escape + "x" * 500))
        (shown,) = [one["state"] for one in node.status()["nodes"]]
        assert shown.isprintable()
        assert len(shown) == 256
        assert "escapes" not in shown
        for name in ("\x1b[2J", "", "n" * 129):
            assert "1 to 128 letters" in str(refusal(hub.node(name).join))


def test_views_show_what_an_older_hub_or_a_file_has_without_control_characters():
    line = {"t": 1.0, "nodes": [{"node": 0, "name": "a\x1b[2J", "state": "\x9b31m", "refused": {"\x1b": 1}}]}
    sample = HubSample.of(line | {"term": 1, "units": [], "follows": "\x1b[H"})
    told = [sample.nodes[0].name, sample.nodes[0].state, *sample.nodes[0].refused, sample.follows]
    assert told == ["a?[2J", "?31m", "?", "?[H"]
    notice = Notice.of({"t": 1.0, "event": "excluded", "reason": "\x1b]0;x\x07"})
    assert notice.text == "?]0;x?"


def test_a_stranger_with_the_name_of_a_real_node_process_does_not_end_it(tmp_path):
    with leading_hub(tmp_path) as hub:
        settings = {"run": "run", "heartbeat_s": 0.1, "expire_s": 60.0, "rejoin": "ab" * 16}
        stranger = hub.node("a", numels=(22, 5000), secret=b"guessed")
        made = plan([hub.address], name="a", **settings)
        made = replace(made, units=tuple(units_of(stranger)), num_samples=1000, facts=(("seed", "0"),))
        with node(made, mode="process") as link:
            assert all(link.join(20.0))
            told = refusal(stranger.join)
            assert told.code is grpc.StatusCode.ALREADY_EXISTS
            assert exchange(link, 0, 1, 0.5, 1).version == 2
