"""Tests faults of rollout worker processes: no sample is lost or comes twice, and nothing waits for ever."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kit.fake_worker import token
from kit.tiny_policies import policy
from kit.waiting import until

from aedit.child import Restarts
from aedit.spec_rollout import Prompt, Sampling, WorkerConfig, WorkerSource
from aedit.spec_rollout.remote import workers
from aedit.spec_rollout.server import Channel

SOON = Restarts(pause_s=0.01, limit=2)


@pytest.fixture(scope="module")
def model():
    return policy()


@pytest.fixture
def sources(model, monkeypatch):
    """Return a function that starts a source of fake workers; all are closed at the end."""
    monkeypatch.setattr(workers, "MODULE", "kit.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    made = []

    def start(does="serve", events=None, **settings):
        settings = {"processes": 2, "restarts": SOON, "max_tokens": 64, **settings}
        config = WorkerConfig(rows=4, options={"does": does}, **settings)
        report = None if events is None else lambda event, fields: events.append((event, fields))
        made.append(WorkerSource(model, config, report=report))
        made[-1].update_weights(model.state_dict(keep_vars=True), 1)
        return made[-1]

    yield start
    for source in made:
        source.close()


def samples(count, length=12):
    sampling = Sampling(max_new_tokens=length)
    return [
        Prompt(tokens=(1, 2), rollout=i // 4, sample=i % 4, group=i // 4, sampling=sampling)
        for i in range(count)
    ]


def is_whole(rollout):
    return rollout.tokens == [token(*rollout.prompt.key, i) for i in range(len(rollout.tokens))]


def test_workers_that_are_killed_all_the_time_lose_no_sample_and_return_none_twice(sources):
    """The kills hit starting and running workers, also those that have just been given samples."""
    events = []
    source = sources(events=events, restarts=Restarts(pause_s=0.0, limit=1000))
    draw, ended = random.Random(4), []
    asked = samples(40, length=40)
    source.add(asked)

    def go_on():
        ended.extend(source.step())
        pids = source.status()["pids"]
        if pids and source.status()["worker_deaths"] < 12 and draw.random() < 0.5:
            os.kill(draw.choice(pids), signal.SIGKILL)
        return not source.running

    until(go_on, "all samples", limit_s=60)
    assert sorted(rollout.prompt.key for rollout in ended) == [prompt.key for prompt in asked]
    assert all(is_whole(rollout) and len(rollout.tokens) == 40 for rollout in ended)
    assert source.status()["worker_deaths"] >= 3
    assert {event for event, _ in events} == {"rollout_retried"}
    assert sum(fields["samples"] for _, fields in events) == source.status()["retried"]


def test_workers_that_end_again_and_again_are_one_error_with_their_number(sources):
    source = sources("end")
    source.add(samples(4))
    with pytest.raises(RuntimeError, match=r"ended more than 2 times in a row.*\(process \d+\) ended with 3"):
        until(lambda: source.step() and False, "the error")


def test_a_sample_that_ends_each_worker_is_named_while_others_finish(sources):
    """Each death follows finished samples, so that no worker dies too often in a row."""
    source = sources("end with 2", restarts=Restarts(pause_s=0.0, limit=2))
    source.add(samples(4))
    with pytest.raises(RuntimeError, match=r"sample 0/2: 3 rollout workers.*sample 2 is poison"):
        until(lambda: source.step() and False, "the error")


def test_a_sample_that_each_worker_refuses_is_named_and_costs_no_worker(sources):
    events = []
    source = sources("refuse 2", events)
    source.add(samples(4))
    with pytest.raises(RuntimeError, match=r"sample 0/2: 3 rollout workers .* failed.*sample 2 is poison"):
        until(lambda: source.step() and False, "the error")
    assert source.status()["worker_deaths"] == 0
    assert [fields["samples"] for _, fields in events] == [1, 1, 1]


def test_a_silent_worker_is_ended_and_replaced(sources):
    source = sources("be silent", starts_within_s=0.2, processes=1)
    pid = source.status()["pids"][0]
    source.add(samples(2))
    with pytest.raises(RuntimeError, match=r"gave no sign of life for 0\.\d s and was ended"):
        until(lambda: source.step() and False, "the error")
    assert not psutil.pid_exists(pid)
    assert source.status()["worker_silent"] == 3


@pytest.mark.slow  # what it disturbs must not have ended: a machine without other work
def test_a_suspended_worker_is_ended_and_its_samples_continue_in_the_other(sources):
    source = sources(silent_s=0.3)
    source.add(samples(8, length=60))
    until(lambda: source.step() or all(p.partial for p in source.pending()[:4]), "first tokens")
    os.kill(source.status()["pids"][0], signal.SIGSTOP)
    ended = []
    until(lambda: ended.extend(source.step()) or not source.running, "all samples")
    assert all(map(is_whole, ended))
    assert source.status()["worker_silent"] == 1


def test_a_worker_that_was_started_again_gets_samples_of_the_other(sources):
    """The plan of migrations moves them; none is lost on the way, and each is with one worker."""
    source = sources(max_tokens=100_000, restarts=Restarts(pause_s=0.3, limit=2))
    asked = samples(6, length=90_000)  # none ends before the test
    source.add(asked)
    until(lambda: source.step() or all(p.partial for p in source.pending()), "first tokens")
    os.kill(source.status()["pids"][0], signal.SIGKILL)
    until(lambda: source.step() or source.status()["worker_deaths"], "the death")
    assert len([worker for worker in source._pool.workers.values() if worker.samples]) == 1
    before = source.status()["moved"]  # samples may have moved before the death, too
    until(lambda: source.step() or source.status()["moved"] > before, "a migration")
    held = [key for worker in source._pool.workers.values() for key in worker.samples]
    assert sorted(held) == sorted(prompt.key for prompt in asked)
    assert [bool(worker.samples) for worker in source._pool.workers.values()] == [True, True]
    assert all(is_whole(prompt.partial) for prompt in source.pending() if prompt.partial)


def test_cancelled_samples_end_in_the_workers_and_their_keys_can_be_added_again(sources):
    """Long samples would keep all rows, and what was under way must not mix with the new samples."""
    source, ended = sources(max_tokens=100_000), []
    source.add(samples(16, length=90_000))
    until(lambda: source.step() or sum(p.partial is not None for p in source.pending()) >= 8, "first tokens")
    for worker in source._pool.workers.values():
        Channel.wait([worker.lane.channel], timeout_s=30)  # a report that the rank has not read
    source.cancel()
    assert (source.running, source.pending()) == (0, [])
    asked = samples(24, length=40)  # 16 of them have the keys of before
    source.add(asked)
    until(lambda: ended.extend(source.step()) or not source.running, "all samples")
    assert sorted(rollout.prompt.key for rollout in ended) == [prompt.key for prompt in asked]
    assert all(is_whole(rollout) and len(rollout.tokens) == 40 for rollout in ended)


def test_time_in_which_the_rank_does_not_listen_is_no_silence(sources, monkeypatch):
    """A rank that trains for minutes finds its workers alive, although it has read no message meanwhile."""
    source = sources(silent_s=0.3)
    source.add(samples(4, length=60))
    until(lambda: source.step() or any(p.partial for p in source.pending()), "first tokens")
    pids = source.status()["pids"]
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 1000)
    until(lambda: source.step() is None or not source.running, "all samples")
    assert source.status()["pids"] == pids


RANK = """
import os, signal, socket, subprocess, sys
here, there = socket.socketpair()
words = (sys.executable, "-m", "aedit.spec_rollout.server.worker", str(os.getpid()), str(there.fileno()))
held = os.dup(here.fileno())
os.set_inheritable(held, True)  # the worker has this end too: a closed connection is not what ends it
worker = subprocess.Popen(words, pass_fds=(there.fileno(), held), stdout=subprocess.DEVNULL)
print(worker.pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_the_process_of_its_rank():
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        worker = psutil.Process(int(rank.stdout.readline()))
        until(lambda: ignores_interrupts(worker.pid), "the worker's main program")
        rank.communicate("end\n", timeout=60)
        until(lambda: not psutil.pid_exists(worker.pid), "the end of the worker")
    finally:
        rank.kill()
        rank.communicate()


def ignores_interrupts(pid):
    """Return whether a process ignores SIGINT, which a worker does first."""
    (mask,) = re.findall(r"^SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(mask, 16) >> (signal.SIGINT - 1) & 1


def test_pending_samples_continue_in_another_source(sources):
    """Those of a checkpoint: the tokens so far are kept, and nothing is shared with the running ones."""
    source = sources()
    source.add(samples(8, length=40))
    until(lambda: source.step() or any(p.partial for p in source.pending()), "first tokens")
    pending = source.pending()
    source.close()
    begun = {p.key: len(p.partial.tokens) for p in pending if p.partial}
    assert begun
    other, ended = sources(), []
    other.add(pending)
    until(lambda: ended.extend(other.step()) or not other.running, "all samples")
    assert all(is_whole(rollout) and len(rollout.tokens) == 40 for rollout in ended)
    assert begun == {p.key: len(p.partial.tokens) for p in pending if p.partial}


@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        ([Prompt(tokens=(1,), sampling=Sampling(max_new_tokens=4))], "give it ids"),
        ([*samples(1), *samples(1)], "that no other one has"),
        ([Prompt(tokens=(99,), rollout=0)], "outside the vocabulary of 48"),
        ([Prompt(tokens=(1,), rollout=0, sampling=Sampling(max_new_tokens=99))], "exceed max_tokens 64"),
        (
            [Prompt(tokens=(1,), rollout=0, sampling=Sampling(max_new_tokens=4, stop_strings=("x",)))],
            "need an engine with a",
        ),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_at_once(sources, prompts, what):
    source = sources()
    with pytest.raises(ValueError, match=what):
        source.add(prompts)
    assert source.running == 0


def test_wrong_weights_are_refused_and_nothing_is_published(sources, model):
    source = sources()
    weights = dict(model.state_dict(keep_vars=True))
    other = {name: tensor.detach() + 1 for name, tensor in weights.items()}
    with pytest.raises(ValueError, match="version 1 is that of other weights"):
        source.update_weights(other, 1)
    source.update_weights(weights, 1)
    with pytest.raises(ValueError, match="version 0 is below version 1"):
        source.update_weights(weights, 0)
    name = next(iter(other))
    with pytest.raises(ValueError, match=rf"{name} is missing, expected \(48, 32\)"):
        source.update_weights({key: each for key, each in other.items() if key != name}, 2)
    assert source.version == 1
