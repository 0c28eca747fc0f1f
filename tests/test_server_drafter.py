"""Tests the drafter of a rollout server: trained without requests, used by all lines, no token changed."""

import os
import signal
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from kit import trainers
from kit.hosts import LIMIT_S, Kept
from kit.rl_drafter import train_at_once
from kit.tiny_policies import policy

from aedit.launch.config import DrafterConfig, RunConfig
from aedit.launch.serve import served_run
from aedit.launch.serve.served_run import ServerDrafter, served_line
from aedit.spec_rollout import Engine, Prompt, Sampling, make_target
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.server import EngineHost
from aedit.spec_rollout.training import RowFeatures

LINES = ("run", "trainer")
ROWS, MAX_TOKENS = 4, 64


def prompts(count=4, length=16, first=0):
    sampling = Sampling(max_new_tokens=length)
    tokens = [(i % 48, (i + 1) % 48, (i + 2) % 48) for i in range(first, first + count)]
    return [Prompt(tokens=each, rollout=first + i, sampling=sampling) for i, each in enumerate(tokens)]


def plain(model, asked):
    rollouts = Engine.of(model, rows=ROWS, max_tokens=MAX_TOKENS).generate(asked)
    found = {rollout.prompt.rollout: rollout.tokens for rollout in rollouts}
    return [found[prompt.rollout] for prompt in asked]


class Server:
    """The lines of a server with its drafter, as `aedit serve` joins them, past the network."""

    def __init__(self, directory, *, train):
        config = RunConfig(
            name="run", drafter=DrafterConfig(kind="layer", idle_training=train, memory_bytes=2**20)
        )
        self.events = []
        self.drafter = ServerDrafter(
            config, directory, lambda name, **fields: self.events.append((name, fields))
        )
        run = SimpleNamespace(config=config, tokenizer=None, target=self._target)
        self.host = EngineHost()
        self.host.idle = self.drafter.window
        self.lines = {name: served_line(run, self.drafter, "run", directory, name) for name in LINES}
        for name, line in self.lines.items():
            line.engine.chooser = Fixed(parse_arm("layer:3"))
            self.host.open(name, lambda line=line: line.engine, between_steps=line.between_steps)

    def _target(self):
        return make_target(policy(loudness=3.0), rows=ROWS, max_tokens=MAX_TOKENS)

    def publish(self, line, model, version):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.host.swap(line, lambda: weights, version).result(LIMIT_S)

    def ask(self, line, asked):
        """Return the tokens of these samples."""
        kept = [Kept() for _ in asked]
        for prompt, receiver in zip(asked, kept, strict=True):
            self.host.submit(line, prompt, receiver)
        return [each.result().tokens for each in kept]

    def num_tokens_per_pass(self, line, asked):
        """Return the tokens of a row in a step, while it generates these samples."""
        meters = self.lines[line].engine.meters
        before = meters.num_tokens, meters.num_passes
        self.ask(line, asked)
        return (meters.num_tokens - before[0]) / (meters.num_passes - before[1])

    def numbers(self):
        return [line.drafter_version for line in self.lines.values()]

    def sources(self):
        """Return the lines whose features are collected."""
        return [name for name, line in self.lines.items() if line.engine.sink is not None]

    def close(self):
        self.host.close()
        self.drafter.close()


@contextmanager
def server_of(directory, *, train=False):
    server = Server(directory, train=train)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def models():
    """Return the policies of the lines."""
    other = policy()
    with_noise = {name: 1.02 * value for name, value in other.state_dict().items()}
    other.load_state_dict(with_noise)
    return {"run": policy(), "trainer": other}


def test_without_requests_a_better_drafter_is_trained_and_all_lines_adopt_it(tmp_path, monkeypatch, models):
    train_at_once(monkeypatch, served_run)
    asked, later = prompts(24), prompts(8, first=100)
    with server_of(tmp_path, train=True) as server:
        for line, model in models.items():
            server.publish(line, model, 1)
        wanted = {line: plain(model, asked) for line, model in models.items()}
        before = server.num_tokens_per_pass("trainer", later)
        assert server.ask("trainer", asked) == wanted["trainer"]
        trainers.until(lambda: server.drafter.status()["published"] >= 1, server.drafter)
        assert server.numbers() == [0, 0], "nothing changes but before a step"
        learned = server.drafter.status()
        assert learned["idle_by_cause_s"].keys() == {"no requests"}
        for line in LINES:
            assert server.ask(line, asked) == wanted[line]
        number = server.lines["trainer"].drafter_version
        assert number >= 1
        assert 1 <= server.numbers()[0] <= number
        assert server.num_tokens_per_pass("trainer", later) > 1.01 * before
        used_s = server.drafter.used_s
        assert used_s > 0
        os.kill(server.drafter.status()["pid"], signal.SIGKILL)
        trainers.until(lambda: server.drafter.status()["deaths"] == 1, server.drafter)
        server.drafter.report_deaths()
        server.drafter.report_deaths()
        assert [(name, fields["deaths"]) for name, fields in server.events] == [("drafter_trainer_died", 1)]
        changed = policy(loudness=5.0)
        server.publish("trainer", changed, 2)
        assert server.ask("trainer", asked) == plain(changed, asked)
        assert server.drafter.used_s >= used_s
        assert server.host.error is None
    with server_of(tmp_path) as again:
        again.publish("trainer", models["trainer"], 1)
        assert again.num_tokens_per_pass("trainer", later) > 1.01 * before, "its drafter is kept"


def test_it_learns_from_one_line_at_a_time_and_from_a_trainers_line_if_there_is_one(tmp_path, models):
    asked = prompts()
    with server_of(tmp_path) as server:
        lines = server.lines
        server.ask("run", asked)
        assert server.sources() == [], "no weights yet"
        for line, model in models.items():
            server.publish(line, model, 1)
        server.ask("run", asked)
        assert server.sources() == ["run"]
        server.ask("trainer", asked)
        assert server.sources() == ["trainer"]
        assert server.ask("run", asked) == plain(models["run"], asked)
        assert server.sources() == ["trainer"]
        assert lines["trainer"].engine.sink.status()["samples"] == len(asked)
        server.host.close_line("trainer")
        trainers.until(lambda: "trainer" not in server.host.lines())
        lines.pop("trainer").close()
        server.ask("run", asked)
        assert server.sources() == ["run"]
        assert server.events == []


def raising(*_, **__):
    raise RuntimeError("broken on purpose")


class RaisesAtExit:
    def __enter__(self):
        return None

    __exit__ = raising


BREAKS = {
    "start": lambda patch: patch.setattr(served_run.OnlineDrafter, "of", raising),
    "policy": lambda patch: patch.setattr(served_run.OnlineDrafter, "after_update", raising),
    "adoption": lambda patch: patch.setattr(served_run.OnlineDrafter, "adopt", raising),
    "begin of a wait": lambda patch: patch.setattr(served_run.OnlineDrafter, "window", raising),
    "end of a wait": lambda patch: patch.setattr(
        served_run.OnlineDrafter, "window", lambda *_: RaisesAtExit()
    ),
    "features": lambda patch: patch.setattr(RowFeatures, "update", raising),
    "close": lambda patch: (
        patch.setattr(served_run.OnlineDrafter, "adopt", raising),
        patch.setattr(served_run.OnlineDrafter, "close", raising),
    ),
}


@pytest.mark.parametrize("place", BREAKS)
def test_an_error_ends_the_training_and_is_recorded_and_the_server_goes_on(
    place, tmp_path, monkeypatch, models
):
    asked = prompts()
    wanted = plain(models["run"], asked)
    with server_of(tmp_path) as server:
        BREAKS[place](monkeypatch)
        server.publish("run", models["run"], 1)
        for _ in range(2):  # the second one ends a wait
            assert server.ask("run", asked) == wanted
        trainers.until(lambda: server.events or server.host.error)
        assert server.ask("run", asked) == wanted
        assert server.events == [("drafter_failed", {"reason": "RuntimeError: broken on purpose"})]
        assert server.drafter.status()["state"] == "failed"
        assert server.host.error is None
