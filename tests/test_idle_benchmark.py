"""Tests that the benchmark of idle training applies its stated bars. No test asserts a timing."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks import idle
from benchmarks.idle import OFF, Arm, Harvest, Leaving, Messenger, Node, Pair, Race, Ratio, Suffered
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
    "suffered": Suffered("killed", 20, 20, 20, 0, (Pair(1.0, 1.0),) * 3),
}
BARS = ["busy", "outside", "stopped", "left", "control", "same", "shadow", "faults", "suffered"]


def verdicts(quick=False, **wrong):
    """Return the report's result for each bar, for given numbers."""
    seen = {**GOOD, **wrong}
    leaving = Leaving(seen["left_s"], seen["stopped_s"], 1e-5, 0.01)
    windows = idle.Windows(
        (Harvest(2.0, 2 * seen["busy"], 0.0),) * 3,
        seen["outside"],
        (leaving,) * seen["ran"] + (replace(leaving, cpu_s=0.0, stopped_s=1.0),) * 50,
        (0.0001,) * 100,
        PRIORITY,
    )
    ratios = {name: seen[name] for name in ("same", "shadow", "control", "faults")}
    suffered = [replace(seen["suffered"], fault=fault) for fault in FAULTS]
    report = idle.report(windows, ratios, suffered, quick)
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
        ({"ran": 499}, {"stopped": None, "left": None}),
    ],
)
def test_what_cannot_be_told_is_not_claimed(wrong, expected):
    assert {name: passed for name, passed in verdicts(**wrong).items() if passed is not True} == expected


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
