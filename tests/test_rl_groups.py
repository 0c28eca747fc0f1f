"""Tests the order in which groups are trained: the same for any number of ranks, without a gap."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
from kit.thread_ranks import run_ranks

from aedit.launch.config import RLConfig
from aedit.launch.config.rl import RLSamplingConfig
from aedit.launch.data import SampleOrder
from aedit.launch.node import rl_groups
from aedit.launch.node.rl_groups import GroupPipeline, GroupStream
from aedit.spec_rollout.rl import Problem, RewardReport
from aedit.spec_rollout.sampling import Rollout, Sampling

PROBLEMS = 1000


class Source:
    """A `RolloutSource` that finishes one of its samples per step, in any order."""

    def __init__(self, draw):
        self.samples, self._draw = [], draw

    def add(self, prompts):
        self.samples += prompts

    def step(self):
        prompt = self.samples.pop(self._draw.randrange(len(self.samples)))
        return [Rollout(prompt, tokens=[1, 2], logprobs=[-0.5, -0.5], versions=[1, 1])]

    def cancel(self):
        self.samples.clear()


class Rewards:
    """A `RewardPool` for which `has_signal(position)` says whether the rewards of a group differ."""

    def __init__(self, has_signal):
        self._has_signal, self._made = has_signal, []

    def submit(self, group, text):
        rewards = (1.0, 0.0) if self._has_signal(group.position) else (1.0, 1.0)
        self._made.append((replace(group, rewards=rewards), RewardReport(values={}, seconds=0.0)))

    def ready(self):
        made, self._made = self._made, []
        return made

    def wait(self, timeout_s):
        return self.ready()

    def drop(self):
        self._made.clear()


def stream_of(shards, order, config, has_signal, draw):
    """Return the stream of one rank of a node."""
    pipeline = GroupPipeline(
        source=Source(draw),
        rewards=Rewards(has_signal),
        decode=str,
        window=lambda cause: nullcontext(),
        report=lambda group, report: None,
    )
    return GroupStream(
        config=config,
        order=order,
        choose=lambda position, index: Problem(index=index, prompt="p", tokens=(1,), columns={}),
        pipeline=pipeline,
        shards=shards,
        sampling=Sampling(max_new_tokens=2),
        check_stop=lambda: None,
    )


def trained_by(shards, config, has_signal, seed):
    """Return the positions of each inner step of this rank, over batches and stops, and the draws at the end.

    Each attempt stops after any step of its last batch, as a node does, and the next one resumes.
    """
    order, steps = SampleOrder(PROBLEMS, seed=0), []
    for attempt in range(3):
        same = random.Random(f"{seed}, {attempt}")  # the ranks stop together
        stream = stream_of(shards, order, config, has_signal, random.Random(f"{seed}, {shards.rank}"))
        for batches_left in reversed(range(same.randrange(1, 4))):
            of_step = len(stream.next_batch()) // config.batches
            for _ in range(config.batches if batches_left else same.randrange(config.batches + 1)):
                steps.append([group.position for group in stream.trained(of_step)])
        stream.put_back()
        assert stream.pipeline.source.samples == []
        order = SampleOrder.resume(stream.order.state())
    return steps, order.state()["drawn"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_are_trained_in_the_order_of_their_draws_by_any_number_of_ranks(ranks, staleness, monkeypatch):
    """The oracle lists the positions with signal; over all ranks, each step has the next ones of them."""
    monkeypatch.setattr(rl_groups, "MOST_REPLACED", PROBLEMS)
    for seed in range(4):
        chance = random.Random(seed)
        with_signal = {place for place in range(PROBLEMS) if chance.random() < 0.5}
        config = RLConfig(
            groups=2 * ranks, group_size=2, batches=2, max_staleness=staleness, dynamic_sampling=True
        )

        def job(shards, config=config, kept=with_signal, seed=seed):
            return trained_by(shards, config, kept.__contains__, seed)

        found = run_ranks(ranks, job)
        steps = [sorted(itertools.chain(*step)) for step in zip(*(steps for steps, _ in found), strict=True)]
        trained = list(itertools.chain(*steps))
        assert trained == sorted(with_signal)[: len(trained)]
        (drawn,) = {drawn for _, drawn in found}
        assert trained[-1] < drawn <= sorted(with_signal)[len(trained)]


class Lengths(Source):
    """A `RolloutSource` whose samples of one group have 1, 2, 3, ... tokens."""

    def step(self):
        prompt = self.samples.pop()
        n = prompt.sample + 1
        return [Rollout(prompt, tokens=[1] * n, logprobs=[-0.5] * n, versions=[1] * n)]


@pytest.mark.parametrize("replaces", [False, True])
def test_answers_that_are_all_wrong_have_no_signal_whatever_the_penalty_of_their_lengths(replaces):
    """After the penalty of `overlong` the rewards of each group differ: 0.0, -0.25, -0.5, -0.75."""
    sampling = RLSamplingConfig(max_new_tokens=5)
    config = RLConfig(groups=2, group_size=4, sampling=sampling, overlong=4, dynamic_sampling=replaces)

    def job(shards):
        order = SampleOrder(PROBLEMS, seed=0)
        stream = stream_of(shards, order, config, (3, 4).__contains__, random.Random(0))
        stream.pipeline.source = Lengths(None)
        return [group.position for group in stream.next_batch()], stream.counts

    ((trained, counts),) = run_ranks(1, job)
    assert trained == ([3, 4] if replaces else [0, 1])
    assert (counts["groups"], counts["no_signal"]) == ((5, 3) if replaces else (2, 2))
