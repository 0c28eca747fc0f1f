"""Tests the line `run` of policy versions at a real hub: made of its anchors while a server is there."""

import json
from threading import Lock
from types import SimpleNamespace

import pytest
import torch
from kit.hub_machine import World, config, plan
from kit.hub_processes import Client, HubProcess, HubRefused, ending, until, write_run
from kit.servers import Announcer

from aedit.async_sgd.rules import UnitRule
from aedit.launch.hub.policy_versions import RECORD, PolicyPublisher
from aedit.proto.rpc import Refusal
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions import Manifest, Receiving, VersionLayout, VersionsClient, VersionStore
from aedit.types import Layout, TensorLayout, UnitLayout

RL = """
[prompts]
source = "x.jsonl"
[reward]
functions = ["exact"]
[rl]
engine_dtype = "{dtype}"
"""
NUMELS = (5000, 70)
LAYOUT = Layout(tuple(UnitLayout(f"unit{i}", (TensorLayout("w", (n,)),)) for i, n in enumerate(NUMELS)))


class Follower:
    """What a rollout server does with the line: it asks for the newest version and fetches it."""

    def __init__(self, address, dtype):
        self.client, self.store = VersionsClient(address), VersionStore(VersionLayout(LAYOUT, dtype), ring=2)
        self.store.open("run")
        self.serial = 0

    def fetch(self):
        """Return the next version and its values, once there is one."""
        manifest = until(lambda: self.newer(), "a version")
        receiving = Receiving(self.store, manifest)
        self.client.fetch(receiving)
        receiving.finish()
        self.serial = manifest.serial
        with self.store.hold("run", manifest.serial) as units:
            return manifest, {name: values.copy() for name, values in units.items()}

    def newer(self):
        found = self.client.newest("run", after=self.serial, wait_s=1.0)
        return found if found is not None and found.serial > self.serial else None


def rounded(anchor, dtype):
    """Return the patterns of an anchor as torch rounds it."""
    values = torch.from_numpy(anchor.copy())
    if dtype == "bf16":
        return values.to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    return values.view(torch.int32).numpy().view("uint32")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_versions_have_the_anchors_in_the_engines_dtype_and_none_is_made_for_nobody(tmp_path, dtype):
    toml = write_run(tmp_path, RL.format(dtype=dtype))
    hub = HubProcess(toml, tmp_path / "hub")
    with ending():
        follower = Follower(hub.address, dtype)
        assert follower.newer() is None  # nobody has brought weights
        node = Client(hub.address).found()
        assert follower.newer() is None  # and nobody serves
        server = Announcer(hub.address)
        server.announce()
        manifest, values = follower.fetch()
        assert (manifest.line, manifest.serial, manifest.parent, manifest.dtype) == ("run", 1, 0, dtype)
        for unit in range(len(NUMELS)):
            assert (values[f"unit{unit}"] == rounded(node.anchor(unit)[1], dtype)).all()

        node.merged(0)  # unit0 is at version 2, the policy at 1
        assert follower.newer() is None
        node.merged(0)
        node.merged(1)
        manifest, values = follower.fetch()
        assert manifest.serial == 2
        assert {unit.name: unit.version for unit in manifest.units} == {"unit0": 3, "unit1": 2}
        for unit in range(len(NUMELS)):
            assert (values[f"unit{unit}"] == rounded(node.anchor(unit)[1], dtype)).all()
        said = refusal(lambda: server.announce(serial=3))
        assert "serial is 3; the newest version of this run is 2" in said
        assert not server.announce(serial=2).banned

        server.client.withdraw("alpha", 11)
        until(lambda: follower.client.newest("run") is None, "the end of the versions")
        hub.kill()
        again = HubProcess(toml, tmp_path / "hub")
        Announcer(again.address).announce()
        late = Follower(again.address, dtype)
        manifest, found = late.fetch()
        assert manifest.serial == 2
        assert all((found[name] == values[name]).all() for name in values)
        assert json.loads((tmp_path / "hub" / RECORD).read_text())["serial"] == 2


def refusal(call):
    with pytest.raises(HubRefused) as caught:
        call()
    return str(caught.value)


class Author:
    """`PolicyPublisher` over a hub on its own clock, without its thread."""

    def __init__(self, world, record, ring=4):
        self.world, self.servers, self.synced = world, 1, []
        ledger = SimpleNamespace(
            lock=Lock(), hub=world.hub, clock=lambda: world.now, durable=self.synced.append
        )
        ledger.journal = SimpleNamespace(position=(1, 2))
        self.versions = PolicyPublisher(
            ledger, lambda now: self.servers, dtype="bf16", ring=ring, record=record
        )

    def newest(self):
        """Let the thread look once; return the newest manifest, None if there is none."""
        self.versions.turn()
        try:
            core = self.versions.core
            return core and Manifest.from_message(core.newest(pb.NewestRequest(line="run")))
        except Refusal:
            return None


def merge(world, *units):
    for unit in units:
        world.push(0, 1.0, unit)
        world.settle()


def test_a_serial_never_stands_for_other_values_even_after_a_restart(tmp_path):
    world = World(plan(config()))
    world.found(world.join("n"))
    first = Author(world, tmp_path / "policy.json").newest()
    assert first.serial == 1
    assert Author(world, tmp_path / "policy.json").newest() == first  # a new process with the same anchors
    merge(world, 0)
    again = Author(world, tmp_path / "policy.json")
    assert again.newest() is None  # the first unit has changed since version 1 was made
    merge(world, 1)
    assert again.newest().serial == 2
    assert again.synced, "an anchor that a crash could take back is never told"


def test_memory_is_bounded_by_the_ring_and_free_when_the_last_server_has_gone(tmp_path):
    world = World(plan(config()))
    world.found(world.join("n"))
    author = Author(world, tmp_path / "policy.json", ring=3)
    sizes, serials = [], []
    for _ in range(12):
        merge(world, 0, 1)
        serials.append(author.newest().serial)
        sizes.append(author.versions.num_bytes)
    assert serials == list(range(2, 14))
    assert max(sizes) <= (3 + 1) * 2 * 13  # of 13 values in bf16, one set of spare buffers
    author.servers = 0
    assert author.newest() is None
    assert author.versions.num_bytes <= 2 * 13
    author.servers = 1
    assert author.newest().serial == 13


def test_the_unit_of_a_drafter_is_no_part_of_the_policy(tmp_path):
    world = World(plan(config(), rules={"second": UnitRule()}))
    world.found(world.join("n"))
    author = Author(world, tmp_path / "policy.json")
    assert [unit.name for unit in author.newest().units] == ["first"]
    merge(world, 0)
    assert author.newest().serial == world.hub.state.policy_version == 2


def test_the_weight_that_is_shown_is_that_of_a_push_of_the_model():
    world = World(plan(config(), rules={"second": UnitRule()}))
    node = world.join("n")
    world.found(node)
    world.push(node, 1.0)
    world.settle()
    shown = world.hub.state.members[node].weight
    assert shown > 0
    world.push(node, 0.0, unit=1, steps=0, tokens=0)  # a drafter that was not trained
    world.settle()
    assert world.hub.state.units[1].version == 2
    assert world.hub.state.members[node].weight == shown


def test_hubs_that_split_the_units_say_that_none_has_the_whole_policy(tmp_path):
    toml = write_run(tmp_path)
    hubs = "--hub.address=127.0.0.1:0,127.0.0.1:0"
    part = HubProcess(toml, tmp_path / "hub_1", hubs, "--part=1/2")
    with ending():
        assert "hub.address names 2 hubs" in refusal(lambda: VersionsClient(part.address).newest("run"))
        assert "directory is at the run's first hub" in refusal(Announcer(part.address).announce)
