"""Tests `aedit run` with real torchrun and stand-in nodes: starts, messages and processes that remain."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from aedit.child import from_json
from aedit.launch.config import (
    DataConfig,
    JoinOptions,
    NodeOptions,
    Placement,
    RunConfig,
    TrainConfig,
    check_hub_start,
    load_run,
)
from aedit.launch.config.config import EditConfig, HubConfig, LocalConfig
from aedit.launch.hub.folder import claim
from aedit.launch.node import __main__ as node
from aedit.launch.node import build, world
from aedit.launch.processes import join_run
from aedit.launch.processes.cluster import torchrun_command
from aedit.launch.records import claimed, next_attempt, prepare
from aedit.launch.records.run_directory import MIN_FREE_BYTES
from aedit.types import UserError

LIMIT_S = 60

NODE = """
import json, os, signal, sys, time
from pathlib import Path
run_dir = Path(sys.argv[1]).parent
options = json.loads(sys.argv[2])
rank, ranks = int(os.environ["RANK"]), options["ranks"]
node = rank // ranks
attempt = options["attempt"] + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
mode = (run_dir.parent / "mode").read_text()
home = run_dir / "nodes" / str(node)
home.mkdir(parents=True, exist_ok=True)
log = open(home / f"attempt_{attempt}.log", "a", buffering=1)

def leave(number, frame):
    (home / "saved").write_text(str(rank))
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else leave)
refusing = mode in ("refuse first", "refuse behind") and node == 1
if refusing:
    print("aedit: data.source: no file matches nothing.txt", file=log)
    sys.stderr.write("aedit: data.source: no file matches nothing.txt\\n")  # as aedit.launch.node does it
    sys.stderr.flush()
    (home / "refused").touch()
if mode == "refuse behind" and node == 0:
    while not (home.parent / "1" / "refused").exists():
        time.sleep(0.01)
    sys.stderr.write("PeersMissing: a node has left\\n")
    sys.exit(1)
if refusing and mode == "refuse first":
    sys.exit(2)
if mode == "refuse early":
    sys.stderr.write("aedit: run.toml is of another make\\n")
    sys.exit(2)
if mode == "crash" and node == 1:
    print("RuntimeError: the disk sings", file=log)
    sys.exit(7)
if mode == "crash once" and node == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
events = open(home / "events.jsonl", "a", buffering=1)
print(json.dumps({"event": "start", "t": 0, "attempt": attempt, "node": node, "nodes": 2, "ranks": ranks,
    "pid": os.getpid(), "device": "cpu", "params": 1, "units": ["rest"], "params_per_unit": [1],
    "resumed_round": None, "step": 0}), file=events)
(home / f"pid_{rank}").write_text(str(os.getpid()))
if mode != "crash once":
    time.sleep(600)
"""

DRIVER = """
import faulthandler, functools, sys
faulthandler.dump_traceback_later(50)
import aedit.launch.processes.run_local as wrapper
wrapper.run = functools.partial(wrapper.run, program=("--", sys.argv[1]))
wrapper.LEAVE_LIMIT_S = float(sys.argv[2])
from aedit.launch.cli import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def start(tmp_path):
    """Yield a function that starts the wrapper on two stand-in nodes of a mode; end all it started."""
    (tmp_path / "node.py").write_text(NODE)
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "run.toml").write_text('name = "x"\ndevice = "cpu"\n')
    started = []

    def start(mode, *flags, leave_limit_s=30):
        (tmp_path / "mode").write_text(mode)
        words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "node.py"), str(leave_limit_s)]
        words += ["run", str(tmp_path / "run.toml"), "--local", "2", f"--dir={tmp_path}", *flags]
        env = dict(os.environ, OMP_NUM_THREADS="1")
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for left in psutil.process_iter(["cmdline"]):
        if str(tmp_path / "node.py") in (left.info["cmdline"] or []):
            left.kill()


def ended(process):
    """Return exit code and stderr of a wrapper; if it does not end, stderr shows where its threads are."""
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(process.communicate()[1])
    return process.returncode, err


def pids(run_dir):
    return [int(path.read_text() or 0) for path in run_dir.glob("nodes/*/pid_*")]


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.05)


def both_nodes_run(run_dir):
    found = pids(run_dir)
    return len(found) == 2 and all(found) and all(psutil.pid_exists(pid) for pid in found)


def gone(run_dir):
    return not any(psutil.pid_exists(pid) for pid in pids(run_dir))


def test_a_good_run_leaves_its_configuration_and_code_and_a_killed_node_is_started_again(start, tmp_path):
    process = start("crash once", "--train.steps", "7")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "steps = 7" in (tmp_path / "x/run.toml").read_text()
    assert re.search(r"^sources: [0-9a-f]{16}$", (tmp_path / "x/code.txt").read_text(), re.M)
    assert "Traceback" not in out + err
    # As the node of a run writes it, for the views.
    first = (tmp_path / "x/nodes/0/events.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["event"] == "start"
    logs = sorted(path.name for path in (tmp_path / "x/nodes/1").glob("attempt_*.log"))
    assert logs == ["attempt_1.log", "attempt_2.log"], "a killed node is started again"


@pytest.mark.parametrize(
    ("mode", "restarts", "message"),
    [
        ("refuse first", "50", "aedit: data.source: no file matches nothing.txt"),
        pytest.param(
            "refuse behind", "50", "aedit: data.source: no file matches nothing.txt", marks=pytest.mark.slow
        ),
        ("refuse behind", "0", "aedit: data.source: no file matches nothing.txt"),
        ("refuse early", "50", "aedit: run.toml is of another make"),
    ],
)
def test_what_only_the_person_can_mend_ends_the_run_with_one_line_and_no_restarts(
    start, tmp_path, mode, restarts, message
):
    """Also where the failure of a peer is seen first: in "refuse behind" the node that refuses ends last."""
    process = start(mode, "--restarts", restarts)
    code, err = ended(process)
    assert code == 2, err
    assert err.strip().splitlines() == [message]
    # torchrun begins restarts before it can be told not to, on a busy machine a few.
    assert (tmp_path / "x/launch.log").read_text().count("failed (exitcode") <= max(2, int(restarts) // 2)
    assert gone(tmp_path / "x")


def test_a_node_that_fails_too_often_is_named_with_the_end_of_its_log(start, tmp_path):
    process = start("crash", "--restarts", "0")
    code, err = ended(process)
    assert code == 1, err
    assert "node 1 failed (exit code 7)" in err
    assert "RuntimeError: the disk sings" in err
    assert gone(tmp_path / "x")


BY_TIME = ("--edit.schedule", "seconds", "--edit.every", "5", "--train.seconds", "3600")
HUB = ("--local", "1", "--hub.address", "127.0.0.1:0", "--edit.landing", "arrival", *BY_TIME)
SWARM = ("--swarm.discovery", "file", "--swarm.parts", "2", "--edit.landing", "arrival", *BY_TIME)


def pid_of(directory):
    """Return the process id of the hub or peer in a folder; 0 if it does not run."""
    for process in psutil.process_iter(["cmdline"]):
        if f'"directory": "{directory}"' in " ".join(process.info["cmdline"] or []):
            return process.pid
    return 0


@pytest.mark.parametrize(
    ("number", "restarts", "message"),
    [
        (signal.SIGKILL, 0, "the hub has failed more often than restarts allows (killed by SIGKILL); see"),
        pytest.param(
            signal.SIGKILL,
            1,
            "the hub has failed more often than restarts allows (killed by SIGKILL); see",
            marks=pytest.mark.slow,
        ),
        pytest.param(signal.SIGTERM, 1, "the hub was stopped; see", marks=pytest.mark.slow),
    ],
)
def test_a_hub_that_has_ended_for_good_ends_the_run_and_its_nodes_save(
    start, tmp_path, number, restarts, message
):
    process = start("wait", *HUB, "--restarts", str(restarts))
    wait_for(lambda: pids(tmp_path / "x") and all(pids(tmp_path / "x")), "the node")
    before = 0
    for _ in range(1 + restarts * (number == signal.SIGKILL)):
        wait_for(lambda old=before: pid_of(tmp_path / "x/hub") not in (0, old), "the hub")
        before = pid_of(tmp_path / "x/hub")
        os.kill(before, number)
    code, err = ended(process)
    assert code == 1, err
    assert f"aedit: the run cannot go on: {message} {tmp_path / 'x/hub.log'}" in err
    assert (tmp_path / "x/nodes/0/saved").exists()
    assert gone(tmp_path / "x")


@pytest.mark.slow
def test_a_hub_that_refuses_to_go_on_ends_the_run_with_its_reason(start, tmp_path):
    process = start("wait", *HUB, "--restarts", "3")
    wait_for(lambda: pids(tmp_path / "x") and all(pids(tmp_path / "x")), "the node")
    os.kill(pid_of(tmp_path / "x/hub"), signal.SIGSTOP)
    for part in (tmp_path / "x/hub").glob("[js]*-*"):  # journal and snapshots
        part.write_bytes(b"of another program" * 100)
    os.kill(pid_of(tmp_path / "x/hub"), signal.SIGKILL)
    code, err = ended(process)
    assert code == 1, err
    assert re.search(r"the run cannot go on: the hub has failed \(exit code 2\): .*journal", err)


@pytest.mark.slow
def test_a_peer_of_a_local_swarm_that_has_failed_for_good_ends_the_run(start, tmp_path):
    process = start("wait", *SWARM, "--restarts", "0")
    wait_for(lambda: pids(tmp_path / "x") and all(pids(tmp_path / "x")), "the nodes")
    os.kill(pid_of(tmp_path / "x/peers/local-1"), signal.SIGKILL)
    code, err = ended(process)
    assert code == 1, err
    assert "the run cannot go on: the peer of node local-1 has failed more often than restarts allows" in err
    assert gone(tmp_path / "x")


def test_ctrl_c_lets_every_node_save_and_leave_and_two_runs_do_not_share_a_directory(start, tmp_path):
    process = start("wait")
    wait_for(lambda: both_nodes_run(tmp_path / "x"), "the nodes")
    second = start("wait")
    assert "another aedit run is using it" in second.communicate(timeout=LIMIT_S)[1]
    assert second.returncode == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "finishing the step, landing, saving" in err
    assert [(tmp_path / f"x/nodes/{i}/saved").read_text() for i in (0, 1)] == ["0", "1"]
    assert gone(tmp_path / "x")


def test_a_second_ctrl_c_leaves_at_once(start, tmp_path):
    process = start("stubborn", leave_limit_s=600)
    wait_for(lambda: both_nodes_run(tmp_path / "x"), "the nodes")
    process.send_signal(signal.SIGINT)
    assert "Ctrl-C again" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert gone(tmp_path / "x")


def test_nodes_that_do_not_leave_in_time_are_ended(start, tmp_path):
    process = start("stubborn", leave_limit_s=1)
    wait_for(lambda: both_nodes_run(tmp_path / "x"), "the nodes")
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 143, err
    assert "did not save within 1 s" in err
    assert gone(tmp_path / "x")


def test_ctrl_c_before_the_nodes_are_there_ends_the_run(start, tmp_path):
    process = start("wait")
    wait_for((tmp_path / "x/launch.log").exists, "torchrun")
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert gone(tmp_path / "x")


def test_when_the_wrapper_is_killed_its_nodes_save_and_go(start, tmp_path):
    process = start("wait")
    wait_for(lambda: both_nodes_run(tmp_path / "x"), "the nodes")
    process.kill()
    wait_for(lambda: gone(tmp_path / "x"), "the nodes to go")
    assert (tmp_path / "x/nodes/0/saved").exists()


def take_a_step(run_dir):
    """Write what a node that has trained leaves behind."""
    (run_dir / "nodes/0").mkdir(parents=True)
    (run_dir / "nodes/0/metrics.jsonl").write_text('{"step": 12, "loss": 1.5}\n')


def test_the_training_of_a_run_cannot_change_under_its_name(tmp_path):
    prepare(RunConfig(dir=str(tmp_path)))
    take_a_step(tmp_path / "run")
    longer = RunConfig(dir=str(tmp_path), train=TrainConfig(steps=5), restarts=1, local=LocalConfig(ranks=2))
    prepare(longer)
    changed = RunConfig(dir=str(tmp_path), train=TrainConfig(lr=0.5), edit=EditConfig(units="model"))
    with pytest.raises(UserError) as caught:
        prepare(changed)
    message = str(caught.value)
    assert "train.lr (0.001 -> 0.5)" in message
    assert 'edit.units ("auto" -> "model")' in message
    assert "--name" in message
    assert "train.steps" not in message
    assert "steps = 5" in (tmp_path / "run/run.toml").read_text()


def test_a_run_of_a_build_without_special_tokens_goes_on_without_them(tmp_path, capsys):
    config = RunConfig(dir=str(tmp_path), data=DataConfig(tokenizer="some/model"))
    path = prepare(config)
    take_a_step(tmp_path / "run")
    assert load_run(path).data.special_tokens == "tokenizer"
    prepare(config)
    assert capsys.readouterr().err == ""
    older = path.read_text().replace('special_tokens = "tokenizer"\n', "")
    assert older != path.read_text()
    path.write_text(older)
    for _ in range(2):  # the second time the file has the key
        prepare(config)
        assert 'goes on with data.special_tokens = "none", as it began' in capsys.readouterr().err
        assert load_run(path).data.special_tokens == "none"
    hub = tmp_path / "run" / "hub"
    hub.mkdir()
    (hub / "run.toml").write_text(older)
    (hub / "part.json").write_text("[1, 1]")
    assert claim(hub, config, (1, 1)).data.special_tokens == "none"
    assert claim(hub, config, (1, 1)).data.special_tokens == "none"


def test_bytes_have_no_special_tokens_before_or_after_the_key(tmp_path, capsys):
    path = prepare(RunConfig(dir=str(tmp_path)))
    assert "special_tokens" not in path.read_text()
    take_a_step(tmp_path / "run")
    prepare(RunConfig(dir=str(tmp_path)))
    assert capsys.readouterr().err == ""


def test_a_run_that_never_took_a_step_does_not_block_its_name(tmp_path):
    run_dir, changed = tmp_path / "run", RunConfig(dir=str(tmp_path), seed=1)
    prepare(RunConfig(dir=str(tmp_path)))
    events = run_dir / "nodes/0/events.jsonl"
    for folder in ("nodes/0/checkpoints/round_000000", "hub", "data"):
        (run_dir / folder).mkdir(parents=True)
    events.write_text('{"event": "start", "step": 0}\n')
    (run_dir / "hub/metrics.jsonl").write_text('{"steps": 0, "nodes": [{"steps": 0}]}\n')
    with claimed(run_dir, 0), claimed(run_dir, 1), pytest.raises(UserError, match=r"seed \(0 -> 1\)"):
        prepare(changed)
    (run_dir / "hub/lock").touch()
    with (run_dir / "hub/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"seed \(0 -> 1\)"):
            prepare(changed)
    assert events.exists()
    with claimed(run_dir, 0):
        prepare(changed)
    assert [path.name for path in run_dir.iterdir() if path.is_dir()] == ["data"]
    assert "seed = 1" in (run_dir / "run.toml").read_text()
    events.parent.mkdir(parents=True)
    events.write_text('{"event": "start", "step": 0}\n{"event": "round", "step": 10}\n')
    with pytest.raises(UserError, match=r"seed \(1 -> 0\)"):
        prepare(RunConfig(dir=str(tmp_path)))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run: cannot be written: .*choose another --dir"):
        prepare(RunConfig(dir=str(tmp_path / "file")))


def test_a_full_disk_is_told_before_the_run(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": MIN_FREE_BYTES - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"255 MiB free, a run needs 256"):
        prepare(RunConfig(dir=str(tmp_path)))
    assert not (tmp_path / "run/run.toml").exists()


def test_a_node_that_joins_finds_its_hub_elsewhere_but_not_another_training(tmp_path):
    config = RunConfig(dir=str(tmp_path), edit=EditConfig(landing="arrival"))
    hub = HubConfig(address="127.0.0.1:1")
    own = prepare(replace(config, hub=hub), "a.b")
    assert own.name == "join_a.b.toml"
    take_a_step(own.parent)
    prepare(replace(config, hub=replace(hub, address="127.0.0.1:2")), "a.b")
    assert "127.0.0.1:2" in own.read_text()
    with pytest.raises(UserError, match=r"seed \(0 -> 1\); .*choose another --dir"):
        prepare(replace(config, hub=hub, seed=1), "c")


@pytest.mark.parametrize(
    ("address", "placement", "remedy"),
    [
        ("10.0.0.1:7000", Placement(), r"aedit hub CONFIG .* aedit join 10.0.0.1:7000"),
        ("127.0.0.1:0", Placement(nodes=2, master="a:1"), r"--nodes, --master: .* aedit join HOST:PORT"),
    ],
)
def test_a_run_of_several_machines_with_a_hub_names_their_commands(address, placement, remedy):
    config = RunConfig(edit=EditConfig(landing="arrival"), hub=HubConfig(address=address))
    with pytest.raises(UserError, match=remedy):
        check_hub_start(config, placement)
    check_hub_start(config, Placement(nodes=2, local=True))


def test_attempts_are_numbered_over_all_nodes(tmp_path):
    assert next_attempt(tmp_path) == 1
    for name in ("nodes/0/attempt_2.log", "nodes/1/attempt_11.log", "nodes/1/attempt_x.log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert next_attempt(tmp_path) == 12


def test_a_directory_may_hold_several_nodes_of_one_run(tmp_path):
    with claimed(tmp_path, 0), claimed(tmp_path, 1):
        pass


def test_every_machine_starts_its_own_ranks_and_meets_at_the_master():
    config = RunConfig(device="cpu", local=LocalConfig(ranks=2), restarts=5)
    words = torchrun_command(Path("run.toml"), config, Placement(nodes=3, node=1, master="a:29500"), 4)
    line = " ".join(words)
    assert "--nproc-per-node=2 --max-restarts=5 --nnodes=3 --node-rank=1" in line
    assert "--master-addr=a --master-port=29500" in line
    assert words[-4:-1] == ["-m", "aedit.launch.node", "run.toml"]
    assert from_json(NodeOptions, words[-1]) == NodeOptions(ranks=2, attempt=4)
    member = JoinOptions(hub="a:1,b:2", name="n", replicas=Path("r.json"), keys=Path("k"), prefers=1)
    local = Placement(nodes=3, local=True)
    words = torchrun_command(Path("run.toml"), config, local, 1, membership=member)
    assert {"--nproc-per-node=2", "--standalone"} <= {*words}
    assert from_json(NodeOptions, words[-1]) == NodeOptions(ranks=2, local=True, membership=member)
    assert "--nproc-per-node=6" in torchrun_command(
        Path("run.toml"), config, Placement(nodes=3, local=True), 1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"nodes": 0, "local": True}, "--local"),
        ({"nodes": 2}, "--master"),
        ({"nodes": 2, "node": 2, "master": "a:1"}, "--node"),
        ({"nodes": 2, "master": "a"}, "HOST:PORT"),
    ],
)
def test_an_impossible_placement_is_named(options, message):
    with pytest.raises(UserError, match=message):
        Placement(**options)


def test_the_line_of_a_node_that_refuses_is_one_write(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "none.toml")])
    monkeypatch.setattr(os, "write", lambda file, line: written.append(line))
    assert node.main() == 2
    assert len(written) == 1
    assert re.fullmatch(rb"aedit: .+\n", written[0])


def test_a_node_refuses_before_the_others_can_see_it_leave(tmp_path, monkeypatch):
    """The line is in the log and reaches the launcher, whose output the log has replaced."""
    text = (tmp_path / "text.txt").absolute()
    (tmp_path / "run.toml").write_text(f'name = "x"\ndir = "{tmp_path}"\n[data]\nsource = "{text}"\n')
    happened = []
    monkeypatch.setattr(sys, "argv", ["node", str(tmp_path / "run.toml"), '{"attempt": 3}'])
    monkeypatch.setattr(os, "write", lambda file, line: happened.append((os.fstat(file).st_ino, line)))
    monkeypatch.setattr(world, "join_world", lambda *_: SimpleNamespace(node=1, rank=0))
    monkeypatch.setattr(world, "leave_world", lambda: happened.append("left"))
    monkeypatch.setattr(build, "build", refuse)
    saved = [os.dup(1), os.dup(2)]
    launcher = os.fstat(2).st_ino
    try:
        assert node.main() == 2
    finally:
        for number, file in enumerate(saved, start=1):
            os.dup2(file, number)
            os.close(file)
    log = (tmp_path / "x/nodes/1/attempt_3.log").stat().st_ino
    line = b"aedit: no text there\n"
    assert happened == [(launcher, line), (log, line), "left"]


def refuse(*_):
    raise UserError("no text there")


def test_a_node_that_joins_takes_over_neither_folder_device_nor_trackers_of_the_hub(monkeypatch):
    edit = EditConfig(landing="arrival")
    told = RunConfig(name="wide", dir="far", device="cuda", log=("wandb",), seed=7, edit=edit)
    taken = []
    monkeypatch.setattr(join_run, "joined_to", lambda place, _: (place, told))

    def stop(config, placement):
        taken.append(config)
        raise UserError("far enough")

    monkeypatch.setattr(join_run, "preflight", stop)
    for flags in ([], ["--log", "tensorboard"]):
        with pytest.raises(UserError, match="far enough"):
            join_run.join("127.0.0.1:1", flags, name="box")
    assert [(c.name, c.seed, c.dir, c.device) for c in taken] == 2 * [("wide", 7, "runs", "auto")]
    assert [c.log for c in taken] == [(), ("tensorboard",)]
