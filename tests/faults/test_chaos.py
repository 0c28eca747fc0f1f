"""Tests a short version of `python -m benchmarks.chaos`.

Processes are killed, and the accounts still agree.
"""

import random
from collections import Counter

import numpy as np
from benchmarks.chaos import Plan, tell
from benchmarks.chaos_parts.books import attempts, expected, owed
from benchmarks.kit import netns
from benchmarks.kit.paced_node import PacedNode

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
    assert story.died == 0, "a node ended because of the hub"
    assert story.left_behind == 0


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
