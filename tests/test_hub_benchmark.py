"""Tests that `benchmarks.hub` measures a real hub and that its input to the hub is merged, not its timing."""

from dataclasses import asdict

import numpy as np
import pytest
from benchmarks import hub as hub_benchmark
from benchmarks.hub import ASYNC, FLOODED, CrowdedHub, Load, Size, crowd, flooding, memory, merging
from benchmarks.programs import push_rates as hub_push

from aedit.async_sgd.journal import Journal
from aedit.async_sgd.rules import Merged


def test_every_timed_round_takes_all_pushes_into_one_version(tmp_path):
    kind = hub_benchmark.Kind(text="", codec="e3m0", quorum=4, codec_down="e3m0")
    layout, journal = hub_benchmark._layout(20_000), Journal(tmp_path, 1, fsync=False)
    pushes = list(hub_benchmark._gradients(20_000, 4))
    arrived = [hub_benchmark._stored(journal, "e3m0", x) for x in pushes]
    hub = hub_benchmark._founded(kind, layout)
    merged = []
    apply = hub.apply
    hub.apply = lambda record, computed: (merged.append((record, computed)), apply(record, computed))
    hub_benchmark._round(hub, kind, layout, arrived)
    ((record, computed),) = [pair for pair in merged if isinstance(pair[0], Merged)]
    assert [part.node for part in record.parts] == [0, 1, 2, 3]
    assert not computed.ignored
    mean = np.mean([payload.read(0, 20_000) for payload in arrived], axis=0)
    assert abs(computed.norm / np.linalg.norm(mean) - 1) < 1e-3


def test_pushes_and_bare_bytes_arrive_by_turns():
    times = hub_push.push_times(3 * 2**20 + 17, 2)
    assert [len(way["seconds"]) for way in asdict(times).values()] == [2] * 5


@pytest.mark.slow
def test_a_real_hub_answers_a_small_crowd_and_its_memory_is_seen():
    size = Size(nodes=3, processes=2, units=2, numel=10_000, interval_s=0.4, seconds=1.5)
    seen = crowd(size)
    assert seen.merged >= 2 * 3
    assert seen.refused == 0
    assert len(seen.heartbeat_s) >= 3
    found = memory(size, ASYNC)
    assert found.params == 80_000
    assert found.idle <= found.peak < 2**30
    assert 0 < found.own <= found.peak


@pytest.mark.slow
def test_a_flood_of_a_real_hub_is_sent_and_ended_while_its_members_report():
    found = flooding("indexed", 3.0)
    assert found.flooded.sent_bytes > 2**20
    assert found.flooded.ended > 0
    assert len(found.answer_s) >= FLOODED
    assert 0 < found.late_s <= found.answer_s[-1]
    assert found.peak_bytes > 2**24


def test_every_timed_call_of_a_crowded_hub_is_answered(tmp_path):
    hub = CrowdedHub(tmp_path, 30)
    told = hub.beat(7)
    assert told.nodes == 30
    assert 1 <= told.pace_steps < 64  # all have pushed, and one is faster
    before = hub.hub.state.units[0].version
    hub.now += 1.0
    hub.push_and_merge(7)
    assert hub.hub.state.units[0].version == before + 1
    assert hub.lock.longest_s > 0


def test_merges_are_counted_with_and_without_snapshots_beside_them():
    load = Load(units=3, numel=50_000, seconds=0.4)
    alone, beside = (merging(load, 2, snapshots=snapshots) for snapshots in (False, True))
    assert alone.gb_s > 0 < beside.gb_s
    assert alone.snapshots == 0 < beside.snapshots
    assert beside.snapshot_s > 0


def test_the_calculated_hubs_own_a_model_of_70_b_parameters_and_share_its_work():
    sizes = hub_benchmark.unit_sizes()
    assert 70.5e9 < sum(sizes) < 70.6e9  # of Llama 3 70B
    rates = hub_benchmark.Rates(path_gb_s=0.5, wire_gb_s=2.0)
    one, many = hub_benchmark.largest(1, 8, rates), hub_benchmark.largest(81, 8, rates)
    assert one.params == sum(sizes)
    assert many.params == max(sizes)
    params_gb = 1e-9 * sum(sizes)
    wanted = (8 * 2 * params_gb / 2.0, 8 * 4 * params_gb / 0.5, 8 * 4 * params_gb / 2.0)
    assert (one.push_s, one.merge_s, one.pull_s) == pytest.approx(wanted)
    assert one.core_s == pytest.approx(sum(wanted))
    enough = hub_benchmark.hubs_for(600.0, 8, rates)
    fits, fits_not = (hub_benchmark.largest(hubs, 8, rates).core_s for hubs in (enough, enough - 1))
    assert fits <= 600.0 < fits_not
    assert hub_benchmark.hubs_for(1.0, 8, rates) is None
