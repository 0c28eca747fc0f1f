"""Tests whole runs of a swarm from the command line: real processes, of which some are killed."""

import json
import shutil
import signal

import psutil
import pytest
from kit.places import LIMIT_S, Place, ends_well, named
from kit.waiting import until

from aedit.launch.cli import main
from aedit.launch.views.sources import HubSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOML = """
name = "x"
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2 }}
[data]
source = "{directory}/text.txt"
seq_len = 32
held_out = 0.3
[train]
steps = {steps}
batch_size = 2
eval_samples = 4
[edit]
every = 4
schedule = "dylu"
landing = "arrival"
[outer]
lr = 0.7
momentum = 0.5
[hub]
quorum = 1
heartbeat_s = 0.1
expire_s = 3.0
lease_samples = 64
[swarm]
discovery = "{discovery}"
parts = 2
copies = 3
"""


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.end()


def replicas(place, name):
    path = place.directory / "runs" / "x" / "peers" / name / "replicas.json"
    return json.loads(path.read_text())["parts"] if path.exists() else []


def run_of(place, nodes=3):
    return place.aedit("run", place.toml, "--local", nodes, f"--dir={place.directory}/runs")


def kept_by_all(place, name):
    """Return whether every part has an owner and three replicas, as this peer knows."""
    parts = replicas(place, name)
    return len(parts) == 2 and all(part["owner"] and len(part["replicas"]) == 3 for part in parts)


def machine(place, name):
    """Return the processes of a peer: itself and the hubs that it hosts."""
    (peer,) = place.processes("aedit.launch.swarm.run_peer", named(name))
    return [peer, *peer.children(recursive=True)]


@pytest.mark.parametrize("discovery", ["file", "hivemind"])
def test_a_local_swarm_ends_with_a_report_and_leaves_no_process(place, discovery):
    place.configure(TOML, steps=40, discovery=discovery)
    out = ends_well(run_of(place))
    assert "run x: 3 nodes" in out
    assert [place.events(node)[-1]["reason"] for node in range(3)] == ["done"] * 3
    assert place.processes() == []
    assert main(["export", str(place.directory / "runs" / "x"), str(place.directory / "out")]) == 0


def test_a_node_that_starts_after_the_others_are_done_is_told_so_at_once(place):
    place.configure(TOML, steps=20, discovery="file")
    run = run_of(place)
    place.hold_until_the_others_are_done("local-2", [0, 1])
    ends_well(run, place)
    assert [place.events(node)[-1]["reason"] for node in range(3)] == ["done"] * 3
    assert place.processes() == []


def test_a_run_goes_on_when_the_peer_that_began_it_is_killed_and_ends_well(place):
    place.configure(TOML, steps=400, discovery="file")
    run = run_of(place)
    until(lambda: kept_by_all(place, "local-1"), "three replicas of each part", LIMIT_S)
    until(lambda: any(e["event"] == "round" for e in place.events(1)), "a round", LIMIT_S)
    before = len([e for e in place.events(1) if e["event"] == "round"])
    victims = machine(place, "local-0")
    for process in victims:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(victims, 10)
    rounds = "rounds without the peer that began the run"
    until(lambda: len([e for e in place.events(1) if e["event"] == "round"]) > before + 2, rounds, LIMIT_S)
    ends_well(run)
    assert [place.events(node)[-1]["reason"] for node in range(3)] == ["done"] * 3
    assert all(sum(e["event"] == "start" for e in place.events(node)) == 1 for node in (1, 2))
    assert place.processes() == []


def rounds(place, node):
    return [event for event in place.events(node) if event["event"] == "round"]


def test_training_goes_on_when_the_only_replica_of_all_units_is_lost_for_good(place):
    """One part in one copy: what most peers found again has leases, pace and progress of the run, too."""
    toml = TOML.replace("parts = 2", "parts = 1").replace("copies = 3", "copies = 1\nlost_s = 8.0")
    place.configure(toml, steps=1_000_000, discovery="file")
    run_of(place)
    peers = place.directory / "runs" / "x" / "peers"
    until(lambda: all(len(rounds(place, node)) > 3 for node in range(3)), "rounds", LIMIT_S)
    kept = lambda: sorted(peers.glob("*/part_0/part.json"))  # noqa: E731 - asked again and again
    until(
        lambda: len(kept()) == 1 and len(replicas(place, "local-1")[0]["replicas"]) == 1, "one copy", LIMIT_S
    )
    lost = kept()[0].parent.parent
    victims = machine(place, lost.name)
    for process in victims:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(victims, 10)
    shutil.rmtree(lost / "part_0", ignore_errors=True)  # a child that ends takes files away, too
    left = [node for node in range(3) if f"local-{node}" != lost.name]
    before = {node: rounds(place, node)[-1] for node in left}

    def again():
        return [
            line
            for path in peers.glob("*/part_0/events.jsonl")
            for line in path.open()
            if "goes_on_from" in line
        ]

    until(again, "an anchor to go on from", LIMIT_S)
    until(
        lambda: all(rounds(place, n)[-1]["step"] > before[n]["step"] + 100 for n in left), "training", LIMIT_S
    )
    found = [json.loads(line) for line in again()]
    assert len({event["unit"] for event in found}) == len(found) > 2
    assert all(event["version"] > 1 for event in found), "not the weights of the beginning"
    assert all(sum(e["event"] == "start" for e in place.events(node)) == 1 for node in left)


def test_a_node_joins_with_the_address_of_any_peer_and_its_peer_keeps_parts(place):
    place.configure(TOML, steps=1_000_000, discovery="file")
    run = run_of(place, 2)
    until(
        lambda: replicas(place, "local-1") and all(p["owner"] for p in replicas(place, "local-1")), "owners"
    )
    address = (place.directory / "runs" / "x" / "peers" / "local-1" / "address").read_text()
    joined = place.aedit("join", address, "--as=new", f"--dir={place.directory}/other", "--device=cpu")
    path = place.directory / "other" / "x" / "peers" / "new" / "replicas.json"
    until(path.exists, "the joiner's peer", LIMIT_S)

    def keeps():
        parts = json.loads(path.read_text())["parts"]
        return len(parts) == 2 and all(len(part["replicas"]) == 3 for part in parts)

    until(keeps, "a third replica of each part", LIMIT_S)

    def merged():
        found = (place.directory / "other" / "x" / "nodes").glob("*/events.jsonl")
        return any(json.loads(line)["event"] == "round" for file in found for line in file.open())

    until(merged, "a push of the joiner to be merged", LIMIT_S)
    source = HubSource(address)

    def are_shown():
        seen = source.poll().swarm
        peers = {peer.name: peer for peer in seen.peers}
        return (
            peers.keys() == {"local-0", "local-1", "new"}
            and all(peer.role == "trains, keeps parts" and peer.steps_per_s > 0 for peer in seen.peers)
            and {len(peer.model) for peer in seen.peers} == {64}
            and len({peer.model for peer in seen.peers}) == 1
            and all(part.digest and part.bytes_in and part.bytes_out for part in seen.parts)
        )

    until(are_shown, "speed and model of each peer, digest and bytes of each part", LIMIT_S)
    source.close()
    assert main(["export", address, str(place.directory / "from_a_peer")]) == 0
    for process in (joined, run):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
    assert place.processes() == []


def test_peers_and_a_client_train_over_tls_with_the_keys_of_a_swarm(place):
    keys = place.directory / "keys"
    ends_well(place.aedit("keys", keys, "--peer=alice=127.0.0.1", "--peer=bob=127.0.0.1", "--node=carol"))
    place.configure(
        TOML.replace("quorum = 1", "quorum = 1\ncertificates = true"), steps=300, discovery="file"
    )
    run = place.aedit("run", place.toml, f"--dir={place.directory}/runs", f"--keys={keys}/alice")
    until(
        lambda: len(found := replicas(place, "alice")) == 2 and all(p["owner"] for p in found),
        "owners",
        LIMIT_S,
    )
    address = (place.directory / "runs" / "x" / "peers" / "alice" / "address").read_text()
    ends = {"bob": [], "carol": ["--swarm.listen", ""]}
    joined = [
        place.aedit(
            "join", address, f"--keys={keys}/{name}", f"--dir={place.directory}/{name}", "--device=cpu", *more
        )
        for name, more in ends.items()
    ]
    for process in (run, *joined):
        ends_well(process)
    for name in ends:
        (events,) = (place.directory / name / "x" / "nodes").glob("*/events.jsonl")
        assert any(json.loads(line)["event"] == "round" for line in events.read_text().splitlines()), name
    hosted = place.directory / "bob" / "x" / "peers" / "bob"
    assert sorted(path.name for path in hosted.glob("part_*") if path.is_dir()) == ["part_0", "part_1"]
    assert not list((place.directory / "carol" / "x" / "peers" / "carol").glob("part_*"))
    assert place.processes() == []
