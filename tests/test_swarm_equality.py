"""Tests that a swarm of parts with replicas computes what one hub does, to the last bit, in every round."""

import hashlib
from unittest.mock import patch

import numpy as np
import pytest
from kit.hub_machine import AVERAGE, Int8, config, plan
from kit.hub_processes import Client, HubProcess, ending
from kit.swarm_parts import Copies, parts_of
from kit.swarm_processes import RUN, on_disk, swarm
from kit.waiting import until

from aedit.async_sgd.hub import Hub, NodeReport
from aedit.async_sgd.rules import HubConfig, Merged, OuterConfig, StalenessConfig, merge_rules
from aedit.types import Layout, TensorLayout, UnitLayout

NODES, ROUNDS, PARTS, COPIES = 4, 4, 3, 3
LAYOUT = Layout(
    tuple(
        UnitLayout(f"u{i}", (TensorLayout("w", (n, 7)), TensorLayout("b", (n,))))
        for i, n in enumerate((900, 40, 1, 333, 64, 5, 128))
    )
)
NUMELS = (5000, 70, 900, 3, 1, 2000, 64)
"""Elements of the units of a run on real processes."""
NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
DEFAULTS = {"address": "h:1", "expire_s": 100.0}
SETTINGS = {
    "each arrival, sum of shares": (config(), AVERAGE),
    "each arrival, stale and screened": (HubConfig(**DEFAULTS, grace=0.0), NESTEROV),
    "quorum of two": (HubConfig(**DEFAULTS, quorum=2, staleness=StalenessConfig()), NESTEROV),
    "all": (HubConfig(**DEFAULTS, quorum="all"), NESTEROV),
    "all, robust": (HubConfig(**DEFAULTS, quorum="all", merge="trimmed"), NESTEROV),
    "all, coarse answers": (HubConfig(**DEFAULTS, quorum="all", codec_down="e3m0"), NESTEROV),
}


def maker(settings):
    """Return a function that makes the hub of part (k, n) of a run with these settings."""
    hub, outer = settings

    def make(part=(0, 1)):
        quantiser = Int8(7, feedback=True) if hub.codec_down != "fp32" else None
        return Hub(plan(hub, outer, part=part), quantiser)

    return make


class Schedule:
    """Four nodes that push all units in each round, in an order and from versions that a seed decides."""

    def __init__(self, *runs):
        """runs: each a list of hubs that together have all units."""
        self.runs, self.rng, self.pushes = runs, np.random.default_rng(7), 0
        self.accepted = [0] * len(runs)
        self.bases = {}

    def begin(self):
        for hub in self.hubs():
            for node in range(NODES):
                hub.join(f"node{node}")
        for unit in range(len(LAYOUT.units)):
            self.push(0, unit, 0)
        self.settle()

    def hubs(self):
        return [hub for hubs in self.runs for hub in hubs]

    def round(self):
        """Push each unit by each node, with time and other merges between the pushes; then merge the rest."""
        versions = {unit: version for unit, (version, _) in self.runs[0][0].anchors().items()}
        self.bases = {
            (node, unit): int(self.rng.integers(self.bases.get((node, unit), version), version + 1))
            for node in range(NODES)
            for unit, version in versions.items()
        }
        order = [(node, unit) for node in range(NODES) for unit in range(len(LAYOUT.units))]
        for node, unit in self.rng.permutation(order):
            self.wait(float(self.rng.exponential(0.2)))
            self.push(int(node), int(unit), 10 * (1 + int(node)))
            if self.rng.random() < 0.5:
                self.settle()
        self.wait(20.0)
        self.settle()

    def push(self, node, unit, steps):
        numel = LAYOUT.units[unit].numel
        values = self.rng.standard_normal(numel).astype(np.float32) * np.float32(0.01 * max(1, steps) ** 0.5)
        for run, hubs in enumerate(self.runs):
            part, base = hubs[unit % len(hubs)], self.bases.get((node, unit), 0)
            self.accepted[run] += part.push(node, unit, values, base=base, steps=steps)
        self.pushes += 1

    def wait(self, seconds):
        for hub in self.hubs():
            hub.now += seconds
            for node in range(NODES):
                hub.beat(node, NodeReport(steps_per_s=1.0 + node, state="training"))

    def settle(self):
        for hub in self.hubs():
            hub.settle()


def differences(tmp_path, settings, make_part=None, make_replica=None):
    """Return what differs after the rounds: (round, "anchor", unit) or (round, "replica", part)."""
    make, found = maker(settings), []
    one = [Copies(tmp_path / "hub", make, LAYOUT)]
    parts = parts_of(tmp_path, make_part or make, LAYOUT, parts=PARTS, copies=COPIES, replica=make_replica)
    schedule = Schedule(one, parts)
    schedule.begin()
    for number in range(ROUNDS):
        schedule.round()
        wanted = one[0].anchors()
        anchors = {unit: anchor for part in parts for unit, anchor in part.anchors().items()}
        found += [(number, "anchor", unit) for unit in wanted if anchors[unit] != wanted[unit]]
        for k, part in enumerate(parts):
            owner, *replicas = part.digests()
            assert len(replicas) == COPIES - 1
            found += [(number, "replica", k) for replica in replicas if replica != owner]
    assert schedule.accepted[0] > 0.9 * schedule.pushes
    assert min(version for version, _ in wanted.values()) > ROUNDS / 2
    return found


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_parts_with_replicas_have_the_anchors_of_one_hub_bit_for_bit_in_every_round(tmp_path, settings):
    assert differences(tmp_path, settings) == []


class OtherOrder(Hub):
    """Adds the pushes of a merge from the last node to the first."""

    def compute(self, record):
        def backwards(pairs, key):
            return sorted(pairs, key=key, reverse=True)

        with patch.object(merge_rules, "sorted", backwards, create=True):
            return super().compute(record)


def part_of(kind, settings):
    hub, outer = settings
    return lambda part: kind(plan(hub, outer, part=part))


def test_a_part_that_merges_in_another_order_is_found(tmp_path):
    settings = SETTINGS["all"]
    wrong, right = part_of(OtherOrder, settings), part_of(Hub, settings)
    found = differences(tmp_path, settings, lambda part: (wrong if part[0] == 1 else right)(part))
    assert (0, "anchor", 1) in found
    assert {unit % PARTS for _, _, unit in found} == {1}


def test_replicas_that_merge_in_another_order_are_found(tmp_path):
    settings = SETTINGS["all"]
    found = differences(tmp_path, settings, make_replica=part_of(OtherOrder, settings))
    assert {(what, part) for _, what, part in found} == {("replica", part) for part in range(PARTS)}


class Forgetful(Hub):
    """Drops the third version of each unit."""

    def apply(self, record, computed=None):
        if not (isinstance(record, Merged) and record.version == 3):
            super().apply(record, computed)


def test_a_replica_that_drops_a_record_goes_no_further(tmp_path):
    settings = SETTINGS["each arrival, sum of shares"]
    with pytest.raises(AssertionError, match="versions count up, one by one"):
        differences(tmp_path, settings, make_replica=part_of(Forgetful, settings))


# --- on real processes


class Member:
    """A node that is only a client, of a run whose parts are at these addresses."""

    def __init__(self, addresses, name):
        self.parts = [Client(address, name, numels=NUMELS) for address in addresses]

    def join(self):
        for k, part in enumerate(self.parts):
            if part.admitted().founder:
                for unit in range(k, len(NUMELS), len(self.parts)):
                    assert part.push(unit, base=0).accepted

    def of(self, unit):
        return self.parts[unit % len(self.parts)]


def joined(addresses):
    members = [Member(addresses, f"node-{number}") for number in range(NODES)]
    for member in members:
        member.join()
    return members


@pytest.mark.slow
def test_a_swarm_of_real_peers_has_the_anchors_of_one_hub_and_every_replica_has_them_on_its_disk(tmp_path):
    toml = tmp_path / "hub.toml"
    toml.write_text(RUN.format(address="127.0.0.1:0"))
    with ending(), swarm(tmp_path, peers=4, parts=PARTS, copies=COPIES) as peers:
        hub = HubProcess(toml, tmp_path / "hub")
        owners = until(lambda: [part["owner"] for part in peers.places()], "owners", 60)
        runs = [joined([hub.address]), joined(owners)]
        settled = until(peers.settled, "replicas", 120)
        if [part["owner"] for part in settled] != owners:  # handed over meanwhile
            for member in runs[1]:
                for client, part in zip(member.parts, settled, strict=True):
                    client.go_to(part["owner"])
        for round_ in range(ROUNDS):
            for members in runs:
                for unit in range(len(NUMELS)):
                    for number, member in enumerate(members):
                        assert member.of(unit).push(unit, scale=0.01 + 0.003 * number).accepted
            for unit in range(len(NUMELS)):
                anchors = [merged(members, unit, version=round_ + 2) for members in runs]
                assert np.array_equal(*anchors)
                digest = hashlib.sha256(anchors[0].tobytes()).hexdigest()
                found = [on_disk(folder)[unit] for folder in peers.replicas(unit % PARTS)]
                assert found == [(round_ + 2, digest)] * COPIES


def merged(members, unit, version):
    """Return the anchor of a unit as a node receives it, once it has this version."""
    client = members[0].of(unit)
    until(lambda: client.version(unit) >= version, f"version {version} of unit {unit}")
    found, values = client.anchor(unit)
    assert found == version
    return values
