"""Tests that the benchmark of idle training applies its stated bars. No test asserts a timing."""

import math
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks import idle
from benchmarks.idle import (
    OFF,
    Arm,
    Harvest,
    Leaving,
    Measured,
    Messenger,
    Node,
    Pair,
    Race,
    Ratio,
    Suffered,
    Windows,
)
from benchmarks.programs.trainees import FAULTS

from aedit.spec_rollout.training import Publication

PRIORITY = ("SCHED_IDLE", "session nice 19", "autogroup off")
SURE = Ratio(1.0, 0.995, 1.005, 1.1, 100)
GOOD = {
    "busy": 0.9,
    "outside": 0.001,
    "stopped_s": 0.0004,
    "left_s": 0.0004,
    "ran": 600,
    "shadow": SURE,
    "faults": SURE,
    "same": SURE,
    "control": Ratio(1.5, 1.4, 1.6, 2.0, 40),
    "crowded same": SURE,
    "crowded shadow": SURE,
    "share": 0.5,
    "closed_s": 0.004,
    "suffered": Suffered("killed", 20, 20, 20, 0, (Pair(1.0, 1.0),) * 3),
}
BARS = ["busy", "outside", "stopped", "left", "control", "same", "shadow", "faults"]
BARS += ["share", "crowded shadow", "closed_s", "suffered"]


def windows(busy, outside, leaving, ran=600):
    """Return windows with these shares, and `ran` ends of windows in which the trainer ran."""
    return Windows(
        [Harvest(2.0, 2 * busy, 0.0, 2 * busy * outside / (1 - outside))] * 3,
        [leaving] * ran + [replace(leaving, cpu_s=0.0, stopped_s=1.0)] * 50,
        [0.0001] * 100,
        PRIORITY,
    )


def verdicts(quick=False, **wrong):
    """Return the report's result for each bar, for given numbers."""
    seen = {**GOOD, **wrong}
    leaving = Leaving(seen["left_s"], seen["stopped_s"], 1e-5, 0.01, 1e-5)
    # Its message came late, as on a busy machine, which is no part of the time to close a window.
    closing = Leaving(0.2, 0.2 + seen["closed_s"] - 1e-5, 1e-5, 0.01, 1e-5)
    found = Measured(
        windows=windows(seen["busy"], seen["outside"], leaving, seen["ran"]),
        crowded=windows(seen["share"], 0.0, closing),
        suffered=[replace(seen["suffered"], fault=fault) for fault in FAULTS],
    )
    report = idle.report(found, {name: seen[name] for name in idle.STEPS if name in seen}, quick)
    assert all(len(row) == len(report.columns) for row in report.rows)
    return dict(zip(BARS, [bar.passed for bar in report.bars], strict=True))


def test_a_run_that_reaches_all_bars_passes_them_and_a_quick_one_claims_nothing():
    assert set(verdicts().values()) == {True}
    assert set(verdicts(quick=True).values()) == {None}


@pytest.mark.parametrize(
    ("wrong", "missed"),
    [
        ({"busy": 0.84}, "busy"),
        ({"outside": 0.006}, "outside"),
        ({"stopped_s": 0.002}, "stopped"),
        ({"left_s": 0.002}, "left"),
        ({"shadow": replace(SURE, middle=1.012)}, "shadow"),
        ({"shadow": replace(SURE, high=1.021)}, "shadow"),
        ({"faults": replace(SURE, high=1.021)}, "faults"),
        ({"share": 0.39}, "share"),
        ({"crowded shadow": replace(SURE, middle=1.03)}, "crowded shadow"),
        ({"closed_s": 0.006}, "closed_s"),
        ({"suffered": replace(GOOD["suffered"], bad_drafters=1)}, "suffered"),
        ({"suffered": replace(GOOD["suffered"], kept=19)}, "suffered"),
        ({"suffered": replace(GOOD["suffered"], recovered=19)}, "suffered"),
        ({"suffered": replace(GOOD["suffered"], injected=19, kept=19, recovered=19)}, "suffered"),
    ],
)
def test_what_is_missed_is_said_of_it_and_of_nothing_else(wrong, missed):
    assert {name for name, passed in verdicts(**wrong).items() if passed is False} == {missed}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"control": Ratio(1.03, 1.01, 1.05, 1.1, 40)}, {"control": False, "shadow": None, "faults": None}),
        ({"same": Ratio(1.0, 0.96, 1.03, 2.0, 100)}, {"same": False, "shadow": None, "faults": None}),
        ({"shadow": replace(SURE, num_pairs=59)}, {"shadow": None}),
        ({"crowded same": Ratio(1.0, 0.96, 1.03, 2.0, 100)}, {"crowded shadow": None}),
        ({"ran": 499}, {"stopped": None, "left": None}),
    ],
)
def test_what_cannot_be_told_is_not_claimed(wrong, expected):
    assert {name: passed for name, passed in verdicts(**wrong).items() if passed is not True} == expected


def test_what_was_measured_before_an_error_is_reported_with_the_error(monkeypatch):
    leaving = Leaving(0.0004, 0.0004, 1e-5, 0.01, 1e-5)

    def alone(found, foreground, size):
        with found.failure_of("windows"):
            found.windows.harvests.append(Harvest(2.0, 1.8, 0.0, 0.0))
            found.windows.leavings.append(leaving)
            raise TimeoutError("the trainer could still run 10 s after its window")
        found.add("same", Pair(1.0, 1.0))
        raise ProcessLookupError("process 5 has no clock")

    def faults(found, foreground, size):
        found.suffered.append(GOOD["suffered"])

    monkeypatch.setattr(idle, "Foreground", lambda quick: None)
    monkeypatch.setattr(idle, "PARTS", {"alone": alone, "faults": faults})
    report = idle.measure(Namespace(quick=False, only=None))
    named = {row[0]: row[2] for row in report.rows}
    assert named["trainer busy / idle, windows of 1 s and more"] == "90.0 %"
    assert named["message to trainer cannot run, ms"] == "0.400"
    assert named["step: no trainer beside no trainer (A/A)"] == "1.000"
    assert "step: killed, 20 times, 20 recovered" in named
    assert [(bar.text, bar.passed) for bar in report.bars[-2:]] == [
        ("not measured: windows: the trainer could still run 10 s after its window", False),
        ("not measured: alone: process 5 has no clock", False),
    ]


def test_windows_that_end_with_an_error_keep_those_before_it(monkeypatch):
    class Clock:
        def __init__(self, pid):
            self.left, self.queued_s = 4, 0.0

        @property
        def cpu_s(self):
            self.left -= 1
            if self.left < 0:
                raise ProcessLookupError("process 5 is gone")
            return 0.0

    class Trainer(Work):
        def status(self):
            return {"pid": 5}

    monkeypatch.setattr(idle, "Clocks", Clock)
    monkeypatch.setattr(idle, "priority", lambda pid: PRIORITY)
    found, foreground = Measured(), type("Steps", (), {"step": lambda self, number: None})()
    with found.failure_of("windows"):
        idle.watch(Trainer(), foreground, replace(idle.QUICK, windows=5, windows_s=(0.0, 0.0)), found.windows)
    assert len(found.windows.harvests) == 1
    assert found.failures == ["windows: process 5 is gone"]


def test_the_ratio_of_paired_steps_is_not_that_of_the_machines_moods():
    moods = [1.0, 1.0, 7.0, 1.0, 3.0] * 20
    ratio = Ratio.of([Pair(1.1 * mood, mood) for mood in moods])
    assert ratio.middle == pytest.approx(1.1)
    assert ratio.low == pytest.approx(ratio.high) == pytest.approx(1.1)
    assert ratio.num_pairs == 100


def test_arms_of_a_turn_wait_as_long_and_step_on_the_same_samples_in_a_random_order(monkeypatch):
    told, waits = [], []

    class Foreground:
        def step(self, number):
            told.append(number)

    @contextmanager
    def window(name):
        told.append(f"{name} begins")
        yield
        told.append(f"{name} ends")

    monkeypatch.setattr("benchmarks.idle.time.sleep", waits.append)
    race = Race(Foreground(), (1.0, 2.0))
    arms = {"off": OFF, "on": Arm(partial(window, "on")), "goes on": Arm(partial(window, "all"), True)}
    orders = set()
    for number in range(1, 21):
        told.clear()
        waits.clear()
        assert set(race.turn(arms)) == set(arms)
        assert len(waits) == 3
        assert len(set(waits)) == 1
        begins = told.index("on begins")
        assert told[begins : begins + 3] == ["on begins", "on ends", number]
        begins = told.index("all begins")
        assert told[begins : begins + 3] == ["all begins", number, "all ends"]
        assert told.count(number) == 3
        orders.add(tuple(told).index("on begins"))
    assert len(orders) > 2


def test_a_message_ends_a_wait_and_says_when_it_was_sent():
    with Messenger() as messenger:
        messenger.order(0.0)
        first = messenger.receive()
        messenger.order(0.0)
        assert messenger.receive() > first > 0


class Work:
    """Trainer stand-in whose publications the test makes."""

    def __init__(self):
        self.offers, self.counts = [], {"deaths": 0, "corrupt": 0, "checkpoints": 0}

    @contextmanager
    def window(self, cause):
        yield

    def status(self):
        return dict(self.counts)

    def newest(self, after):
        return next((offer for offer in self.offers[-1:] if offer and offer.number > after), None)


class Steps:
    """Race without steps that calls `happens` in every window."""

    def __init__(self, work, happens):
        self.work, self.happens = work, happens

    def pair(self, arm):
        with arm.window():
            self.happens(self.work)
        return Pair(1.0, 1.0)


@pytest.mark.parametrize(
    ("value", "kept", "bad"), [(1.0, 1, 0), (math.nan, 0, 1), (math.inf, 1, 1), (1e9, 1, 1)], ids=str
)
def test_what_a_node_takes_after_a_fault_is_looked_at(tmp_path, monkeypatch, value, kept, bad):
    def dies(work):
        work.counts["deaths"] += 1
        work.offers = [Publication(2, 0, {"fc.weight": torch.tensor([value])})]

    work = Work()
    node = Node(work, Steps(work, dies))
    monkeypatch.setattr(Node, "recovers", lambda self: True)
    assert node.recovers_from("killed", tmp_path / "orders")
    assert (tmp_path / "orders").read_text() == "killed"
    assert (node.kept, node.bad_drafters, len(node.pairs)) == (kept, bad, 3)
