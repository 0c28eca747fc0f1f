"""Tests of the whole path: servers with lying engines, streams, audit in the connection process, release."""

import json
import os
from pathlib import Path

import pytest
import torch
from kit.rollout_servers import MAX_TOKENS, RUN, TinyServer, layout_of
from kit.rollouts import VOCABULARY, tiny_policy
from kit.waiting import until

from aedit.spec_rollout import Engine, Prompt, Sampling, WorkerConfig, WorkerSource
from aedit.spec_rollout.remote import Servers, workers

LIMIT_S = 180.0
SAMPLING = Sampling(max_new_tokens=24)


def another_seed(engine):
    begin = engine._rows.noise.begin
    engine._rows.noise.begin = lambda row, rollout, sample: begin(row, rollout, sample + 1000)


def other_logits(change):
    def lie(engine):
        step = engine.target.step

        def changed(tokens, lengths, parents=None, counts=None):
            logits, hidden = step(tokens, lengths, parents, counts)
            return change(logits), hidden

        engine.target.step = changed

    return lie


LIES = {
    "another-seed": another_seed,
    "temperature-0.9": other_logits(lambda logits: logits / 0.9),
    "another-model": other_logits(lambda logits: logits + 0.3 * torch.sin(torch.arange(VOCABULARY) * 7.0)),
}


class LyingServer(TinyServer):
    """Server of which each engine lies in one way; an empty name is the truth."""

    def _make(self, line):
        made = super()._make(line)
        LIES.get(self.name, lambda engine: None)(made.engine)
        return made


@pytest.fixture
def servers():
    opened = [LyingServer(name) for name in ("honest", *LIES)]
    yield opened
    for server in opened:
        server.close()


def audited(model, servers, directory):
    """Return a source that uses the servers and checks every sample, and its events."""
    options = {
        "model": json.loads(model.config.to_json_string(use_diff=False)),
        "dtype": "float64",
        "device": "cpu",
        "threads": 1,
        "rate": 1.0,
        "floor": 1.0,
        "halved_by": 10_000,
        "versions": 2,
        "calibration": "",
        "record": str(directory / "record"),
        "record_bytes": 1 << 22,
        "record_versions": 1,
    }
    settings = Servers.at(
        *(server.address for server in servers),
        run=RUN,
        layout=layout_of(model).layout,
        auditor="aedit.spec_rollout.audit.auditor:make_auditor",
        audit_options=options,
    )
    events = []
    config = WorkerConfig(rows=1, max_tokens=MAX_TOKENS, dtype=model.dtype, options={"does": "be slow"})
    source = WorkerSource(
        model, config, servers=settings, report=lambda event, fields: events.append((event, fields))
    )
    source.update_weights(model.state_dict(keep_vars=True), 1)
    return source, events


def test_servers_that_lie_are_convicted_and_nothing_of_theirs_is_delivered(servers, tmp_path, monkeypatch):
    """The rank's own worker draws other tokens, so that the source of each is seen."""
    monkeypatch.setattr(workers, "MODULE", "kit.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    model = tiny_policy(5)
    source, events = audited(model, servers, tmp_path)
    try:
        _deliver_and_judge(source, events, model)
    finally:
        source.close()
    recorded = (tmp_path / "record" / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["server"] for line in recorded} == {"honest", *LIES}


def _deliver_and_judge(source, events, model):
    def status():
        return source.status()["servers"]

    until(
        lambda: source.step() or sum(each["version"] == 1 for each in status().values()) == 1 + len(LIES),
        "the servers",
        LIMIT_S,
    )
    ended, first = [], 0
    while {name for name, each in status().items() if each["violations"]} != {*LIES}:
        assert first < 20, status()
        prompts = [
            Prompt(tokens=(1, 2), rollout=first, sample=i, group=first, sampling=SAMPLING) for i in range(24)
        ]
        source.add(prompts)
        until(lambda: ended.extend(source.step()) or not source.running, "all samples", LIMIT_S)
        first += 1
    assert sorted(each.prompt.key for each in ended) == [(n, i) for n in range(first) for i in range(24)]
    whole = [each for each in ended if each.servers == [(0, "honest")]]
    assert len(whole) > 4
    assert {name for each in ended for _, name in each.servers} <= {"honest", ""}, "a liar's token was used"
    engine = Engine.of(model, rows=8, max_tokens=MAX_TOKENS)
    engine.update_weights(None, 1)
    right = {each.prompt.key: each.tokens for each in engine.generate([each.prompt for each in whole])}
    assert {each.prompt.key: each.tokens for each in whole} == right
    lost = {fields["server"]: fields for event, fields in events if event == "server_lost"}
    for lie in LIES:
        assert lost[lie]["violation"] is True
        assert lost[lie]["evidence"]["version"] == 1
        assert {"key", "place", "token", "right_token", "margin"} <= {*lost[lie]["evidence"]}
    assert status()["honest"]["violations"] == 0
    source.accuse("honest", "a failure that the training has found", {"key": [1, 2]})
    until(lambda: source.step() or status()["honest"]["violations"] == 1, "the accusation", LIMIT_S)
