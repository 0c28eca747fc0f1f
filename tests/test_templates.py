"""Tests that the launch templates start the node command as the current command line parses it."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from aedit.launch.cli.main import parser
from aedit.launch.config import Placement, split_flags

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "launch" / "templates"
TOML = "configs/tiny.toml"
FLAGS = ["--train.steps", "5", "--data.source", "two words"]


def start(template, *words, path=None, **env):
    """Run a template to its end; `path` is a folder of stand-in programs. Returns the finished process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | env
    if path:
        env["PATH"] = f"{path}:{env['PATH']}"
    command = ["bash", TEMPLATES / template, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)


def pretend(folder, name, body):
    program = folder / name
    program.write_text(f"#!/usr/bin/env bash\n{body}\n")
    program.chmod(0o755)


def understood(words):
    """Return what the project's parser makes of a node command, without `aedit` and configuration flags."""
    assert words[0] == "aedit"
    rest, flags = split_flags(words[1:])
    options = parser().parse_args(rest)
    Placement(nodes=options.nodes, node=options.node, master=options.master)
    return (options.nodes, options.node, options.master, *map(str, options.config)), flags


def test_ssh_gives_every_machine_its_own_number_and_the_same_master(tmp_path):
    done = start("ssh.sh", "--dry-run", "--dir", "/a b", TOML, "me@one", "two", "three", "--", *FLAGS)
    assert done.returncode == 0
    for node, line in enumerate(done.stdout.splitlines()):
        *ssh, host, remote = shlex.split(line)
        assert ssh[:2] == ["ssh", "-tt"]
        assert host == ["me@one", "two", "three"][node]
        assert shlex.split(remote)[:4] == ["cd", "/a b", "&&", "exec"]
        assert understood(shlex.split(remote)[4:]) == ((3, node, "one:29500", TOML), FLAGS)
    assert node == 2


def test_slurm_gives_every_task_its_own_number_and_the_first_machine_as_master(tmp_path):
    pretend(tmp_path, "scontrol", '[[ "$*" == "show hostnames n[1-3]" ]] && printf "n%s\\n" 1 2 3')
    pretend(tmp_path, "aedit", 'printf "%q " aedit "$@"')
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "123456"}
    done = start("slurm.sbatch", "--dry-run", TOML, *FLAGS, path=tmp_path, **job)
    assert done.returncode == 0
    srun = shlex.split(done.stdout)
    assert srun[0] == "srun"
    task = srun[srun.index("bash") :]
    for node in range(3):
        env = os.environ | {"SLURM_NODEID": str(node), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        said = subprocess.run(task, env=env, capture_output=True, text=True, check=True, timeout=30).stdout
        assert understood(shlex.split(said)) == ((3, node, "n1:23456", TOML), FLAGS)


def test_slurm_finds_the_first_machine_of_very_many(tmp_path):
    pretend(tmp_path, "scontrol", 'printf "n%s\\n" {1..20000}')
    job = {"SLURM_JOB_NODELIST": "n[1-20000]", "SLURM_JOB_NUM_NODES": "20000", "SLURM_JOB_ID": "1"}
    done = start("slurm.sbatch", "--dry-run", TOML, path=tmp_path, **job)
    assert done.returncode == 0
    assert "--nodes 20000 --master n1:20001" in done.stdout


def test_slurm_starts_what_its_dry_run_prints(tmp_path):
    pretend(tmp_path, "scontrol", "echo n1")
    pretend(tmp_path, "srun", 'printf "%q " srun "$@"; echo; exit 5')
    job = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    printed = start("slurm.sbatch", "--dry-run", TOML, *FLAGS, path=tmp_path, **job)
    started = start("slurm.sbatch", TOML, *FLAGS, path=tmp_path, **job)
    assert started.stdout == printed.stdout
    assert started.returncode == 5


def test_slurm_prints_its_line_outside_a_job_too():
    done = start("slurm.sbatch", "--dry-run", TOML)
    assert done.returncode == 0
    assert "--nodes 2" in done.stdout


def test_ssh_waits_for_all_machines_and_tells_whose_line_is_whose(tmp_path):
    # The pretended ssh runs the remote command here; the first machine ends last.
    pretend(tmp_path, "ssh", 'bash -c "${@: -1}"')
    first_waits = "(( $6 == 0 )) && until [[ -e done1 ]]; do sleep 0.02; done"
    pretend(tmp_path, "aedit", f'{first_waits}; echo "node $6"; touch done$6')
    done = start("ssh.sh", "--dir", tmp_path, TOML, "one", "two", path=tmp_path)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0 one] node 0", "[1 two] node 1"]


def test_when_one_machine_fails_ssh_makes_the_others_leave_and_tells_its_code(tmp_path):
    pretend(tmp_path, "ssh", 'exec bash -c "${@: -1}"')
    pretend(tmp_path, "aedit", "(( $6 != 1 )) || exit 2; exec sleep 20")
    began = time.monotonic()
    done = start("ssh.sh", "--dir", tmp_path, TOML, "one", "two", "three", path=tmp_path)
    assert done.returncode == 2
    assert time.monotonic() - began < 15


def test_ctrl_c_makes_every_machine_leave(tmp_path):
    pretend(tmp_path, "ssh", 'exec bash -c "${@: -1}"')
    pretend(tmp_path, "aedit", 'trap "echo left; exit 0" TERM; echo up; while :; do sleep 0.05; done')
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", TEMPLATES / "ssh.sh", "--dir", tmp_path, TOML, "one", "two"]
    # Tests that run in the background have Ctrl-C switched off, and a shell cannot switch it on again.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    at_terminal = {"cwd": ROOT, "env": env, "start_new_session": True, "preexec_fn": listening}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **at_terminal) as script:
        try:
            up = [script.stdout.readline() for _ in range(2)]
            os.killpg(script.pid, signal.SIGINT)  # a terminal signals the whole process group
            left, _ = script.communicate(timeout=20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 130
    assert sorted(up) == ["[0 one] up\n", "[1 two] up\n"]
    assert sorted(left.splitlines()) == ["[0 one] left", "[1 two] left"]


@pytest.mark.parametrize(
    ("template", "words", "complaint"),
    [
        ("ssh.sh", [], "RUN.toml is missing"),
        ("ssh.sh", [TOML], "at least one HOST"),
        ("ssh.sh", ["one", "two"], "expected a .toml file, got one"),
        ("ssh.sh", ["--bad", TOML, "one"], "unknown option --bad"),
        ("ssh.sh", ["--dir"], "--dir needs a value"),
        ("ssh.sh", [TOML, "one", "--train.steps", "5"], "go after --, got --train.steps"),
        ("slurm.sbatch", [], "RUN.toml is missing"),
        ("slurm.sbatch", ["--bad", TOML], "unknown option --bad"),
        ("slurm.sbatch", ["--aedit"], "--aedit needs a value"),
        ("slurm.sbatch", ["--dry-run", "tiny"], "expected a .toml file, got tiny"),
        ("slurm.sbatch", [TOML], "not inside a SLURM job"),
    ],
)
def test_bad_arguments_get_one_line_and_code_2(template, words, complaint):
    done = start(template, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    assert program, "shellcheck comes with the test extra: pip install -e .[test]"
    scripts = [*TEMPLATES.iterdir(), ROOT / ".ci" / "run"]
    subprocess.run([program, *scripts], check=True, timeout=60)
