"""Tests a peer without its child processes: what it answers, what it hosts, and the card that it gives."""

import json
import time
from functools import partial
from types import SimpleNamespace

import pytest
from kit.statements import statement
from kit.swarm import card_of, key_of

from aedit.launch.config import parse_config
from aedit.launch.swarm import Peer, PeerOptions, peer_service
from aedit.launch.swarm import run_peer as peer_module
from aedit.launch.swarm.peer_service import OtherModels
from aedit.proto.rpc import HubClient, greet
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import NODE, GossipPlan, NodeState, PartReplica, ReplicasFile, decoded_card, write_node

CONFIG = parse_config('name = "r"\n[swarm]\ndiscovery = "file"\nparts = 2\ncopies = 2\n', "here")
LIMIT_S = 60.0


class Hosted:
    """A replica without a process: the owner of its part if it founds, else in sync."""

    made = ()

    def __init__(self, part, swarm, options, keys, *, founds, above=0):
        self.part, self.retired, self.is_over, self.others, self.faults = part, False, False, 2, ()
        self.state = PartReplica(address=f"127.0.0.1:{9000 + part}", term=1, leads=founds, in_sync=True)
        (options.folder(part)).mkdir(parents=True, exist_ok=True)

    def look(self):
        pass

    def compare(self, statements):
        pass

    def rest(self, rests):
        return rests

    def retire(self):
        self.retired = True

    def ask_to_end(self):
        pass

    def stop(self, limit_s):
        pass


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Return a function that starts a peer of the run; all end with the test."""
    monkeypatch.setattr(peer_module, "HostedPart", Hosted)
    monkeypatch.setattr(peer_module, "GossipPlan", partial(GossipPlan, every_s=0.05))
    monkeypatch.setattr(peer_service, "_LEAST_S", 0.3)
    monkeypatch.setattr(peer_service, "_STEADY_S", 0.2)
    made = []

    def start(name, *, founds=False, known=()):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        options = PeerOptions(directory=directory, name=name, peers=",".join(known), founds=founds)
        made.append(Peer(CONFIG, options))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.close()


def until(holds, peers):
    """Let the peers take turns until `holds`."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "not in time"
        for one in peers:
            one.turn()
        time.sleep(0.02)


def status(peer):
    client = HubClient(peer.address, None, call_timeout_s=10.0)
    try:
        return json.loads(client.status(pb.StatusRequest()).json)
    finally:
        client.close()


def test_a_peer_tells_a_joiner_the_configuration_of_the_run(peers):
    first = peers("first", founds=True)
    assert parse_config(greet(first.address, None).config, "there").swarm == CONFIG.swarm


def test_the_first_peer_founds_every_part_once(peers, tmp_path):
    first = peers("first", founds=True)
    assert sorted(first._hosted) == [0, 1]
    first.close()
    again = peers("first", founds=True)
    assert again._hosted == {}, "it was a member before: it follows what others have"


def test_peers_that_know_one_address_find_each_other_and_keep_the_parts_together(peers):
    first = peers("first", founds=True)
    others = [peers(name, known=[first.address]) for name in ("second", "third")]
    everybody = [first, *others]

    def replicas(one):
        return [part.replicas for part in ReplicasFile(one._options.directory / "replicas.json").parts()]

    until(lambda: all(len(one._known.live(time.monotonic())) == 3 for one in everybody), everybody)
    until(lambda: all(sum(part in one._hosted for one in everybody) >= 2 for part in range(2)), everybody)
    until(lambda: replicas(first) == replicas(others[0]) == replicas(others[1]), everybody)
    assert {peer["name"] for peer in status(others[1])["peers"]} == {"first", "second", "third"}
    assert all(part is None for part in status(first)["parts"]), (
        "nobody listens at the owners' addresses here"
    )


def test_a_part_whose_former_owner_follows_by_now_has_no_status(peers, monkeypatch):
    peer = peers("first", founds=True)
    told = {"127.0.0.1:9000": {"term": 2, "in_sync": 1}, "127.0.0.1:9001": {"term": 2, "follows": "b:1"}}

    def client(address, *args, **options):
        reply = pb.StatusReply(json=json.dumps(told[address]))
        return SimpleNamespace(status=lambda *request: reply, close=lambda: None)

    monkeypatch.setattr(peer_service, "HubClient", client)
    shown = [{"term": 2, "in_sync": 1, "owner": "127.0.0.1:9000"}, None]
    until(
        lambda: [part and {name: part[name] for name in shown[0]} for part in status(peer)["parts"]] == shown,
        [peer],
    )


def test_a_peer_that_leaves_says_so_and_is_not_chosen_any_more(peers):
    first = peers("first", founds=True)
    second = peers("second", known=[first.address])
    until(lambda: len(first._known.live(time.monotonic())) == 2, [first, second])
    second._card.leaving = True
    until(lambda: any(c.leaving for c in first._known.live(time.monotonic()).values()), [first, second])
    assert all(second._key.public not in view.ranked for view in first._views())


def test_a_peer_whose_own_key_others_shut_out_says_so_once(peers, caplog):
    first = peers("first")
    first._known.contradict(*(statement(value, key=first._key, run="r") for value in (1, 2)), 0.0)
    for _ in range(3):
        first.turn()
    said = [line for line in caplog.messages if "others have proof against this peer's key" in line]
    assert len(said) == 1
    assert "it has signed two values of version 7 of unit 5" in said[0]


def test_a_card_is_made_anew_when_something_changes_and_else_a_few_times_in_a_lease(peers):
    first = peers("first")
    before = first._card.current("h:1", {}, {}, NodeState())
    assert first._card.current("h:1", {}, {}, NodeState("", 2.0)) == before, "the speed alone can wait"
    assert first._card.current("h:2", {}, {}, NodeState("", 2.0)) != before
    again = decoded_card(first._card.current("h:1", {}, {}, NodeState("ab" * 32, 3.0)))
    assert (again.model, again.steps_per_s) == ("ab" * 32, 3.0)


def test_peers_show_what_each_one_does_and_name_another_model_once(peers, caplog):
    first = peers("first", founds=True)
    second, third = (peers(name, known=[first.address]) for name in ("second", "third"))
    everybody = [first, second, third]
    write_node(first._options.directory / NODE, NodeState("ab" * 32, 2.5))
    write_node(second._options.directory / NODE, NodeState("cd" * 32, 1.5))

    def told(peer):
        return {row["name"]: row for row in status(peer)["peers"]}

    until(lambda: len(told(first)) == 3 and told(first)["second"]["model"], everybody)
    found = told(first)
    assert [found[name]["role"] for name in ("first", "third")] == ["trains, keeps parts", "keeps parts"]
    assert [found[name]["steps_per_s"] for name in ("first", "second", "third")] == [2.5, 1.5, 0.0]
    assert [found[name]["state"] for name in ("first", "second")] == ["", "trains another model"]
    assert "trains another model" not in json.dumps(told(third)), "it has no model to compare"
    for _ in range(3):
        first.turn()
    said = [line for line in caplog.messages if line.startswith("second trains another model (cdcd")]
    assert len(said) == 1
    assert all(second._key.public in view.ranked for view in first._views()), "it can keep parts all the same"


def test_many_peers_with_other_models_fill_no_log(caplog):
    now, models = [0.0], OtherModels(clock=lambda: now[0])
    me, others = key_of(1), [key_of(number) for number in range(2, 12)]
    live = {me.public: card_of(me, model="ab" * 32)}
    live |= {key.public: card_of(key, model="cd" * 32) for key in others}
    for turn in range(200):
        now[0] = turn / 2
        models.name(live, me.public)
    assert len(caplog.messages) == len(others), "one line in five seconds, and one for each"
    models.name({me.public: live[me.public]}, me.public)
    assert models._named == {}, "of peers that are gone nothing is kept"


def test_a_peer_ends_when_all_its_parts_have_or_some_time_after_the_first(peers, monkeypatch):
    first = peers("first", founds=True)
    assert not first.is_over
    first._hosted[0].is_over = True
    assert not first.is_over, "a node may still leave the other part"
    monkeypatch.setattr(peer_module, "_LATE_S", 0.0)
    assert first.is_over
    monkeypatch.undo()
    first._hosted[1].is_over = True
    assert first.is_over
