"""Tests that nothing a reward function does ends a run, blocks it, or is lost without a report."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    ("exits_in_a_task", "3/0", "SystemExit: enough"),
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
    with pool_of("hangs_once", time_limit_s=10, first_time_limit_s=10, clock=clock) as pool:
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
    with pool_of("hangs_and_tells", time_limit_s=10, first_time_limit_s=10, clock=clock) as pool:
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


@contextmanager
def server():
    """Yield the URL of a server that answers with the number of bytes it gets, and its connections."""
    connections = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            connections.append(self.client_address)

        def do_POST(self):
            answer = str(len(self.rfile.read(int(self.headers["Content-Length"])))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/", connections
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["locked", "returns_a_coroutine"])
def test_locks_and_semaphores_of_a_module_work_in_all_groups(name):
    with pool_of(name) as pool:
        for position in range(6):
            pool.submit(*group(position, ["a" * n for n in range(5)]))
        found = rewarded(pool)
    lengths = ((0.0, 1.0, 2.0, 3.0, 4.0), ())
    assert [(rewards, report.events) for rewards, report in found.values()] == [lengths] * 6


def test_an_http_client_of_a_module_keeps_its_connections_over_the_groups():
    with server() as (url, connections), pool_of("asked") as pool:
        for position in range(5):
            pool.submit(*group(position, ["abc", "d", "ef"], url=url))
            assert rewarded(pool)[position][0] == (3.0, 1.0, 2.0)
        assert len(connections) <= 3


def test_asynchronous_calls_of_a_worker_run_together(tmp_path):
    """Each call ends only when all three run."""
    with pool_of("meets", "locked", time_limit_s=60) as pool:
        for position in range(3):
            pool.submit(*group(position, ["3"], name=str(position), told=str(tmp_path / "told")))
        found = rewarded(pool)
    assert [rewards for rewards, _ in found.values()] == [(2.0,)] * 3


def test_an_asynchronous_call_is_cancelled_at_the_limit_and_the_others_go_on(tmp_path):
    told = tmp_path / "told"
    with pool_of("meets", time_limit_s=0.5, first_time_limit_s=0.5) as pool:
        before = pool.pids
        pool.submit(*group(0, ["100"], name="waits in vain", told=str(told)))
        pool.submit(*group(1, ["1"], name="b", told=str(told)))
        found = rewarded(pool)
        assert pool.pids == before
    assert [found[position][0] for position in range(2)] == [(None,), (1.0,)]
    assert [fault.message for fault in found[0][1].events] == ["it took longer than 0.5 s, 2 times"]
    assert told.read_text().splitlines() == [f"{before[0]} waits in vain"] * 2


def test_a_call_that_cannot_be_cancelled_ends_with_its_process_and_the_next_ones_work():
    with pool_of("cannot_be_cancelled", "locked", time_limit_s=0.3, first_time_limit_s=0.3) as pool:
        before = pool.pids
        pool.submit(*group(0, ["a"]))
        ((rewards, report),) = rewarded(pool).values()
        assert pool.pids != before
    assert rewards == (None,)
    assert dict(report.values) == {"kit.rewards:cannot_be_cancelled": (None,), "kit.rewards:locked": (1.0,)}
    assert [fault.message for fault in report.events] == ["it took longer than 0.3 s, 2 times"]


def test_a_call_beside_one_that_ends_the_process_is_made_once_more_alone_and_rewarded(tmp_path):
    with pool_of("locked", "leaves_after_the_others", time_limit_s=60) as pool:
        for position in range(3):
            pool.submit(*group(position, ["a"]))
        found = rewarded(pool)
    assert [report.values["kit.rewards:locked"] for _, report in found.values()] == [(1.0,)] * 3
    faults = [fault for _, report in found.values() for fault in report.events]
    assert {fault.function for fault in faults} == {"kit.rewards:leaves_after_the_others"}


def test_only_one_copy_of_an_asynchronous_function_that_forks_answers():
    with pool_of("forks_and_awaits") as pool:
        pool.submit(*group(0, ["a"]))
        pool.submit(*group(1, ["a"]))
        found = rewarded(pool)
        assert [rewards for rewards, _ in found.values()] == [(float(pool.pids[0]),)] * 2


@pytest.mark.parametrize(("first_s", "expected"), [(60, (1.0,)), (0.5, (None,))])
def test_the_first_call_in_a_process_has_a_limit_of_its_own(first_s, expected):
    """It takes 2 s, and is given up if the limit of the others holds for it too."""
    with pool_of("loads_slowly", time_limit_s=0.5, first_time_limit_s=first_s) as pool:
        pool.submit(*group(0, ["a"]))
        assert rewarded(pool)[0][0] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("never", "the last one: reward kit.rewards:never, sample 4/0: OSError: the judge is not there"),
        ("only_none", "the last one: all functions returned None for all completions"),
    ],
)
def test_groups_in_a_row_without_a_reward_end_the_run(name, message):
    with pool_of(name, max_failed_groups=3) as pool:
        for position in range(2):
            pool.submit(*group(position, ["a"]))
        rewarded(pool)
        pool.submit(*group(4, ["a"]))
        with pytest.raises(RuntimeError, match=f"3 groups in a row have got no reward.*{message}"):
            rewarded(pool)


def test_a_group_with_a_reward_begins_the_count_of_failed_groups_again():
    with pool_of("raises", max_failed_groups=2) as pool:
        for position, text in enumerate(["bad", "good"] * 3):
            pool.submit(*group(position, [text]))
            rewarded(pool)


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        (
            "needs_more",
            ("answer", "solution"),
            "reward kit.rewards:needs_more requires the argument 'trainer_state', expected prompts,"
            " completions, completion_ids or a column that all prompts have: answer, solution;",
        ),
        ("needs_more", ("trainer_state",), "requires the argument 'solution'"),
        ("by_position", (), "reward kit.rewards:by_position takes completions by position only"),
        ("never", (), "kit.rewards:never fails on the first prompts: OSError: the judge is not there ("),
        ("raises", (), "KeyError: 'no such"),
        ("nothing", (), "returned None, expected a list of 2, one number or None per completion"),
        ("short", (), "returned 1 values, expected a list of 2"),
        ("nan", (), "returned nan as value 1"),
        ("text", (), "returned '1' as value 0"),
        ("leaves", (), "its process ended with exit code 3, 2 times"),
        ("hangs", (), "it took longer than 0.5 s, 2 times"),
    ],
)
def test_a_function_that_can_never_work_is_refused_before_the_run(name, columns, message):
    examples = [group(i, ["bad", "bad"]) for i in range(2)]
    with pool_of("one", name, columns=columns, time_limit_s=0.5, first_time_limit_s=0.5) as pool:
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            pool.check(examples)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["one", "raises", "only_none", "scorer", "locked"])
def test_a_function_that_works_on_an_example_is_not_refused(name):
    with pool_of(name, columns=(), on_error="stop") as pool:
        pool.check([group(0, ["bad", "bad"]), group(1, ["good", "good"])])
        pool.submit(*group(0, ["good"]))
        assert pool.wait(60)


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
