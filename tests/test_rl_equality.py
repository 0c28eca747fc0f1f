"""Tests that speculation and drafter training change no token, reward or weight of a run."""

import pytest
import torch
from kit.rl_drafter import make_loud, train_at_once, wait_for_publications
from kit.rl_nodes import config_of, records, run, weights

from aedit.launch.node.rl_groups import GroupStream
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import parse_arm

STEPS = 12


@pytest.fixture
def trained(monkeypatch):
    """Return the groups that runs have trained, as positions, tokens and rewards, in order."""
    found, original = [], GroupStream.trained

    def follow(stream, count):
        groups = original(stream, count)
        for each in groups:
            tokens = tuple(tuple(rollout.tokens) for rollout in each.rollouts)
            found.append((each.position, tokens, each.rewards))
        return groups

    monkeypatch.setattr(GroupStream, "trained", follow)
    return found


def run_with(arm, directory, trained, watch=make_loud, **keys):
    """Return the groups and the weights of a run in which each engine step has this arm."""

    def force(node):
        engine = node.objective.stream.pipeline.source.engine
        engine.chooser = Fixed(parse_arm(arm))
        watch(node)

    trained.clear()
    config = config_of(directory, train__steps=STEPS, rl__engine_dtype="fp64", **keys)
    node = run(config, force)
    arms = records(config, "metrics")[-1]["rl"]["arms"]
    assert arms.get(arm, 0) > STEPS, "this arm was not used"
    return list(trained), weights(node)


def assert_equal(one, other):
    groups, final = one
    assert len(groups) == 3 * STEPS
    assert len({position for position, _, _ in groups}) == len(groups)
    assert other[0] == groups
    assert all(torch.equal(final[name], other[1][name]) for name in final)


def test_a_run_with_speculation_is_that_without_it_bit_for_bit(tmp_path, trained):
    plain = run_with("off", tmp_path / "plain", trained, drafter__kind="off")
    assert len({tokens for _, tokens, _ in plain[0]}) > STEPS, "the policy always answers the same"
    assert_equal(plain, run_with("suffix:4", tmp_path / "suffix", trained, drafter__kind="suffix"))


def test_a_run_whose_drafter_is_trained_and_used_is_that_without_it_bit_for_bit(
    tmp_path, trained, monkeypatch
):
    train_at_once(monkeypatch)
    keys = {"rl__sampling__max_new_tokens": 8, "checkpoint__every": 0}
    plain = run_with("off", tmp_path / "plain", trained, drafter__kind="off", **keys)
    counts, found = [], []

    def watch(node):
        make_loud(node)
        wait_for_publications(node, batches=(2, 6))
        online, engine = node.objective.online, node.objective.stream.pipeline.source.engine
        engine_step = engine.step

        def step():
            done = engine_step()
            counts.append((online.drafter.version, len(done.counts), sum(done.counts)))
            return done

        engine.step = step
        found.append(online)

    assert_equal(
        plain, run_with("layer:4", tmp_path / "layer", trained, watch, drafter__kind="layer", **keys)
    )
    (online,) = found
    assert online.status()["adopted"] >= 2
    by_version = {version: [each for each in counts if each[0] == version] for version, *_ in counts}
    untrained = by_version.pop(-1)
    assert all(rows == tokens for _, rows, tokens in untrained), "an untrained drafter is not used"
    used = [part for part in by_version.values() if len(part) >= 5]
    assert len(used) >= 2, "steps with each drafter"
    for part in used:
        length = sum(tokens for _, _, tokens in part) / sum(rows for _, rows, _ in part)
        assert 1.1 < length < 4, "some drafted tokens are accepted, some refused"


def test_another_seed_gives_another_run(tmp_path, trained):
    plain = run_with("off", tmp_path / "plain", trained, drafter__kind="off")
    other = run_with("off", tmp_path / "other", trained, drafter__kind="off", seed=1)
    assert plain[0] != other[0]
