"""Tests peers of a swarm whose disk is full: the part goes on, and they are back when there is room."""

from contextlib import ExitStack, suppress

import psutil
import pytest
from kit.full_disk import full_disk, limit_files
from kit.hub_processes import Client, HubRefused, HubUnreachable, status
from kit.peers_in_process import peers_here
from kit.swarm_processes import swarm
from kit.waiting import until
from test_older_folder import Part, in_sync, kept, owner_of, with_followers

from aedit.launch.config import parse_config

LIMIT_S = 90.0
CONFIG = parse_config(
    'name = "run"\n[swarm]\ndiscovery = "file"\nparts = 1\ncopies = 3\n[hub]\ncodec = "fp32"\n', "here"
)


def test_a_peer_whose_disk_is_full_goes_on_and_its_replica_is_back_once_there_is_room(tmp_path):
    """Found: the whole peer ended with a traceback, and was not back when there was room."""
    with ExitStack() as held:
        peers = held.enter_context(peers_here(tmp_path, CONFIG, 3))
        until(lambda: all(len(peers.places(n).replicas) == 3 for n in range(3)), "three replicas", LIMIT_S)
        owner = peers.hub(0)
        node = Client(peers.address(0)).found()
        until(lambda: owner._leadership.in_sync() == (2, 1), "two followers in sync", LIMIT_S)
        node.merged(0)

        def shown():
            rows = status(peers.peers[1].address)["peers"]
            return next(row["state"] for row in rows if row["name"] == "peer-1")

        with full_disk(tmp_path / "peer-1"):
            assert node.push(1).accepted, "the owner goes on without it"
            until(lambda: owner._leadership.in_sync()[0] == 1, "the owner to go on without it", LIMIT_S)
            peers.add("late")  # so that the peer has something to write
            until(lambda: "disk full" in shown(), "the peer to say so", LIMIT_S)
            assert node.push(1).accepted
            assert "no space" in peers.hub(1)._standby._full or "No space" in peers.hub(1)._standby._full
        until(lambda: owner._leadership.in_sync()[0] == 2, "it to be back", LIMIT_S)
        until(lambda: "disk full" not in shown(), "the peer to say nothing more", LIMIT_S)
        node.merged(0)
        assert kept(tmp_path / "peer-1" / "part_0") == set(node.accepted)
    assert not peers.errors


@pytest.fixture
def part(tmp_path):
    made = Part(tmp_path)
    made.start(0, founds=True)
    yield made
    made.end_all()


def test_a_replica_that_starts_while_its_disk_is_full_goes_on_and_follows_once_there_is_room(part):
    """Found: it could not write its address, and ended."""
    node = with_followers(part)
    part.end(1)
    address = part.folder_of(1) / "address"
    address.unlink()  # as its peer does
    until(lambda: part.running[0]._leadership.in_sync()[0] == 1, "the owner to go on without it", LIMIT_S)
    with full_disk(part.folder_of(1)):
        part.start(1)
        process = part.running[1]
        for _ in range(3):
            process.look()
        assert "no space" in status(process.address)["disk_full"].lower()
        assert not address.exists()
        node.merged(0)
    process.look()
    assert address.read_text() == process.address
    until(lambda: part.running[0]._leadership.in_sync()[0] == 2, "it to be back", LIMIT_S)
    assert status(process.address)["disk_full"] == ""
    node.merged(0)
    assert kept(part.folder_of(1)) == set(node.accepted)
    assert [len(part.events(1, f"address_{what}")) for what in ("unwritten", "written")] == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_owner", [True, False])
def test_a_machine_of_a_swarm_whose_disk_is_full(tmp_path, is_owner):
    """Found: nothing was acknowledged for as long as the owner's disk was full; a follower's peer ended."""
    with swarm(tmp_path, peers=3, parts=1, copies=3) as made:
        number, address = in_sync(made, 2)
        node = Client(address).found()
        node.merged(0)
        in_sync(made, 2)
        full = number if is_owner else (number + 1) % 3
        peer = psutil.Process(made.processes[full].pid)
        processes = [peer, *peer.children(recursive=True)]
        for process in processes:
            limit_files(process, 0)

        def accepted():
            with suppress(HubRefused, HubUnreachable):
                return node.push(1).accepted
            node.seqs[1] -= 1
            owner = owner_of(made)
            if owner is not None and owner[1] != node.address:
                with suppress(HubRefused, HubUnreachable):
                    node.go_to(owner[1])
            return False

        for _ in range(3):
            until(accepted, "a push to be acknowledged", LIMIT_S, 0.2)
        assert all(process.is_running() for process in processes)
        assert (owner_of(made)[0] == number) != is_owner
        for process in processes:
            limit_files(process)
        in_sync(made, 2)
        assert all(process.is_running() for process in processes)
        until(
            lambda: all(kept(one) >= set(node.accepted) for one in made.replicas(0)),
            "all pushes",
            LIMIT_S,
            0.5,
        )
        logs = [path.read_text() for path in tmp_path.glob("peers/*/*.log")]
        assert not [text for text in logs if "Traceback" in text]
