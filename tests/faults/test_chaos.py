"""Tests short versions of `python -m benchmarks.chaos`: of a hub alone, with standbys, and of a swarm.

Processes are killed, and the accounts still agree.
"""

import errno
import inspect
import json
import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.chaos import Plan, tell
from benchmarks.chaos_parts import failover, swarm
from benchmarks.chaos_parts.accounts import attempts, expected, history_of, keep, leaders, owed, read
from benchmarks.chaos_parts.swarm import SwarmPeer, Tables, _kill_tables, fault_plan, machines_with_tables
from benchmarks.kit import netns, paced_node
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import copy_folder, limit_files, put_back
from benchmarks.programs import chaos_witness
from test_journal import Book

from aedit.async_sgd.rules import Configured, Led
from aedit.proto.rpc import HubClient

PLAN = Plan(seconds=24, calm_s=0, kill_every_s=5, hub_kills=2, cuts=2, cut_s=6)


def test_nodes_and_hub_are_killed_and_wires_cut_and_no_accepted_push_is_lost_or_counts_twice():
    story = tell(PLAN, random.Random(3))
    books = story.books
    assert story.node_kills >= 3
    assert len(story.hub_back_s) == 2
    assert story.cuts == (2 if netns.why_not() is None else 0)
    assert books.steps_per_s > 0
    assert books.lost == 0, "an anchor is not the sum of what was accepted"
    assert books.unknown == 0, "what a node saw accepted is not in the journal"
    assert books.twice == 0, "the journal has steps that no node has made"
    assert books.owed == 0, "a survivor has lost steps"
    assert books.replayed
    assert books.late_calls == 0
    assert story.samples_agree, story.samples
    assert story.samples_twice == 0, story.samples
    assert story.died == 0, "a node ended because of the hub"
    assert story.left_behind == 0


def test_the_witness_takes_what_the_calls_take_that_it_stands_in_for(monkeypatch, tmp_path):
    def parameters():
        calls = inspect.signature(HubClient.push), inspect.signature(HubClient.fetch)
        return [[(p.name, p.kind, p.default) for p in call.parameters.values()][1:] for call in calls]

    def node(words):
        seen.append((HubClient.push.__module__, parameters()))
        return 0

    wanted, seen = parameters(), []
    monkeypatch.setattr(paced_node, "main", node)
    assert chaos_witness.main([json.dumps({"hub": "", "name": "", "ledger": str(tmp_path / "ledger")})]) == 0
    assert seen == [(chaos_witness.__name__, wanted)]


def test_a_push_that_is_in_an_anchor_in_half_shows():
    plan = PacedNode(hub="", name="", ledger="", units=2, numel=200, large_numel=1000)
    anchors = expected(plan, Counter({(0, 0): 7, (3, 0): 5, (3, 1): 2}))
    assert [len(anchor) for anchor in anchors] == [1000, 200]
    assert (anchors[0][0], anchors[0][3], anchors[0][64], anchors[0][64 * 15 + 3]) == (7, 5, 7, 5)
    assert anchors[1].sum() == 2 * np.ceil((200 - 3) / 64)


def test_steps_of_a_survivor_are_all_in_accepted_pushes_or_it_is_said_how_many_are_not():
    def pushed(unit, steps, verdict="MERGED"):
        return {"event": "answered", "unit": unit, "seq": 1, "steps": steps, "verdict": verdict}

    joined, left = {"event": "joined", "node": 0}, {"event": "left", "steps": 10}
    killed = [joined, pushed(0, 3)]
    good = [joined, pushed(0, 4), pushed(0, 4, "REFUSED"), pushed(0, 6), pushed(1, 10), left]
    assert [len(attempt) for attempt in attempts(killed + good)] == [2, 6]
    assert [owed(attempt, 2) for attempt in attempts(killed + good)] == [0, 0]
    assert owed([joined, pushed(0, 4), pushed(1, 12), left], 2) == 6 + 2


@pytest.mark.slow
def test_hubs_fail_as_well_as_nodes_and_nothing_acknowledged_is_lost_with_one_leader_per_term():
    story = failover.tell(75, 2, seed=2)
    found = story.accounts
    assert sum(story.faults.values()) >= 5
    assert found.acknowledged > 100
    assert story.died == []
    nothing = (
        "lost",
        "twice",
        "invented",
        "uncounted",
        "wrong",
        "damaged",
        "two_leaders",
        "two_hubs",
        "back",
    )
    assert {name: getattr(found, name) for name in nothing} == dict.fromkeys(nothing, 0)
    assert found.back == found.missing == story.left_behind == 0


@pytest.mark.slow
def test_machines_of_a_swarm_fail_owners_included_and_nothing_acknowledged_is_lost():
    story = swarm.tell(60, seed=2, away_s=15)
    assert sum(story.faults.values()) >= 5
    assert all(part.acknowledged > 50 for part in story.accounts)
    assert any(len(part.terms) > 1 for part in story.accounts), "no part had another owner"
    found = swarm.mistakes(story)
    assert found == dict.fromkeys(found, 0), story.died
    tables = len(machines_with_tables())
    assert bool(story.tables.outages) == bool(tables), story.moments
    assert story.tables.open() == []
    assert story.tables.answering == tables, "a newcomer finds nobody in a hash table"


def test_the_hash_tables_of_all_machines_are_killed_at_once_and_of_one_by_turns():
    def kills(tables):
        plan = fault_plan(600, random.Random(1), 30.0, wires=True, tables=tables)
        return [(at_s, act.args[0]) for at_s, act in plan if getattr(act, "func", None) is _kill_tables]

    assert kills(0) == []
    assert [num for _, num in kills(2)] == [2, 1] * 5
    assert [b[0] - a[0] for a, b in pairwise(kills(2))] == [60.0] * 9
    without = fault_plan(600, random.Random(1), 30.0, wires=True)
    assert len(fault_plan(600, random.Random(1), 30.0, wires=True, tables=2)) == len(without) + 10


def test_ten_minutes_of_hubs_and_of_a_swarm_have_a_full_disk_and_an_older_folder():
    hubs = [act for _, _, act in failover._plan(600, random.Random(1), wires=True)]
    machines = [act for _, act in fault_plan(600, random.Random(1), 30.0, wires=True)]
    for acts, module in ((hubs, failover), (machines, swarm)):
        assert acts.count(module._fill_disk) >= 2
        assert acts.count(module._older_folder) >= 2
    plan = failover._plan(600, random.Random(1), wires=True)
    assert {long_s for _, long_s, act in plan if act is failover._fill_disk} == {20.0}


def test_a_copy_of_a_folder_is_put_back_without_logs_and_without_what_came_later(tmp_path):
    folder, older = tmp_path / "hub", tmp_path / "older"
    (folder / "part_0").mkdir(parents=True)
    for name in ("journal-1", "part_0/journal-1", "output.log", "part_0/part.log"):
        (folder / name).write_text("old")
    copy_folder(folder, older)
    (folder / "part_1").mkdir()
    for name in ("journal-1", "journal-2", "part_1/journal-1", "output.log"):
        (folder / name).write_text("new")
    put_back(folder, older)
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {"journal-1": "old", "part_0/journal-1": "old", "output.log": "new"}
    assert not older.exists()


def test_the_disk_of_a_process_and_its_children_is_full_until_it_is_not(tmp_path):
    """A child is started while the disk is full, and has room with its parent."""
    with Popen([sys.executable, "-c", WRITER, tmp_path], stdin=PIPE, stdout=PIPE, text=True) as writer:

        def writes():
            writer.stdin.write("\n")
            writer.stdin.flush()
            return writer.stdout.readline().split()

        assert writes() == ["0", "0"]
        limit_files(writer.pid, 0)
        assert writes() == [str(errno.EFBIG)] * 2
        limit_files(writer.pid)
        assert writes() == ["0", "0"]
        writer.stdin.close()


WRITER = """
import multiprocessing, sys
from pathlib import Path

def wrote(name):
    try:
        with Path(sys.argv[1], name).open("ab", 0) as file:
            file.write(b"x")
    except OSError as error:
        return error.errno
    return 0

if __name__ == "__main__":
    for number, _ in enumerate(sys.stdin):
        pools = pools if number else [multiprocessing.get_context("fork").Pool(1)]
        print(wrote("a"), pools[0].apply(wrote, ["b"]), flush=True)
    pools[0].terminate()
"""


def machine(tmp_path, name, pid=7):
    (tmp_path / name).mkdir()
    peer = SwarmPeer(1, "", None, Path(), tmp_path / name, int(name))
    peer.process = SimpleNamespace(pid=pid)
    peer.log.write_text("")
    return peer


def test_a_table_is_back_once_its_machine_says_so_and_has_its_processes(tmp_path, monkeypatch):
    running = []
    monkeypatch.setattr(swarm, "table_processes", lambda peer: running)
    peer, other = machine(tmp_path, "1"), machine(tmp_path, "2", pid=8)
    tables, both = Tables(), [peer, other]
    peer.log.write_text("the hash table is back after 2.0 s")
    tables.kill(both)
    tables.look(both)
    assert len(tables.open()) == 2, "what was said before it was killed does not count"
    peer.log.write_text("the hash table is back after 2.0 s\nthe hash table is back after 3.5 s")
    tables.look(both)
    assert len(tables.open()) == 2, "no process runs"
    running.append(None)
    tables.look(both)
    assert [outage.machine for outage in tables.open()] == ["peer-2"]
    assert len(tables.lasted_s) == 1
    other.process = SimpleNamespace(pid=9)
    tables.look(both)
    assert tables.open() == []
    assert [outage.restarted for outage in tables.outages] == [False, True]


def test_a_table_that_was_away_while_a_machine_failed_says_nothing_about_the_time_that_takes(
    tmp_path, monkeypatch
):
    peer, other = machine(tmp_path, "1"), machine(tmp_path, "2")
    tables = Tables()
    monkeypatch.setattr(swarm, "table_processes", lambda peer: [])
    tables.kill([peer])
    other.is_away = True
    tables.look([peer, other])
    other.is_away = False
    monkeypatch.setattr(swarm, "table_processes", lambda peer: [None])
    peer.log.write_text("the hash table is back after 40.0 s")
    tables.look([peer, other])
    assert tables.open() == tables.lasted_s == []
    assert tables.outages[0].disturbed


def copies_of(directory):
    return [segment for path in directory.glob("journal-*") if (segment := read(path))]


def test_a_history_is_joined_from_copies_by_the_hashes_in_the_heads_of_segments(tmp_path):
    (place := tmp_path / "hub").mkdir()
    book = Book(place).join("a", "b")
    for _ in range(4):
        book.push(0, 0)
        book.push(1, 1)
        keep(place, tmp_path / "copies")
        book.ledger.snapshot()
    book.commit([Led(1), Configured(1, 1, 5, (5,))])
    keep(place, tmp_path / "copies")
    assert not (place / "journal-00000001").exists(), "the hub has not deleted what a snapshot holds"
    copies = copies_of(tmp_path / "copies")
    found = history_of(place, copies)
    assert found.missing == found.damaged == found.repeated == 0
    assert found.terms == [1]
    assert set(found.accepted) == {(node, node, seq) for node in (0, 1) for seq in found_seqs(book, node)}
    assert all(found.merged[key] == 1 for key in found.accepted)
    assert leaders(copies) == {1: {5}}
    assert history_of(place, [one for one in copies if one.number != 2]).missing >= 2


def test_pushes_that_only_the_leading_hub_had_are_counted_once_there_had_been_others(tmp_path):
    book = Book(tmp_path).join("a")
    for number, replicas in ((1, (5,)), (2, (5, 6)), (3, (5,)), (4, (5, 6))):
        book.commit([Configured(1, number, 5, replicas)])
        book.push(0, 0)
    (segment,) = copies_of(tmp_path)
    assert history_of(tmp_path, [segment]).alone == 1


def found_seqs(book, node):
    """Return the numbers of the node's pushes in its unit but that of the first parameters."""
    last = book.hub.state.members[node].received[node]
    return range(last - 3, last + 1)


def test_a_payload_that_is_not_what_was_acknowledged_shows(tmp_path):
    book = Book(tmp_path).join("a")
    book.push(0, 0)
    (segment,) = copies_of(tmp_path)
    assert segment.damaged_payloads == 0
    data = bytearray(segment.path.read_bytes())
    values = [record for record in segment.records if record["kind"] == "Accepted"][-1]["values"]
    data[values["at"]] ^= 1
    segment.path.write_bytes(data)
    assert read(segment.path).damaged_payloads == 1
    assert json.dumps(segment.records) == json.dumps(read(segment.path).records)
