"""Tests of child processes: options as JSON, the wait for readiness, restarts, and the end of groups."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from kit.waiting import until

from aedit.child import LOOK_EVERY_S, Child, HostProcess, end_group, from_json, start_module, to_json
from aedit.types import UserError


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...] = ()
    pair: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Outer:
    place: Path
    other: Path | None = None
    inner: Inner | None = None
    rows: tuple[tuple[str, str], ...] = ()
    share: float = 0.5
    on: bool = False


@pytest.mark.parametrize(
    "made",
    [
        Outer(Path("/a b/c")),
        Outer(Path("x"), Path('"y"'), Inner(("a", "b,c", ""), (3, 4)), (("k", "v"),), 0.1, True),
        Outer(Path("x"), inner=Inner(("one",))),
    ],
)
def test_options_arrive_as_they_were(made):
    text = to_json(made)
    assert "\n" not in text
    assert from_json(Outer, text) == made


def host(tmp_path, program, **options):
    settings = {"directory": tmp_path, "log": tmp_path / "log", "restarts": 0} | options
    return HostProcess("the hub", [sys.executable, "-c", program], **settings)


def test_a_host_is_ready_with_its_file_and_its_last_message_says_why_it_is_not(tmp_path):
    (tmp_path / "address").write_text("of an earlier start")
    ready = host(tmp_path, f"open({str(tmp_path / 'address')!r}, 'w').write('h:1'); input()")
    try:
        assert ready.wait_for("address") == "h:1"
    finally:
        ready.child.kill()
    silent = host(tmp_path, "print('aedit: the port is taken'); print('more')")
    with pytest.raises(UserError, match=r"^the port is taken$"):
        silent.wait_for("address")
    with pytest.raises(UserError, match=r"^not reachable: see .*log$"):
        silent.wait_for("address", fault="not reachable")


@pytest.mark.parametrize(
    ("code", "restarts", "fault"), [(3, 0, "exit code 3"), (3, 2, ""), (2, 2, "exit code 2")]
)
def test_a_host_is_restarted_as_often_as_is_allowed_and_not_after_an_error_of_the_user(
    tmp_path, code, restarts, fault
):
    failing = host(tmp_path, f"raise SystemExit({code})", restarts=restarts)
    failing.child.exit_code()
    assert (fault in failing.fault) if fault else failing.fault == ""
    failing.mend()
    failing.child.exit_code()
    assert failing.restarts == restarts - (fault == "")


def test_the_end_of_a_group_is_that_of_what_the_process_has_started(tmp_path):
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '99']).pid, flush=True); input()"
    pipe = subprocess.PIPE
    process = start_module([sys.executable, "-c", program], stdin=pipe, stdout=pipe)
    started = psutil.Process(int(process.stdout.readline()))
    end_group(process)
    assert process.returncode == -9
    assert started.wait(10) is None or not started.is_running()
    process.stdin.close()
    process.stdout.close()


def test_what_a_command_has_started_ends_with_it_once_it_was_seen(tmp_path):
    program = (
        "import subprocess, time; sleeper = subprocess.Popen(['sleep', '99'], start_new_session=True);"
        "print(sleeper.pid, flush=True); time.sleep(99)"
    )
    with Child([sys.executable, "-c", program], tmp_path / "log") as child:
        until(lambda: child.output().strip(), "the process")
        started = psutil.Process(int(child.output()))
        assert child.running()
        child.look()
    until(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE, "its end")
    assert not child.running()


def test_descendants_are_searched_for_every_few_seconds_however_often_it_is_asked_for(tmp_path, monkeypatch):
    """Each search reads the status of all processes of the machine."""
    searches = []
    search = psutil.Process.children
    monkeypatch.setattr(
        psutil.Process, "children", lambda self, recursive: searches.append(self) or search(self, recursive)
    )
    began = time.monotonic()
    with Child(["sleep", "99"], tmp_path / "log") as child:
        for _ in range(200):
            child.look()
        assert 1 <= len(searches) <= 1 + (time.monotonic() - began) / LOOK_EVERY_S


CATCHES = """
import os, signal
from aedit.child import StopSignals
stop = StopSignals()
with stop.asked._cond:  # as in a wait that has just begun or ended
    os.kill(os.getpid(), signal.SIGTERM)
while not stop.asked.wait(0.2):
    pass
"""


def test_a_signal_ends_a_process_at_whatever_point_of_its_wait_it_comes():
    """Found: the handler waited for ever for the lock of the event, which the main thread held."""
    assert subprocess.run([sys.executable, "-c", CATCHES], timeout=60).returncode == 0


OUTLIVES = """
import signal, sys, time
from pathlib import Path
from aedit import system
from aedit.child import Child
log, hangs = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
program = (
    "import signal, time; from aedit import system; system._END_S = system._LOOK_S = 0.1;"
    "system.end_with_named_parent();"
    "{}print('ready', flush=True); time.sleep(999)"
).format("signal.signal(signal.SIGTERM, lambda *_: None); " if hangs == "True" else "")
child = Child([sys.executable, "-c", program], Path(log), own=True)
while "ready" not in child.output():
    time.sleep(0.01)
print(child._process.pid, flush=True)
time.sleep(999)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_child_ends_with_its_parent_although_that_ignored_the_signal_or_the_child_hangs(tmp_path, hangs):
    words = [sys.executable, "-c", OUTLIVES, str(tmp_path / "log"), str(hangs)]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait(10)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its end", 60.0)
    finally:
        parent.stdout.close()
        if child.is_running():
            child.kill()


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
def test_a_child_ends_with_a_parent_that_is_killed_while_the_child_starts(tmp_path, after_s):
    """It has not asked the kernel for the signal yet: it must see that its parent is another one by then."""
    program = (
        "import sys, time; from pathlib import Path; from aedit.child import Child;"
        "child = Child([sys.executable, '-m', 'aedit.launch.cli', 'hub', sys.argv[1]], Path(sys.argv[2]),"
        " own=True); print(child._process.pid, flush=True); time.sleep(999)"
    )
    toml = tmp_path / "run.toml"
    toml.write_text(f'name = "run"\ndir = "{tmp_path}"\n[hub]\naddress = "127.0.0.1:0"\n')
    words = [sys.executable, "-c", program, str(toml), str(tmp_path / "log")]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        time.sleep(after_s)
        parent.kill()
        parent.wait(10)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its end", 60.0)
    finally:
        parent.stdout.close()
        if child.is_running():
            child.kill()


def test_a_signal_writes_where_all_threads_of_a_child_are(tmp_path):
    program = (
        "import sys, threading, time; from aedit.child import begin_child;"
        "begin_child(sys.argv[1:]);"
        "exec('def waits_for_an_answer(): time.sleep(600)');"
        "threading.Thread(target=waits_for_an_answer, daemon=True).start();"
        f"open({str(tmp_path / 'ready')!r}, 'w').close();"
        "time.sleep(600)"
    )
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", program, str(os.getpid())], stderr=stderr)
    try:
        until((tmp_path / "ready").exists, "the start", 120)
        process.send_signal(signal.SIGUSR1)
        until(
            lambda: "waits_for_an_answer" in log.read_text() and "<module>" in log.read_text(), "stacks", 60
        )
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
