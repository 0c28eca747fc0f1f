"""Tests the line `run` of policy versions at a real hub: made of its anchors while a server is there."""

import json

import pytest
import torch
from kit.hub_processes import Client, HubProcess, HubRefused, ending, until, write_run
from kit.servers import Announcer

from aedit.launch.hub.policy_versions import RECORD
from aedit.proto.versions.client import VersionsClient
from aedit.proto.versions.manifest import VersionLayout
from aedit.proto.versions.receiving import Receiving
from aedit.proto.versions.store import VersionStore
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


def test_a_serial_never_stands_for_other_values_even_after_a_restart(tmp_path):
    toml = write_run(tmp_path)
    hub = HubProcess(toml, tmp_path / "hub")
    with ending():
        node = Client(hub.address).found()
        Announcer(hub.address).announce()
        first, _ = Follower(hub.address, "fp32").fetch()
        node.merged(0)
        hub.kill()
        again = HubProcess(toml, tmp_path / "hub")
        Announcer(again.address).announce()
        follower = Follower(again.address, "fp32")
        node.go_to(again.address)
        node.heartbeat()
        assert follower.newer() is None  # unit0 has changed since version 1 was made
        node.merged(1)
        second, _ = follower.fetch()
        assert (first.serial, second.serial) == (1, 2)


def test_hubs_that_split_the_units_say_that_none_has_the_whole_policy(tmp_path):
    toml = write_run(tmp_path)
    hubs = "--hub.address=127.0.0.1:0,127.0.0.1:0"
    part = HubProcess(toml, tmp_path / "hub_1", hubs, "--part=1/2")
    with ending():
        assert "hub.address names 2 hubs" in refusal(lambda: VersionsClient(part.address).newest("run"))
        assert "directory is at the run's first hub" in refusal(Announcer(part.address).announce)
