"""Tests that nothing a reward function does ends a run, blocks it, or is lost without a report."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kit.rewards import group, rewarded
from kit.waiting import until

from aedit.spec_rollout import RewardPool, RewardSpec

FILE = str(Path(__file__).resolve().parents[2] / "kit" / "rewards.py")

# Function, the sample that its report names, and what the report says.
BAD = [
    ("raises", "3/1", "KeyError: 'no such"),
    ("raises_for_two", "3", "ValueError: one at a time"),
    ("exits", "3/0", "SystemExit: enough"),
    ("is_killed", "3", "its process was ended by signal 9, 2 times"),
    ("leaves", "3", "its process ended with exit code 3, 2 times"),
    ("nan", "3", "returned nan as value 1, expected a finite number or None"),
    ("infinite", "3", "returned inf as value 0, expected a finite number or None"),
    ("short", "3", "returned 1 values, expected a list of 2, one number or None per completion"),
    ("text", "3", "returned '1' as value 0, expected a finite number or None"),
    ("nothing", "3", "returned None, expected a list of 2, one number or None per completion"),
    ("one_number", "3", "returned 1.0, expected a list of 2, one number or None per completion"),
    ("one_text", "3", "returned '10', expected a list of 2, one number or None per completion"),
    ("one_set", "3", "returned {0.5, 1.5}, expected a list of 2, one number or None per completion"),
    ("endless", "3", "as value 0, expected a finite number or None"),
    ("nested", "3", "returned [1.0] as value 0, expected a finite number or None"),
]


def pool_of(*functions, **options):
    return RewardPool([RewardSpec(function=f"kit.rewards:{name}") for name in functions], **options)


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self):
        return self.now


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def line_of(text):
    """Return the number of the line of the kit's reward functions that holds `text`."""
    return 1 + [text in line for line in Path(FILE).read_text().splitlines()].index(True)


@pytest.mark.parametrize(("name", "sample", "message"), BAD, ids=[name for name, *_ in BAD])
def test_a_bad_function_leaves_its_group_out_with_one_clear_report(name, sample, message):
    with pool_of(name, time_limit_s=60) as pool:
        pool.submit(*group(3, ["good", "bad"]))
        rewards, report = rewarded(pool)[3]
    assert rewards == (None, None)
    (fault,) = report.events
    assert (fault.function, fault.sample) == (f"kit.rewards:{name}", sample)
    assert message in fault.message
    assert "\n" not in str(fault)


def test_the_report_of_an_exception_names_the_line_of_the_function():
    with pool_of("raises") as pool:
        pool.submit(*group(3, ["good", "bad"]))
        ((_, report),) = rewarded(pool).values()
    assert report.events[0].line == f"{FILE}:{line_of('raise KeyError')}"


def test_the_groups_after_a_bad_one_are_rewarded():
    with pool_of("raises") as pool:
        for position, text in enumerate(["bad", "good", "bad", "good"]):
            pool.submit(*group(position, [text]))
        found = rewarded(pool)
    assert [found[position][0] for position in range(4)] == [(None,), (0.0,), (None,), (0.0,)]


def test_another_function_does_not_make_up_for_the_bad_one():
    with pool_of("raises", "length") as pool:
        pool.submit(*group(0, ["bad"]))
        ((rewards, report),) = rewarded(pool).values()
    assert rewards == (None,)
    assert dict(report.values) == {"kit.rewards:raises": (None,), "kit.rewards:length": (3.0,)}


def test_a_run_that_asks_for_it_stops_at_the_first_bad_function():
    with pool_of("raises", on_error="stop") as pool:
        pool.submit(*group(7, ["bad"]))
        with pytest.raises(RuntimeError, match=r"reward kit\.rewards:raises, sample 7/0: KeyError.*on_error"):
            rewarded(pool)


def test_a_call_whose_process_is_killed_is_made_once_more(tmp_path):
    with pool_of("killed_once") as pool:
        before = pool.pids
        pool.submit(*group(0, ["a"], marker=str(tmp_path / "marker")))
        ((rewards, report),) = rewarded(pool).values()
        assert pool.pids != before
    assert (rewards, report.events) == ((1.0,), ())


def test_a_worker_that_is_killed_from_outside_is_replaced_and_loses_nothing(tmp_path):
    gate = tmp_path / "gate"
    with pool_of("after_file", workers=2, time_limit_s=60) as pool:
        for position in range(4):
            pool.submit(*group(position, ["a"], gate=str(gate)))
        pool.check()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        gate.touch()
        found = rewarded(pool)
    assert {position: rewards for position, (rewards, _) in found.items()} == dict.fromkeys(range(4), (1.0,))


def test_a_call_that_hangs_is_ended_and_made_once_more(tmp_path):
    clock, marker = Clock(), tmp_path / "marker"
    with pool_of("hangs_once", time_limit_s=10, clock=clock) as pool:
        pool.submit(*group(0, ["a"], marker=str(marker)))
        until(lambda: not pool.ready() and marker.exists(), "the first call")
        (pid,) = pool.pids
        clock.now = 10.5
        ((made, report),) = until(pool.ready, "the second call")
    assert (made.rewards, report.events) == ((1.0,), ())
    assert is_gone(pid)


def test_a_call_that_hangs_twice_is_given_up(tmp_path):
    clock, told = Clock(), tmp_path / "told"
    told.touch()
    with pool_of("hangs_and_tells", time_limit_s=10, clock=clock) as pool:
        pool.submit(*group(0, ["a"], told=str(told)))
        for call in (1, 2):
            until(lambda n=call: not pool.ready() and len(told.read_text().split()) == n, f"call {call}")
            clock.now += 10.5
        ((made, report),) = until(pool.ready, "the report")
        assert all(is_gone(int(pid)) for pid in told.read_text().split())
    assert made.rewards == (None,)
    assert [fault.message for fault in report.events] == ["it took longer than 10 s, 2 times"]


def test_output_of_a_function_is_no_answer():
    with pool_of("prints") as pool:
        pool.submit(*group(0, ["a", "b"]))
        pool.submit(*group(1, ["a"]))
        found = rewarded(pool)
    assert (found[0][0], found[1][0]) == ((1.0, 1.0), (1.0,))


def test_only_one_copy_of_a_function_that_forks_answers():
    with pool_of("forks") as pool:
        for position in range(5):
            pool.submit(*group(position, ["a"] * (position + 1)))
        found = rewarded(pool)
    assert {p: rewards for p, (rewards, _) in found.items()} == {p: (1.0,) * (p + 1) for p in range(5)}


def test_a_function_that_closes_the_connection_is_reported():
    with pool_of("closes_everything") as pool:
        pool.submit(*group(0, ["a"]))
        ((rewards, report),) = rewarded(pool).values()
    assert rewards == (None,)
    assert "its process" in report.events[0].message


def test_a_stopped_worker_does_not_block_a_large_submission():
    with pool_of("length", time_limit_s=60) as pool:
        pool.check()
        os.kill(pool.pids[0], signal.SIGSTOP)
        pool.submit(*group(0, ["a" * 2_000_000, "b"], prompt="p" * 2_000_000))
        assert pool.wait(0.01) == []
        os.kill(pool.pids[0], signal.SIGCONT)
        assert rewarded(pool)[0][0] == (2_000_000.0, 1.0)


def test_closing_ends_the_workers_and_what_they_have_started(tmp_path):
    with pool_of("leaves_a_child", "hangs", workers=2, time_limit_s=60) as pool:
        pool.submit(*group(0, ["a"], told=str(tmp_path / "pid")))
        child = until(lambda: pool.ready() or (tmp_path / "pid").exists(), "the child")
        pids = pool.pids
    child = until(lambda: int((tmp_path / "pid").read_text() or 0), "the child's id")
    until(lambda: all(is_gone(pid) for pid in (*pids, child)), "the end of all processes")


PARENT = """
from aedit.spec_rollout import RewardPool, RewardSpec
from kit.rewards import group
import os, signal
pool = RewardPool([RewardSpec(function="kit.rewards:hangs")], workers=2, time_limit_s=60)
pool.check()
pool.submit(*group(0, ["a"]))
print(*pool.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")
def test_workers_end_with_their_parent():
    path = os.pathsep.join(name for name in sys.path if name)
    said = subprocess.run(
        [sys.executable, "-c", PARENT], env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=60
    )
    pids = [int(word) for word in said.stdout.split()]
    assert len(pids) == 2
    until(lambda: all(is_gone(pid) for pid in pids), "the end of the workers")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("kit.rewards:lenght", "reward.functions: kit.rewards:lenght cannot be imported"),
        ("kit.rewards:not_callable", "reward.functions: kit.rewards:not_callable cannot be called"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("raises_at_import:f", "reward.functions cannot be imported: ZeroDivisionError: division by zero"),
        ("ends_at_import:f", "a worker that imports them ended with exit code 5, 3 times"),
    ],
)
def test_a_function_that_cannot_be_imported_is_said_before_the_first_call(
    function, message, tmp_path, monkeypatch
):
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    (tmp_path / "ends_at_import.py").write_text("import os; os._exit(5)")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        RewardPool([RewardSpec(function=function)]) as pool,
        pytest.raises(ValueError, match=re.escape(message)),
    ):
        pool.check()
