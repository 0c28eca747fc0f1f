"""Tests the ledger of a node's waits, the pauses between restarts, and windows that never wait."""

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import trainers

from aedit.child import Restarts
from aedit.spec_rollout.training import IdleConfig, trainer_supervisor
from aedit.spec_rollout.training.windows import Windows


def test_idle_time_is_where_at_least_one_window_is_open():
    windows = Windows()
    assert windows.enter(10.0)
    assert not windows.enter(12.0)
    assert not windows.leave("round", 10.0, 13.0)
    assert windows.idle_s(14.0) == 4.0
    assert windows.leave("tail", 12.0, 15.0)
    assert windows.idle_s(99.0) == 5.0
    assert windows.by_cause == {"round": 3.0, "tail": 3.0}
    assert [(span.cause, span.began_s, span.ended_s) for span in windows.spans] == [
        ("round", 10.0, 13.0),
        ("tail", 12.0, 15.0),
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=8))
def test_overlapping_windows_are_not_counted_twice(spans):
    windows = Windows()
    moments = [(start, 0, i) for i, (start, _) in enumerate(spans)]
    moments += [(start + length, 1, i) for i, (start, length) in enumerate(spans)]
    for now, ends, i in sorted(moments):
        if ends:
            windows.leave("x", spans[i][0], now)
        else:
            windows.enter(now)
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert windows.idle_s(1000.0) == len(covered)
    assert windows.by_cause["x"] == sum(length for _, length in spans)
    assert (windows.count, windows.num_open) == (len(spans), 0)


def test_what_was_used_counts_for_the_cause_of_the_window_that_ended():
    windows = Windows()
    windows.enter(0.0)
    windows.leave("round", 0.0, 4.0, used_s=3.0)
    windows.enter(5.0)
    windows.enter(6.0)
    windows.leave("rank", 6.0, 7.0, used_s=3.5)
    windows.leave("round", 5.0, 8.0, used_s=5.0)
    assert windows.used_by_cause == {"round": 4.5, "rank": 0.5}


def test_pauses_between_deaths_double_up_to_a_limit():
    restarts = Restarts(limit=4, pause_s=2.0, longest_pause_s=7.0)
    assert restarts.may_start(0.0)
    pauses = []
    for death in range(4):
        restarts = restarts.died(100.0 * death, worked=False)
        pauses.append(next(s for s in range(20) if restarts.may_start(100.0 * death + s)))
    assert pauses == [2, 4, 7, 7]
    assert not restarts.given_up
    restarts = restarts.died(1000.0, worked=False)
    assert restarts.given_up
    assert not restarts.may_start(1e9)


def test_who_did_its_work_before_it_died_begins_to_count_anew():
    restarts = Restarts(limit=1, pause_s=2.0)
    for now_s in (10.0, 20.0, 30.0):
        restarts = restarts.died(now_s, worked=True)
    assert restarts.may_start(32.0)
    assert restarts.total == 3
    assert restarts.died(40.0, worked=False).given_up


@pytest.mark.parametrize(
    "wrong", [{"threads": 0}, {"niceness": 20}, {"hung_after_s": 0.0}, {"checkpoint_every_s": -1.0}]
)
def test_a_configuration_that_cannot_be_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        IdleConfig(**wrong)


class Recorded:
    """Process stand-in that records the signals it gets."""

    def __init__(self, order):
        self.pid, self.signals, self.is_ready = 1, [], True
        Recorded.last = self

    def resume(self):
        self.signals.append("resume")

    def suspend(self):
        self.signals.append("suspend")

    def exit_code(self):
        return None

    def kill(self):
        self.signals.append("kill")


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(trainer_supervisor, "SuspendedProcess", Recorded)
    with trainers.training() as work:
        trainers.until(lambda: work.status()["pid"] == 1)
        yield work, Recorded.last.signals


def test_the_trainer_is_resumed_by_the_first_window_and_suspended_by_the_last(recorded):
    work, signals = recorded
    with work.window("round"):
        with work.window("tail"):
            assert signals == ["resume"]
        assert signals == ["resume"]
    assert signals == ["resume", "suspend"]
    assert work.status()["windows"] == 2


def test_a_wait_that_is_broken_off_suspends_the_trainer_too(recorded):
    work, signals = recorded
    with pytest.raises(KeyboardInterrupt), work.window("round"):
        raise KeyboardInterrupt
    assert signals == ["resume", "suspend"]


def test_windows_of_many_threads_leave_the_trainer_suspended(recorded):
    work, signals = recorded

    def wait_often():
        for _ in range(200):
            with work.window("thread"):
                pass

    waiting = [threading.Thread(target=wait_often) for _ in range(8)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(30)
    assert signals == ["resume", "suspend"] * (len(signals) // 2)
    assert work.status()["windows"] == 1600
    assert work.status()["state"] == "stopped"


def test_a_drafter_that_needs_no_training_is_left_alone(recorded):
    work, signals = recorded
    with work.window("round"):
        work.pause()
        assert signals == ["resume", "suspend"]
    with work.window("round"):
        assert signals == ["resume", "suspend"]
        work.unpause()
        assert signals == ["resume", "suspend", "resume"]
    work.unpause()
    assert signals == ["resume", "suspend", "resume", "suspend"]
    status = work.status()
    assert status["allowed_s"] < status["idle_s"]


def test_windows_do_not_wait_for_a_trainer_that_is_being_started(monkeypatch):
    may_start = threading.Event()

    class Slow(Recorded):
        def __init__(self, order):
            may_start.wait(60)
            super().__init__(order)

    monkeypatch.setattr(trainer_supervisor, "SuspendedProcess", Slow)
    with trainers.training() as work:
        for _ in range(3):
            with work.window("round"):
                assert work.status()["pid"] is None
        with work.window("round"):
            may_start.set()
            trainers.until(lambda: work.status()["pid"] == 1)
            assert Slow.last.signals == ["resume"]
        assert Slow.last.signals == ["resume", "suspend"]


def test_a_machine_that_cannot_start_a_process_is_told_so_and_tried_again(monkeypatch):
    attempts = []

    class Refused(Recorded):
        def __init__(self, order):
            attempts.append(order)
            if len(attempts) < 3:
                raise OSError(11, "Resource temporarily unavailable")
            super().__init__(order)

    monkeypatch.setattr(trainer_supervisor, "SuspendedProcess", Refused)
    with trainers.training() as work, work.window("round"):
        trainers.until(lambda: work.status()["pid"] == 1, work)
        assert work.status()["deaths"] == 2
        assert "temporarily unavailable" in work.status()["error"]


def test_a_training_that_no_other_process_could_make_is_refused(monkeypatch):
    def of_main(desk): ...

    of_main.__module__, of_main.__qualname__ = "__main__", "of_main"
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    for make, message in ((lambda desk: None, "cannot be sent"), (of_main, "put it into a module")):
        with pytest.raises(ValueError, match=message):
            trainers.training(make)


def test_a_keeper_that_fails_says_so_and_harms_nobody(recorded, monkeypatch):
    work, _ = recorded
    monkeypatch.setattr(Recorded, "exit_code", lambda self: 1 / 0)
    with work.window("round"):
        trainers.until(lambda: work.status()["state"] == "given up", work)
    with work.window("round"):
        assert "ZeroDivisionError" in work.status()["error"]
