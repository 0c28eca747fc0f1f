"""Tests the directory of rollout servers as a state machine: names, leases, accusations and bans."""

import re
import urllib.request

import pytest
from kit.hub_machine import World, config, plan

from aedit.async_sgd.hub import Denied, HubState, hub_status, load_state, run_news, save_state
from aedit.async_sgd.journal.encoding import decode_records, encode_records
from aedit.async_sgd.rules import Left
from aedit.async_sgd.service import MetricsPage
from aedit.async_sgd.service.server_directory import Directory
from aedit.proto.rpc import directory_pb2 as pb

LEASE_S = 10.0
KEY, OTHER = bytes(range(32)), bytes(32)
CARD = pb.ServerCard(name="alpha", address="10.0.0.1:7001", process=11, public_key=KEY, state="starting")


def directory(state=None, most=8):
    return Directory(state or HubState(), most=most, lease_s=LEASE_S)


def names(found, now):
    return [card.name for card in found.live(now)]


def replace(card, **changes):
    """Return the card with other fields."""
    fields = {field.name: value for field, value in card.ListFields()}
    return pb.ServerCard(**(fields | changes))


def complaint(node, server="alpha", key=KEY):
    """Return the arguments of an accusation."""
    said = {"reason": "margin", "evidence": {"place": 3}}
    return said | {"server": server, "public_key": key, "node": node}


def test_a_server_is_listed_until_its_lease_ends_and_every_announcement_renews_it():
    found = directory()
    assert found.announce(CARD, 0.0) == (True, None)
    assert found.announce(replace(CARD, waiting=3), 9.0) == (False, None)
    assert [(card.name, card.waiting) for card in found.live(18.9)] == [("alpha", 3)]
    assert found.expire(18.9) == []
    assert names(found, 19.0) == []
    assert found.expire(19.0) == ["alpha"]
    assert found.expire(20.0) == []
    assert found.announce(CARD, 21.0) == (True, None)
    assert names(found, 21.0) == ["alpha"]


def test_a_server_that_withdraws_is_gone_at_once_and_only_its_own_process_can_withdraw_it():
    found = directory()
    found.announce(CARD, 0.0)
    with pytest.raises(Denied, match="another process"):
        found.withdraw("alpha", 12)
    assert names(found, 1.0) == ["alpha"]
    assert found.withdraw("alpha", 11)
    assert not found.withdraw("alpha", 11)
    assert not found.withdraw("beta", 11)
    assert names(found, 1.0) == []


def test_a_live_name_is_its_keys_or_its_certificates_and_after_the_lease_anybodys():
    found = directory()
    found.announce(CARD, 0.0)
    thief = replace(CARD, process=99, public_key=OTHER, address="10.6.6.6:7001")
    with pytest.raises(Denied, match="another server is named 'alpha'; its lease ends in 6 s") as denied:
        found.announce(thief, 4.0)
    assert denied.value.kind == "taken"
    assert [card.address for card in found.live(4.0)] == ["10.0.0.1:7001"]
    moved = replace(CARD, process=12, address="10.0.0.2:7001")  # it has started again, with the same key
    assert found.announce(moved, 4.0) == (True, None)
    assert [card.address for card in found.live(5.0)] == ["10.0.0.2:7001"]
    assert found.announce(thief, 5.0, certified=True) == (True, None)  # another key of the right machine
    assert found.announce(CARD, 15.0) == (True, None)


def test_two_live_servers_never_have_one_key():
    found = directory()
    found.announce(CARD, 0.0)
    with pytest.raises(Denied, match="'alpha' has this public key"):
        found.announce(replace(CARD, name="beta", process=12), 1.0, certified=True)
    found.announce(replace(CARD, name="beta", process=12), LEASE_S)


def test_no_more_servers_live_than_the_limit_and_those_that_are_gone_are_forgotten_in_time():
    found = directory(most=3)
    cards = [replace(CARD, name=f"s{i}", public_key=bytes([i]) * 32, process=i) for i in range(1, 200)]
    for card in cards[:3]:
        found.announce(card, 0.0)
    with pytest.raises(Denied, match=r"lists 3 servers \(hub.limits.servers\)"):
        found.announce(cards[3], 1.0)
    found.announce(cards[0], 1.0)  # who is listed is not refused
    for i, card in enumerate(cards):
        found.announce(card, 100.0 * (1 + i))
        assert len(found.status(100.0 * (1 + i))) <= 4
    assert len(found._accusations) <= 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "letters"),
        ({"name": "x" * 129}, "1 to 128"),
        ({"address": "7001"}, "HOST:PORT"),
        ({"address": ":7001"}, "HOST:PORT"),
        ({"address": "host:0"}, "HOST:PORT"),
        ({"address": "host:65536"}, "HOST:PORT"),
        ({"address": "host:\u0663"}, "HOST:PORT"),
        ({"address": "unix:80"}, "HOST:PORT"),
        ({"address": "dns:///evil:80"}, "HOST:PORT"),
        ({"address": "a b:80"}, "HOST:PORT"),
        ({"address": "h" * 300 + ":80"}, "HOST:PORT"),
        ({"address": "0.0.0.0:7001"}, "name the host"),
        ({"public_key": b"short"}, "5 bytes"),
        ({"process": 0}, "process"),
        ({"state": "x" * 65}, "state"),
        ({"state": "\x1b[2J"}, "state"),
        ({"rows": 2**21}, "rows"),
        ({"tokens_per_s": float("nan")}, "tokens_per_s"),
        ({"tokens_per_s": -1.0}, "tokens_per_s"),
        ({"tokens_per_s": 1e300}, "tokens_per_s"),
        ({"idle_s": float("inf")}, "idle_s"),
        ({"idle_used_s": float("nan")}, "idle_used_s"),
        ({"serial": 1}, "serial is 1; the newest version of this run is 0"),
        ({"figures": {str(i): 1.0 for i in range(17)}}, "17 figures"),
        ({"figures": {"x" * 33: 1.0}}, "figure"),
        ({"figures": {"a\tb": 1.0}}, "figure"),
        ({"figures": {"a": float("nan")}}, "figure a"),
    ],
)
def test_a_card_that_cannot_be_true_is_refused_and_changes_nothing(change, says):
    found = directory()
    found.announce(CARD, 0.0)
    with pytest.raises(Denied, match=says) as denied:
        found.announce(replace(CARD, **change), 1.0)
    assert denied.value.kind == "different"
    assert found.live(1.0) == [CARD]


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1:65535", "[::1]:7001", "gpu-3.example.org:7001"])
def test_addresses_that_trainers_can_reach_are_taken(address):
    found = directory()
    found.announce(replace(CARD, address=address), 0.0)
    assert found.live(0.0)[0].address == address


@pytest.mark.parametrize(("nodes", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_more_than_half_of_the_live_nodes_ban_a_server_by_name_and_by_key(nodes, needed):
    world = World(plan(config()))
    found = directory(world.hub.state)
    for i in range(nodes):
        world.join(f"n{i}")
    found.announce(CARD, 0.0)
    for node in range(needed - 1):
        for _ in range(3):  # one node counts once, however often it accuses
            assert found.accuse(**complaint(node), elapsed_s=1.0) == []
        assert names(found, 1.0) == ["alpha"]
    (ban,) = world.do(found.accuse(**complaint(needed - 1), elapsed_s=1.0))
    assert (ban.server, ban.public_key) == ("alpha", KEY.hex())
    assert f"{needed} of {nodes} nodes" in ban.reason
    assert names(found, 1.0) == []
    assert found.accuse(**complaint(needed - 1), elapsed_s=2.0) == []  # written down once
    for card in (CARD, replace(CARD, public_key=OTHER), replace(CARD, name="beta")):
        assert found.announce(card, 50.0) == (False, ban)
        assert names(found, 50.0) == []
    assert found.announce(replace(CARD, name="beta", public_key=OTHER), 50.0) == (True, None)


def test_accusations_of_nodes_that_have_left_do_not_count():
    world = World(plan(config()))
    found = directory(world.hub.state)
    for i in range(3):
        world.join(f"n{i}")
    found.announce(CARD, 0.0)
    assert found.accuse(**complaint(0), elapsed_s=1.0) == []
    world.do(world.hub.leave(0))
    assert found.accuse(**complaint(1), elapsed_s=1.0) == []  # one of two
    assert len(found.accuse(**complaint(2), elapsed_s=1.0)) == 1


def test_only_a_server_that_was_announced_with_this_key_can_be_accused():
    world = World(plan(config()))
    found = directory(world.hub.state)
    world.join("n")
    found.announce(CARD, 0.0)
    for wrong in (complaint(0, server="beta"), complaint(0, key=OTHER)):
        with pytest.raises(Denied, match="no server"):
            found.accuse(**wrong, elapsed_s=1.0)
    found.withdraw("alpha", 11)
    assert len(found.accuse(**complaint(0), elapsed_s=99.0)) == 1  # late audits still find it


def test_a_ban_survives_a_snapshot_and_the_journal():
    world = World(plan(config()))
    found = directory(world.hub.state)
    world.join("n")
    found.announce(CARD, 0.0)
    decided = found.accuse(**complaint(0), elapsed_s=7.5)
    assert decode_records(encode_records(decided), None) == decided
    world.do(decided)
    again = HubState()
    load_state(save_state(world.hub.state), again)
    assert again.banned == decided
    assert directory(again).announce(CARD, 0.0)[1] == decided[0]
    old = save_state(world.hub.state)
    del old[0]["banned"]  # of a build without servers
    load_state(old, again)
    assert again.banned == []


def test_the_state_of_a_server_is_told_with_its_lag_and_accusations():
    world = World(plan(config()))
    found = directory(world.hub.state)
    world.found(world.join("n"))
    world.push(0, 1.0)
    world.push(0, 1.0, unit=1)
    world.settle()
    assert world.hub.state.policy_version == 2
    found.announce(replace(CARD, serial=1, tokens_per_s=12.5, idle_s=4.0, idle_used_s=3.0), 0.0)
    world.join("m")
    found.accuse(**complaint(0), elapsed_s=1.0)
    (told,) = found.status(2.0)
    assert (told["name"], told["role"], told["live"], told["state"]) == ("alpha", "rollout", True, "starting")
    assert (told["serial"], told["lag"], told["tokens_per_s"], told["silent_s"]) == (1, 1, 12.5, 2.0)
    assert (told["accused"], told["reason"], told["evidence"]) == ({"n": 1}, "margin", {"place": 3})
    world.do(found.accuse(**complaint(1), elapsed_s=1.0))
    (told,) = found.status(2.0)
    assert (told["state"], told["live"]) == ("banned", False)
    assert "accused by 2 of 2 nodes (n, m): margin" in told["banned"]
    found.expire(99.0)
    found.announce(replace(CARD, name="b", public_key=OTHER), 99.0)
    found.withdraw("b", 11)
    assert [one["state"] for one in found.status(99.0)] == ["banned", "gone: left"]


def test_gauges_of_servers_and_nodes_that_are_gone_are_no_longer_exported():
    world = World(plan(config()))
    found = directory(world.hub.state)
    for name in ("n", "m"):
        world.found(world.join(name))
    world.push(0, 1.0)
    world.push(1, 1.0)
    world.settle()
    found.announce(replace(CARD, tokens_per_s=12.5, running=3, idle_s=4.0), 0.0)
    found.announce(replace(CARD, name="b", public_key=OTHER, running=2), 5.0)

    def exported(now):
        rest = {"merges": 0, "merge_s": 0.0, "journal": {"bytes": 0}, "standby": False}
        overview = hub_status(world.hub, now) | rest | {"servers": found.status(now)}
        page = MetricsPage(lambda: overview, "127.0.0.1", 0)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as answer:
                return answer.read().decode()
        finally:
            page.close()

    text = exported(1.0)
    assert 'aedit_server_running{server="alpha"} 3.0' in text
    assert 'aedit_node_weight{node="m"}' in text
    world.do([Left(1, "left")])
    text = exported(11.0)  # nothing has looked for silent servers yet
    of_alpha = sorted(line for line in text.splitlines() if 'server="alpha"' in line)
    assert of_alpha == [
        'aedit_server_banned{server="alpha"} 0.0',
        'aedit_server_idle_seconds_total{server="alpha"} 4.0',
        'aedit_server_idle_used_seconds_total{server="alpha"} 0.0',
        'aedit_server_up{server="alpha"} 0.0',
    ]
    assert 'aedit_server_running{server="b"} 2.0' in text
    assert 'aedit_node_accepted_pushes_total{node="m"}' in text
    of_gauges = set(re.findall(r"^# TYPE (\S+) gauge", text, re.MULTILINE))
    assert not [x for x in text.splitlines() if 'node="m"' in x and x.partition("{")[0] in of_gauges]
    assert 'aedit_node_weight{node="n"}' in text


def test_servers_are_no_members():
    """They join no quorum, hold no samples, found no run, and nobody is told of them as nodes."""
    world = World(plan(config(quorum="all")))
    found = directory(world.hub.state)
    found.announce(CARD, 0.0)
    assert world.hub.state.founder is None
    node = world.join("n")
    found.announce(replace(CARD, name="beta", public_key=OTHER, process=5), 100.0)
    assert world.hub.state.founder == node
    world.found(node)
    before = world.hub.state.units[0].version
    world.push(node, 1.0)
    world.settle()
    assert world.hub.state.units[0].version == before + 1  # `all` waits for nobody else
    assert run_news(world.hub, node, world.now).nodes == 1
    assert world.hub.state.mean_steps == 10 / 2  # of one node: one of two units has a push
    assert [node["name"] for node in hub_status(world.hub, world.now)["nodes"]] == ["n"]
    assert world.hub.state.pool.leases == {}
