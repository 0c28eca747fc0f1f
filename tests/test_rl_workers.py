"""Tests a node whose rollouts come from worker processes: the bits of its own engine, and its pace."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
import torch
from kit import trainers
from kit.rl_drafter import make_loud, train_at_once
from kit.rl_nodes import config_of, records, run, weights

from aedit.launch.node import rl_build
from aedit.launch.node.rl_groups import GroupStream
from aedit.spec_rollout import WorkerSource
from aedit.spec_rollout.training import FeatureRing

KEYS = {"rl__engine_dtype": "fp64", "rl__sampling__max_new_tokens": 8, "train__steps": 5}


@pytest.fixture
def batches(monkeypatch):
    """Return a list in which the groups of each batch of the test's node are collected."""
    found, next_batch = [], GroupStream.next_batch

    def kept(stream):
        found.append(next_batch(stream))
        return found[-1]

    monkeypatch.setattr(GroupStream, "next_batch", kept)
    return found


def kill_workers(node, batches):
    """Make a node kill a worker as soon as these batches are requested; return those that are left."""
    stream, left = node.objective.stream, list(batches)
    source, requested = stream.pipeline.source, []
    assert isinstance(source, WorkerSource)
    add = source.add

    def add_and_kill(prompts):
        add(prompts)
        requested.append(stream.batches + 1)
        if left and requested.count(left[0]) == 3:  # all groups
            del left[0]
            os.kill(source.status()["pids"][0], signal.SIGKILL)

    source.add = add_and_kill
    return left


def text_of(batches):
    return [
        (group.position, group.rewards, [(r.tokens, r.finish_reason, r.versions) for r in group.rollouts])
        for batch in batches
        for group in batch
    ]


def follow_drafts(node):
    """Return a list that gets (pid, number of the drafter in use) of the figures of a worker with tokens."""
    dispatcher, found = node.objective.stream.pipeline.source._dispatcher, []
    handle = dispatcher._handle

    def follow(worker, message):
        if message.HasField("figures") and json.loads(message.figures.json)["rollout_tokens"]:
            found.append((worker.pid, message.figures.drafter))
        handle(worker, message)

    dispatcher._handle = follow
    return found


def wait_for_workers(node, batch):
    """Make the node wait after the rollouts of this batch, until all its workers are there."""
    pipeline, stream = node.objective.stream.pipeline, node.objective.stream
    source, window = pipeline.source, pipeline.window

    def all_there():
        source._dispatcher.look()
        workers = source._pool.workers.values()
        return len(workers) == 2 and all(worker.is_ready for worker in workers)

    @contextmanager
    def wait(cause):
        with window(cause):
            if cause == "rank" and stream.batches + 1 == batch:
                trainers.until(all_there)
            yield

    pipeline.window = wait


def wait_for_second_drafter(node, batch):
    """Make the node wait after the rollouts of this batch until its trainer has published two drafters.

    It waits for no third one: a drafter that has learned its task may not get better any more.
    """
    pipeline, stream, online = node.objective.stream.pipeline, node.objective.stream, node.objective.online
    window = pipeline.window

    @contextmanager
    def wait(cause):
        with window(cause):
            if cause == "rank" and stream.batches + 1 == batch:
                trainers.until(lambda: online.status()["published"] >= 2, online)
            yield

    pipeline.window = wait


class Learning:
    """What the drafter of a node learns from and what its workers get, as seen while the node trains."""

    def __init__(self, monkeypatch):
        self.forwards, self.begun, self.published = [], [], []
        begin = FeatureRing.begin

        def begin_sample(ring, first_token, num_prompt, version, prompt=None):
            self.begun.append(version)
            return begin(ring, first_token, num_prompt, version, prompt)

        monkeypatch.setattr(FeatureRing, "begin", begin_sample)

    def follow(self, node, batch):
        """Follow a node, which waits for the rollouts of this batch until its trainer has published."""
        node.sync.model.register_forward_hook(lambda *_: self.forwards.append(node.objective.version))
        online, stream = node.objective.online, node.objective.stream
        source = stream.pipeline.source
        wait, update = source._pool.wait, source.update_drafter

        def wait_long(seconds):
            if stream.batches + 1 == batch and not self.published:
                trainers.until(lambda: online.status()["published"] > 0, online)
            wait(seconds)

        def update_drafter(layer, version):
            update(layer, version)
            newest = source._drafter._slots.newest()
            self.published.append(all(torch.equal(newest.tensors[n], t) for n, t in online.tensors().items()))

        source._pool.wait, source.update_drafter = wait_long, update_drafter

    def check(self, steps, micro_batches, samples):
        """Check that the drafter has learned from the training forward, of all samples of each version."""
        assert len(self.forwards) == steps * micro_batches, "no pass of its own"
        assert self.begun == sorted(self.begun)
        assert [self.begun.count(version) for version in dict.fromkeys(self.begun)] == [samples] * steps
        assert set(self.begun) == set(self.forwards)
        assert self.published
        assert all(self.published), "the workers have the drafter in use"


@pytest.mark.slow
def test_killed_workers_and_a_drafter_that_is_trained_change_no_token_no_reward_and_no_weight(
    tmp_path, batches, monkeypatch
):
    """The same run, generated by the node's own engine without drafts, is the oracle.

    The drafter learns from the training forward while the node waits for its workers.
    """
    keys = KEYS | {"train__steps": 10, "checkpoint__every": 0}
    own = run(config_of(tmp_path / "own", **keys, drafter__kind="off"), make_loud)
    expected = text_of(batches)
    batches.clear()
    train_at_once(monkeypatch)
    monkeypatch.setattr(rl_build, "_arms", lambda config, has_layer: ("layer:2",))
    config = config_of(tmp_path / "workers", **keys, rl__workers=2, drafter__kind="layer")
    found, learning = [], Learning(monkeypatch)

    def watch(node):
        make_loud(node)
        learning.follow(node, batch=3)
        wait_for_second_drafter(node, batch=5)
        wait_for_workers(node, batch=8)
        pids = node.objective.stream.pipeline.source.status()["pids"]
        found.extend((node.objective.online, follow_drafts(node), pids, kill_workers(node, batches=(2, 7))))

    node = run(config, watch)
    online, reports, first, left = found
    assert not left
    assert text_of(batches) == expected
    assert len(expected) == 30
    differ = [name for name, value in weights(own).items() if not torch.equal(value, weights(node)[name])]
    assert differ == []
    retried = [line for line in records(config, "events") if line["event"] == "rollout_retried"]
    assert 1 <= len(retried) <= 2  # a killed worker may have had nothing left to do
    assert all(line["reason"].endswith("ended with -9") for line in retried)
    learning.check(node.sync.steps, micro_batches=2, samples=12)
    totals = records(config, "metrics")[-1]["rl"]
    assert totals["retried"] == sum(line["samples"] for line in retried)
    assert totals["idle_s"]["rollouts"] > 0
    assert totals["idle_used_s"] > 0
    assert totals["drafter"]["steps"] > 0
    assert totals["drafter"]["published"] >= totals["drafter"]["adopted"]
    assert online.status()["adopted"] >= 1
    assert totals["arms"]["layer:2"] > 20
    assert totals["rollout_tokens"] > 1.05 * totals["passes"], "no drafted token was accepted"
    numbers = {number for _, number in reports}
    assert len(numbers) >= 2, "drafters were not used"
    begun_with = {pid: number for pid, number in reversed(reports) if pid not in first}
    assert max(begun_with.values()) > min(numbers), "a new worker begins with a trained drafter"


def test_workers_generate_while_the_node_trains_and_no_finished_sample_is_dropped(tmp_path, batches):
    """Groups run ahead by one batch: after the first batch, all were begun under older weights."""
    keys = KEYS | {"rl__max_staleness": 1, "rl__groups": 2, "drafter__kind": "suffix"}
    keys["rl__sampling__max_new_tokens"] = 10
    config = config_of(tmp_path, **keys, rl__workers=1)
    finished = []

    def watch(node):
        source = node.objective.stream.pipeline.source
        step = source.step

        def steps():
            found = step()
            finished.extend(found)
            return found

        source.step = steps

    node = run(config, watch)
    trained = [group for batch in batches for group in batch]
    # In the order of the draws, each once: what was drawn and not trained goes back.
    positions = [group.position for group in trained]
    assert positions == list(dict.fromkeys(positions))
    assert len(positions) == 2 * node.sync.steps
    ages = [
        number - version
        for number, batch in enumerate(batches, start=1)
        for group in batch
        for rollout in group.rollouts
        for version in rollout.versions
    ]
    assert max(ages) == 1
    assert min(ages) == 0
    spans = [rollout.versions for group in trained for rollout in group.rollouts]
    assert all(versions == sorted(versions) for versions in spans)
    # All samples of the admitted groups that have finished are in a batch or in a group that was not trained.
    mine = {rollout.prompt.rollout for rollout in finished if rollout.prompt.rollout < 1 << 62}
    assert set(positions) <= mine
    assert len(mine - set(positions)) <= 2
    oldest = [
        max(number - version for group in batch for rollout in group.rollouts for version in rollout.versions)
        for number, batch in enumerate(batches, start=1)
    ]
    lines = [line for line in records(config, "metrics") if line["rl"] and line["step"]]
    assert lines
    for line in lines:
        assert line["rl"]["staleness_max"] == oldest[line["step"] - 1]
