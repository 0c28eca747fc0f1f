"""Tests discovery by hivemind's hash table: real nodes on loopback, and programs that play its process."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from kit import discovery_contract
from kit.swarm import RUN, card_of, data_of, key_of
from kit.waiting import until

from aedit.proto.dht import DhtDiscovery, DhtSettings
from aedit.proto.dht.dht import COMMAND, KeptNode
from aedit.proto.dht.dht_process import MOST_RECORDS, CardsOnly, prune, record_key
from aedit.proto.swarm import Gossip, GossipPlan, KnownPeers, encoded_card
from aedit.types import UserError

STRANGER = Path(__file__).parent / "kit" / "dht_stranger.py"
START_S = 60.0


def dht(*initial, **changes):
    settings = {"run": RUN, "listen": ("/ip4/127.0.0.1/tcp/0",), "every_s": 0.2, "initial_peers": initial}
    return DhtDiscovery(DhtSettings(**settings | changes))


def up(discovery):
    """Wait for the first look at the table, and return the node's addresses."""
    until(lambda: discovery.state == "", "the table", limit_s=START_S)
    return discovery.maddrs


def gone(pids):
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def store_as_stranger(maddr, records):
    """Store (subkey or None, value, lifetime) under the key of the run; return how many were taken."""
    line = json.dumps([[subkey and subkey.hex(), value.hex(), lasts_s] for subkey, value, lasts_s in records])
    words = [sys.executable, str(STRANGER), maddr, record_key(RUN)]
    done = subprocess.run(words, input=line, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


# -- real nodes


class TablePeer:
    """A peer with real sockets that finds others by a table."""

    def __init__(self, number, discovery):
        self.key, self.number = key_of(number), number
        self.known = KnownPeers(RUN, self.key.public)
        plan = GossipPlan(listen="127.0.0.1:0", every_s=0.1)
        self.gossip = Gossip(self.known, self.key, self.card, discovery, plan)

    def card(self):
        name, address = f"p{self.number}", self.gossip.address
        return encoded_card(card_of(self.key, time.time_ns(), name=name, address=address), self.key.private)


def socket_of(p2pd):
    """Return the socket at which this p2pd listens, by its command line."""
    words = Path(f"/proc/{p2pd}/cmdline").read_text().split("\0")
    return Path(
        next(word for word in words if word.startswith("-listen=/unix")).removeprefix("-listen=/unix")
    )


@pytest.mark.slow
def test_two_peers_find_each_other_by_the_table_and_go_on_without_it():
    first = dht()
    second = dht(*up(first))
    peers = [TablePeer(1, first), TablePeer(2, second)]
    try:
        for peer in peers:
            peer.gossip.start()

        def complete():
            return all(len(peer.known.live(time.monotonic())) == 2 for peer in peers)

        until(complete, "two peers", limit_s=START_S)
        pids = (*first.pids, *second.pids)
        assert len(pids) == 4
        sockets = [socket_of(peer.pids[1]) for peer in (first, second)]
        assert all(path.exists() for path in sockets)
        for pid in pids:
            kill(pid)
        until(lambda: "no hash table since" in peers[0].gossip.state, "a word about the table")
        assert complete()
    finally:
        for peer in peers:
            peer.gossip.close()
    assert gone(pids)
    assert not any(path.exists() for path in sockets)
    assert (first.pids, second.pids) == ((), ())


@pytest.mark.slow
def test_two_nodes_that_are_killed_at_once_begin_alone_at_their_addresses_and_meet_again(tmp_path, caplog):
    keys = [tmp_path / "1", tmp_path / "2"]
    with closing(dht(identity=keys[0])) as first, closing(dht(*up(first), identity=keys[1])) as second:
        maddrs = [up(first), up(second)]
        until(lambda: len(first._kept.nodes) == len(second._kept.nodes) == 1, "each to know the other")
        pids = (*first.pids, *second.pids)
        for pid in pids:
            kill(pid)
        until(lambda: first.state and second.state, "a word about it")
        assert [up(first), up(second)] == maddrs
        assert not {*first.pids, *second.pids} & {*pids}
        second.announce(discovery_contract.card_of_number(2))
        until(lambda: discovery_contract.mentions(first.found(), 2), "the second peer", limit_s=START_S)
    assert caplog.text.count("the hash table is back after") == 2


class TableMeeting:
    """Peers in one table."""

    def __init__(self):
        self.opened = []

    def open(self, number):
        initial = up(self.opened[0]) if self.opened else ()
        self.opened.append(dht(*initial))
        return self.opened[-1]

    def introduce(self, number):
        pass

    def spoil(self):
        long = time.time()
        garbage = [
            (None, b"\xc0", 100.0),
            (None, b"x", long),
            (b"y" * 32, b"nonsense", 100.0),
            (key_of(2).public, discovery_contract.card_of_number(2), long),
            (b"z" * 32, discovery_contract.card_of_number(2), 100.0),
            (key_of(2).public, data_of(key_of(2), run="other"), 100.0),
        ]
        assert store_as_stranger(up(self.opened[0])[0], garbage) == 0

    def break_down(self):
        for each in self.opened:
            for pid in each.pids:
                kill(pid)

    def mend(self):
        pass

    def processes_of(self, one):
        return [pid for pid in one.pids if not gone([pid])]

    def close(self):
        for each in self.opened:
            each.close()


@pytest.mark.slow
@pytest.mark.parametrize("promise", discovery_contract.PROMISES, ids=lambda promise: promise.__name__)
def test_by_a_table(promise):
    meeting = TableMeeting()
    try:
        promise(meeting)
    finally:
        meeting.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["process", "p2pd", "p2pd stopped"])
def test_a_process_that_is_killed_or_stopped_is_replaced_and_leaves_nothing(what):
    with closing(dht()) as first, closing(dht(*up(first), silent_s=6.0)) as second:
        up(second)
        pids = second.pids
        os.kill(pids[what != "process"], signal.SIGSTOP if "stopped" in what else signal.SIGKILL)
        until(lambda: "no hash table since" in second.state, "a word about it", limit_s=60.0)
        up(second)
        assert not set(second.pids) & set(pids)
        until(lambda: gone(pids), "the end of the old processes")
        first.announce(discovery_contract.card_of_number(1))
        until(lambda: discovery_contract.mentions(second.found(), 1), "the card of the first peer")


@pytest.mark.slow
def test_a_table_is_joined_again_by_way_of_others_when_the_first_node_has_gone():
    with closing(dht()) as first:
        second = dht(*up(first))
        third = dht(*up(first))
        with closing(second), closing(third):
            up(second)
            until(lambda: len(third._kept.nodes) == 2, "its neighbours", limit_s=START_S)
            first.close()
            kill(third.pids[0])
            until(lambda: third.state, "a word about it")
            second.announce(discovery_contract.card_of_number(2))
            until(lambda: discovery_contract.mentions(third.found(), 2), "the second peer", limit_s=START_S)


@pytest.mark.slow
def test_a_client_has_no_address_and_announces_and_finds():
    with closing(dht()) as first, closing(dht(*up(first), client=True)) as client:
        up(client)
        assert client.maddrs == ()
        first.announce(discovery_contract.card_of_number(1))
        client.announce(discovery_contract.card_of_number(2))
        until(lambda: discovery_contract.mentions(client.found(), 1), "the first peer")
        until(lambda: discovery_contract.mentions(first.found(), 2), "the client")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allow", "taken"), [((), 200), ((key_of(1).public,), 0)], ids=["open", "allow-list"]
)
def test_two_hundred_records_of_made_up_peers_are_hints_beside_the_true_one_or_not_even_stored(allow, taken):
    with closing(dht(allow=allow)) as first, closing(dht(*up(first), allow=allow)) as second:
        up(second)
        first.announce(discovery_contract.card_of_number(1))
        keys = [(n, key_of(1000 + n)) for n in range(200)]
        sybils = [(key.public, data_of(key, address=f"10.9.0.{n}:1"), 300.0) for n, key in keys]
        assert store_as_stranger(up(first)[0], sybils) == taken
        for each in (first, second):
            until(lambda each=each: len(each.found()) == taken + 1, "all records")
            assert discovery_contract.mentions(each.found(), 1)


@pytest.mark.slow
def test_who_knows_nothing_but_an_address_finds_the_peers_of_any_run():
    with closing(dht()) as first, closing(dht(*up(first)[:1], run="", client=True)) as joiner:
        first.announce(discovery_contract.card_of_number(1))
        until(lambda: discovery_contract.mentions(joiner.found(), 1), "the peer", limit_s=START_S)
        assert first.introduction == ",".join(first.maddrs) != ""


@pytest.mark.slow
def test_a_wrong_clock_is_named_with_its_difference():
    behind = "import time; now = time.time; time.time = lambda: now() - 7; import runpy;"
    program = behind + "runpy.run_module('aedit.proto.dht.dht_process', run_name='__main__')"
    with closing(dht()) as first:
        settings = DhtSettings(
            run=RUN, initial_peers=up(first), listen=("/ip4/127.0.0.1/tcp/0",), every_s=0.2
        )
        with closing(DhtDiscovery(settings, command=(sys.executable, "-c", program))) as second:
            until(lambda: "clock is" in second.state, "a word about the clock", limit_s=START_S)
            assert "this machine's clock is 7.0 s behind those of other peers" in second.state
            assert first.state == ""


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_has_started_them():
    program = (
        "import sys, time; from aedit.proto.dht.dht import *\n"
        "d = DhtDiscovery(DhtSettings(run='r', listen=('/ip4/127.0.0.1/tcp/0',), every_s=0.2))\n"
        "while d.state: time.sleep(0.05)\n"
        "print(*d.pids, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    until(lambda: gone(pids), "the end of the processes")


@pytest.mark.slow
def test_nodes_that_are_not_there_are_named_and_asked_again():
    dead = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWQccLvRLfDPLEMbAS6uSxo3Pc6fg6kLeL6hoDtP1EtBnK"
    with closing(dht(dead)) as discovery:
        until(lambda: "Daemon failed to start" in discovery.state, "the reason", limit_s=START_S)
        before = discovery.state.partition(":")[0]
        until(lambda: discovery.failures > 1, "another try", limit_s=START_S)
        assert discovery.state.startswith(before)  # since when has not changed


# -- programs that play the process


def played(program, **changes):
    """Return a discovery whose process runs this; `say` writes a message, `found` is a good one."""
    opening = (
        "import sys, json, time, os, signal\n"
        "def say(**message): print(json.dumps(message), flush=True)\n"
        "found = dict(found=['YQ=='], skew_s=None, maddrs=['/m'], neighbours=[])\n"
        "settings = json.loads(sys.stdin.readline())\n"
    )
    settings = DhtSettings(**{"run": RUN, "silent_s": 0.5} | changes)
    return DhtDiscovery(settings, command=(sys.executable, "-S", "-c", opening + program))


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("sys.exit(3)", "its process has ended"),
        ("say(error='ValueError: no\\n\\x1b[2J'); sys.exit(1)", "ValueError: no??[2J"),
        ("say(**found); time.sleep(100)", "its process has said nothing for 0.5 s"),
        ("say(p2pd=1); os.kill(os.getpid(), signal.SIGSTOP)", "its process has said nothing for 0.5 s"),
        ("print('no message', flush=True); time.sleep(100)", "its process has ended"),
        ("print('[1]', flush=True); time.sleep(100)", "its process has ended"),
        ("say(found=['YQ'], skew_s=0, maddrs=[], neighbours=[]); time.sleep(100)", "Incorrect padding"),
        ("say(**found | {'skew_s': 'x'}); time.sleep(100)", "could not convert string to float"),
    ],
)
def test_whatever_the_process_does_the_caller_is_told_and_not_held_up(program, named):
    silent_s = 0.5 if "0.5 s" in named else 20.0  # a busy machine may take longer to start a process
    with closing(played(program, silent_s=silent_s)) as discovery:
        until(lambda: named in discovery.state, named)
        assert discovery.state.startswith("no hash table since 20")
        discovery.announce(data_of(key_of(1)))
        assert discovery.found() in ((), (b"a",))
        before = discovery.state[:45]
        until(lambda: discovery.failures >= 1, "the end of the try")
        assert discovery.state[:45] == before


def test_a_table_that_fails_at_its_start_is_said_to_be_back_when_it_is_up(tmp_path, caplog):
    """Found: "no hash table" was logged, and nothing when there was one."""
    program = f"""
from pathlib import Path
before = Path({str(tmp_path / "before")!r})
if not before.exists():
    before.touch()
    sys.exit(1)
say(**found)
time.sleep(100)
"""
    with closing(played(program, silent_s=20.0)) as discovery:
        until(lambda: discovery.found() == (b"a",), "the table")
    assert caplog.text.count("no hash table: its process has ended") == 1
    assert caplog.text.count("the hash table is back after") == 1
    caplog.clear()
    with closing(played("say(**found); time.sleep(100)", silent_s=20.0)) as discovery:
        until(lambda: discovery.found() == (b"a",), "the table")
    assert "the hash table is back after" not in caplog.text, "nothing had failed"


def test_the_process_gets_the_settings_and_each_new_card_and_its_answers_are_kept():
    program = (
        "say(**found | {'maddrs': [settings['run'], *settings['listen']]})\n"
        "for line in sys.stdin: say(**found | {'found': [json.loads(line)['card']], 'skew_s': -4.5})\n"
    )
    with closing(played(program, silent_s=20.0)) as discovery:
        until(lambda: discovery.found() == (b"a",), "the first answer")
        assert discovery.maddrs == (RUN, "/ip4/0.0.0.0/tcp/0")
        assert discovery.state == ""
        for serial in (1, 2):
            card = data_of(key_of(1), serial)
            discovery.announce(card)
            until(lambda card=card: discovery.found() == (card,), "the card")
        assert discovery.state == (
            "this machine's clock is 4.5 s ahead of those of other peers, and 3 s are possible: set it"
        )
        (pid,) = discovery.pids
    assert gone([pid])


def test_a_node_that_was_in_the_table_calls_the_last_ones_and_begins_alone_in_every_second_try(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("aedit.proto.dht.dht._FIRST_PAUSE_S", 0.01)
    given, met = f"/ip4/10.0.0.1/tcp/1/p2p/{'A' * 44}", f"/ip4/10.0.0.2/tcp/2/p2p/{'B' * 44}"
    tries = tmp_path / "tries"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        f"tries = open({str(tries)!r}, 'a+'); tries.seek(0); is_first = not tries.read()\n"
        "print(json.dumps(settings), file=tries, flush=True)\n"
        f"told = found | dict(maddrs=['/ip4/127.0.0.1/tcp/{port}/p2p/x'], neighbours=[{met!r}])\n"
        "if is_first: say(**told); say(**told | dict(neighbours=[]))\n"
    )
    place = {"identity": tmp_path / "key", "initial_peers": (given,), "listen": ("/ip4/127.0.0.1/tcp/0",)}

    def told():
        return [json.loads(line) for line in tries.read_text().splitlines()] if tries.exists() else []

    with closing(played(program, silent_s=20.0, **place)):
        until(lambda: len(told()) > 3, "four tries")
    initial = [settings["initial_peers"] for settings in told()[:4]]
    assert initial == [[given], [given, met], [], [given, met]]
    assert [settings["listen"] for settings in told()[:2]] == [
        ["/ip4/127.0.0.1/tcp/0"],
        [f"/ip4/127.0.0.1/tcp/{port}"],
    ]
    assert told()[2]["known"] == [given, met]
    assert caplog.text.count("no hash table: ") == 1, "an outage is told once"
    tries.unlink()
    with closing(played(program, silent_s=20.0, **place)):
        until(told, "the first try of the next start")
    assert told()[0]["initial_peers"] == [given, met]


def test_what_a_node_keeps_is_used_if_it_can_be_read_and_the_port_is_free(tmp_path):
    identity, maddr = tmp_path / "dht_key", "/ip4/127.0.0.1/tcp/0"
    assert KeptNode.load(identity) == KeptNode.load(None) == KeptNode()
    node = f"/ip4/10.0.0.1/tcp/7/p2p/{'A' * 44}"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        kept = KeptNode().renewed([f"/ip4/127.0.0.1/tcp/{port}/p2p/x"], [node])
        kept.save(identity)
        assert KeptNode.load(identity) == kept == KeptNode(port, (node,))
        assert kept.renewed([], []) == kept
        assert kept.listening(maddr) == maddr, "another program has the port"
    assert kept.listening(maddr) == f"/ip4/127.0.0.1/tcp/{port}"
    assert kept.listening("/ip4/127.0.0.1/tcp/5") == "/ip4/127.0.0.1/tcp/5"
    for garbage in ("", "[]", '{"port": "x"}', '{"nodes": 3}', '{"port": 1e9, "nodes": ["x", 5]}'):
        (tmp_path / "dht_key.last.json").write_text(garbage)
        assert KeptNode.load(identity) == KeptNode()


def test_a_process_that_does_not_read_is_replaced():
    with closing(played("while True: say(**found); time.sleep(0.003)", silent_s=20.0)) as discovery:
        until(lambda: discovery.found(), "the first answer")
        serial = 0

        def refused():
            nonlocal serial
            serial += 1
            discovery.announce(data_of(key_of(1), serial, model="a" * 64, fingerprint="b" * 64))
            return "reads nothing" in discovery.state

        until(refused, "the end of its patience", limit_s=60.0)


def test_without_hivemind_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'aedit\[swarm\]'"):
        DhtDiscovery(DhtSettings(run=RUN))


@pytest.mark.parametrize("maddr", ["10.0.0.1:7001", "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1/p2p/x", ""])
def test_an_address_that_is_none_is_refused(maddr):
    with pytest.raises(UserError, match="is not the address of a peer"):
        DhtDiscovery(DhtSettings(run=RUN, initial_peers=(maddr,)))


# -- what a node stores


def record(value, key=None, subkey=None, lasts_s=10.0):
    key, subkey = key or f"aedit peers 1/{RUN}".encode(), subkey or key_of(1).public
    return SimpleNamespace(key=key, subkey=subkey, value=value, expiration_time=time.time() + lasts_s)


def cards_only(allow=()):
    def loads(data):
        if data == b"bomb":
            raise RuntimeError("not even a value")
        return data

    return CardsOnly(lambda run: record_key(run).encode(), loads, list(allow))


def test_a_node_stores_signed_cards_under_their_run_and_key_for_a_lease_and_nothing_else():
    check, card = cards_only().validate, data_of(key_of(1))
    assert check(record(card))
    assert check(record(card, lasts_s=300.0))
    assert check(record(card, key=b"aedit peers 1/"))
    for wrong in (
        record(card, lasts_s=1e9),
        record(card, lasts_s=float("inf")),
        record(card, key=b"aedit peers 1/another run"),
        record(card, subkey=key_of(2).public),
        record(card, subkey=b"bomb"),
        record(b"bomb"),
        record(b"garbage"),
        record(card[:-1]),
        record(data_of(key_of(1), run="other")),
    ):
        assert not check(wrong)
    assert not cards_only([key_of(2).public.hex()]).validate(record(card))
    assert cards_only([key_of(1).public.hex()]).validate(record(card))
    assert check(record(card)) == (
        cards_only().sign_value(record(card)) == cards_only().strip_value(record(card))
    )


class Held(dict):
    """A dictionary as hivemind stores it."""

    @property
    def data(self):
        return self


def test_surplus_records_are_dropped_and_plain_values_left_alone():
    many = Held(dict.fromkeys(range(MOST_RECORDS + 100), b""))
    few = Held({1: b""})
    storage = {n: SimpleNamespace(value=value) for n, value in enumerate((many, few, b"x" * 1000))}
    prune(SimpleNamespace(protocol=SimpleNamespace(storage=storage, cache={})))
    assert (len(many), len(few)) == (MOST_RECORDS, 1)
    assert COMMAND[-1] == "aedit.proto.dht.dht_process"
