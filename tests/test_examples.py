"""Tests that every script in examples/ runs, alone or as the nodes that its page starts, and learns."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from kit.hub_process import real_hub

from aedit.launch.cli.main import parser

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
LIMIT_S = 110


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}


@contextmanager
def started(*words, cwd):
    """Yield a process, which is ended with the block."""
    with (cwd / "log").open("a") as log:
        process = subprocess.Popen(
            [str(word) for word in words],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=10)


def run(*words, cwd):
    """Return what a command prints."""
    with started(*words, cwd=cwd) as process:
        told = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 0, told + (cwd / "log").read_text()
    return told


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def hub_config():
    return (EXAMPLES / "hub.toml").read_text().replace("127.0.0.1:7000", "127.0.0.1:0")


def test_five_lines_leave_both_nodes_with_one_model(tmp_path):
    told = run(sys.executable, EXAMPLES / "five_lines.py", free_port(), cwd=tmp_path)
    found = re.findall(r"node (\d): loss ([\d.]+), (\d+) rounds, checksum (\S+)", told)
    assert {node for node, *_ in found} == {"0", "1"}
    assert all(float(loss) < 1.0 for _, loss, _, _ in found)  # it begins at 8, the variance of the sum
    assert {rounds for *_, rounds, _ in found} == {"13"}
    assert len({checksum for *_, checksum in found}) == 1


@pytest.mark.slow
def test_fsdp2_saves_and_a_second_start_goes_on(tmp_path):
    words = [
        BIN / "torchrun",
        "--nproc-per-node",
        4,
        "--master-port",
        free_port(),
        EXAMPLES / "fsdp2.py",
        "out",
    ]
    first, second = (
        re.findall(r"steps (\d+) to (\d+), .* checksum (\S+)", run(*words, cwd=tmp_path)) for _ in "ab"
    )
    assert [steps[:2] for steps in first] == [("0", "20")] * 2
    assert [steps[:2] for steps in second] == [("20", "40")] * 2
    assert len({checksum for *_, checksum in first}) == len({checksum for *_, checksum in second}) == 1


@pytest.mark.slow
def test_grpo_in_a_loop_of_ones_own_raises_the_reward_of_both_nodes(tmp_path):
    script = EXAMPLES / "grpo.py"
    assert len(script.read_text().splitlines()) < 60
    told = run(BIN / "torchrun", "--nproc-per-node", 2, "--master-port", free_port(), script, cwd=tmp_path)
    found = re.findall(r"node (\d): reward ([\d.]+) -> ([\d.]+), (\d+) rounds", told)
    assert {node for node, *_ in found} == {"0", "1"}
    assert {rounds for *_, rounds in found} == {"9"}
    assert all(float(before) < 0.6 and float(after) > 0.75 for _, before, after, _ in found)


def test_a_trainer_runs_as_a_node_of_a_hub_from_the_command_line(tmp_path):
    with real_hub(tmp_path, hub_config()) as hub:
        words = (sys.executable, EXAMPLES / "trainer.py", hub.address, "c", "out")
        (loss,) = re.findall(r"c: 30 steps, \d+ pushes, loss ([\d.]+)", run(*words, cwd=tmp_path))
        assert float(loss) < 3.5  # log 64 is 4.16


def page_commands():
    (block,) = re.findall(r"```\n(.*?)```", (EXAMPLES / "two_machines" / "README.md").read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.splitlines() if line and not line.startswith("#")]


def test_the_compose_file_starts_what_the_page_starts():
    made = yaml.safe_load((EXAMPLES / "two_machines" / "compose.yaml").read_text())
    assert set(made["services"]) == {"hub", "first", "second"}
    for name, service in made["services"].items():
        assert service["image"] == "aedit"
        assert (EXAMPLES / "two_machines" / service["build"] / "Dockerfile").is_file()
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= {"..", *made["volumes"]}
        words = shlex.split(service["command"])
        if name == "hub":
            assert parser().parse_known_args(words[1:])[0].task
        else:
            assert (EXAMPLES / "two_machines" / words[1]).resolve() == EXAMPLES / "hub_cnn.py"
            assert words[2:4] == ["hub:7000", name]


def test_the_commands_of_two_machines_run_on_this_one(tmp_path):
    """The commands are the page's, except for the address."""
    (tmp_path / "run.toml").write_text((EXAMPLES / "two_machines" / "run.toml").read_text())
    port = free_port()
    known = {"aedit": [BIN / "aedit"], "python": [sys.executable], "../hub_cnn.py": [EXAMPLES / "hub_cnn.py"]}

    def here(words):
        words = [
            word.replace("10.0.0.1:7000", f"127.0.0.1:{port}").replace("10.0.0.1", "127.0.0.1")
            for word in words
        ]
        return [part for word in words for part in known.get(word, [word])]

    keys, hub, first, second, status = (here(words) for words in page_commands())
    run(*keys, cwd=tmp_path)
    with ExitStack() as held:
        serving = held.enter_context(started(*hub, cwd=tmp_path))
        wait_for(tmp_path / "hub" / "address", serving)
        node = held.enter_context(started(*first, cwd=tmp_path))
        printed = run(*second, cwd=tmp_path) + node.communicate(timeout=LIMIT_S)[0]
        found = re.findall(r"(\w+): 120 steps, accuracy ([\d.]+) %", printed)
        assert {name for name, _ in found} == {"first", "second"}
        assert all(float(accuracy) > 90 for _, accuracy in found)
        told = run(*status, cwd=tmp_path)
        assert "first" in told
        assert "second" in told
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0


def wait_for(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the hub has ended"
        assert time.monotonic() < deadline, "no hub within 60 s"
        time.sleep(0.05)
