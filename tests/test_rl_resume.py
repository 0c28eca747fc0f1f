"""Tests that a node stops at any moment of a batch and goes on with the same prompts, tokens and weights."""

import pytest
import torch
from kit.rl_nodes import config_of, records, run, weights

from aedit.launch.node.rl_groups import GroupPipeline, GroupStream
from aedit.launch.node.stop import Stopped
from aedit.launch.node.train import TrainingNode

KEYS = {"drafter__kind": "off", "train__steps": 8, "rl__batches": 3, "rl__supervised_steps": 2}
STEPS = 6  # after the warm-up: two batches of three groups, one group per step


@pytest.fixture
def ledger(monkeypatch):
    """Return the positions that were trained and the rollouts of each, of all runs since `clear`."""
    found, original = [], GroupStream.trained

    def follow(stream, count):
        groups = original(stream, count)
        found.extend((each.position, [rollout.tokens for rollout in each.rollouts]) for each in groups)
        return groups

    monkeypatch.setattr(GroupStream, "trained", follow)
    return found


def test_a_run_that_was_stopped_among_rollouts_ends_like_one_that_was_not(tmp_path, ledger):
    whole = run(config_of(tmp_path / "whole", **KEYS))
    expected = list(ledger)
    ledger.clear()
    assert len(expected) == STEPS
    config = config_of(tmp_path / "parts", **KEYS)
    with pytest.MonkeyPatch.context() as patch:
        nodes, advance = [], GroupPipeline.advance

        def stop_in_the_second_batch(pipeline):
            advance(pipeline)
            nodes[0].stop._signalled |= nodes[0].sync.steps == 5

        patch.setattr(GroupPipeline, "advance", stop_in_the_second_batch)
        first = run(config, nodes.append)
    assert (first.sync.steps, len(ledger)) == (5, 3)
    second = run(config, attempt=2)
    assert second.resumed
    assert ledger == expected
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(second).items())
    totals = records(config, "metrics")[-1]["rl"]
    assert totals["supervised_steps"] == 2
    assert totals["groups"] >= STEPS  # those that were generated and put back count too


def test_a_batch_that_is_left_half_way_gives_back_what_was_not_trained(tmp_path, ledger):
    config = config_of(tmp_path, **KEYS)
    with pytest.MonkeyPatch.context() as patch:
        inner_step = TrainingNode.inner_step

        def stopping(node):
            if node.sync.steps == 4:
                raise Stopped  # as when another node has stopped, and a landing cannot come
            inner_step(node)

        patch.setattr(TrainingNode, "inner_step", stopping)
        run(config)
    assert [position for position, _ in ledger] == [0, 1]
    run(config, attempt=2)
    assert [position for position, _ in ledger] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_group_is_lost_or_trained_twice_by_a_stop_whatever_runs_ahead(tmp_path, ledger, staleness):
    keys = KEYS | {"rl__max_staleness": staleness, "rl__rows": 8, "rl__batches": 1, "train__steps": 10}
    config = config_of(tmp_path, **keys)
    nodes = []
    with pytest.MonkeyPatch.context() as patch:
        advance = GroupPipeline.advance

        def stop_later(pipeline):
            advance(pipeline)
            nodes[0].stop._signalled |= nodes[0].sync.steps == 6

        patch.setattr(GroupPipeline, "advance", stop_later)
        run(config, nodes.append)
    run(config, attempt=2)
    assert [position for position, _ in ledger] == list(range(24))
