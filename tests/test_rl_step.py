"""Tests that a node takes the step that a policy-gradient loop in plain PyTorch takes on the same samples."""

import pytest
from kit.plain_grpo import PlainTrainer, Recording, metrics_of
from kit.rl_nodes import config_of, records, run

from aedit.launch.node import build_model

KEYS = {
    "drafter__kind": "off",
    "edit__every": 100,
    "train__steps": 4,
    "train__lr_warmup": 0.0,
    "train__lr_final": 1.0,
    "train__lr": 0.02,
    "checkpoint__every": 0,
}
CASES = {
    "dppo-tv": {
        "rl__clip_low": 0.002,
        "rl__clip_high": 0.001,
        "rl__sampling__temperature": 0.7,
        "train__batch_size": 5,
    },
    "grpo": {
        "rl__advantage": "std",
        "rl__importance": "token",
        "rl__clip_high": 0.05,
        "rl__kl": 0.3,
        "rl__batches": 3,
        "train__steps": 6,
        "train__grad_clip": 1e-2,
    },
    "gspo": {
        "rl__advantage": "leave-one-out",
        "rl__importance": "sequence",
        "rl__clip_low": 0.5,
        "rl__clip_high": 0.1,
        "rl__kl": 0.1,
        "rl__overlong": 4,
    },
    "dapo": {"rl__max_staleness": 2, "rl__clip_low": 0.05, "rl__clip_high": 0.05, "train__steps": 6},
}


def rel(found, expected, base=None):
    """Return the distance of two sets of tensors, relative to the second one or its distance from `base`."""
    apart = sum(((found[n].double() - e.double()) ** 2).sum() for n, e in expected.items())
    size = sum(((e.double() - (base[n].double() if base else 0)) ** 2).sum() for n, e in expected.items())
    return float((apart / size).detach().sqrt())


def model_of(config):
    return build_model(config.model, 257, config.data.seq_len, config.seed, 256)


def follow(trainer, recording, batches, epochs, parts):
    """Take the recorded steps with `trainer`; compare gradients and weights after each."""
    at = 0
    for groups in batches:
        proximal = trainer.proximal(groups)
        size, count = len(groups) // parts, len(groups[0])
        for epoch in range(epochs):
            for part in range(parts):
                mine = slice(part * size, (part + 1) * size)
                before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
                expected = trainer.step(groups[mine], proximal[mine.start * count : mine.stop * count])
                gradients, weights = recording.steps[at]
                assert rel(gradients, expected) < 2e-5, (at, epoch)
                after = dict(trainer.model.named_parameters())
                assert rel(weights, after, before) < 5e-3, (at, epoch)
                trainer.take(weights)  # so that rounding does not add up
                at += 1
    assert at == len(recording.steps)


@pytest.mark.parametrize("loss", CASES)
def test_gradients_weights_and_metrics_are_those_of_plain_torch(tmp_path, loss):
    config = config_of(tmp_path, **KEYS | {"rl__loss": loss, "rl__epochs": 2} | CASES[loss])
    recording = Recording()
    run(config, recording.watch)
    trainer = PlainTrainer(model_of(config), recording.start, config)
    assert len(recording.batches) == config.train.steps // (2 * config.rl.batches)
    follow(trainer, recording, recording.batches, 2, config.rl.batches)
    steps = 2 * config.rl.batches
    ratios = [abs(case.logp - case.behaviour)[case.mask].max() for case, _ in trainer.seen]
    if config.rl.max_staleness == 0:
        assert all(ratio < 1e-5 for ratio in ratios[::steps]), "on policy, the ratio is 1"
    assert min(ratios[1::steps]) > 1e-3, "the behaviour log-probabilities stay those of the rollouts"
    found = records(config, "metrics")[-1]["rl"]
    expected = metrics_of(recording.batches[-1], trainer.seen[-steps:], config, len(recording.batches))
    assert 0 < expected["clip_share"] < 1
    assert (expected["staleness_max"] > 0) == (config.rl.max_staleness > 0)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name


def test_two_ranks_take_the_steps_of_plain_torch_on_the_samples_of_both(world, tmp_path):
    """Their micro-batches have 3 of the 16 samples each."""
    keys = KEYS | {"rl__groups": 4, "train__steps": 3, "train__batch_size": 6, "rl__loss": "grpo"}
    config = config_of(tmp_path, **keys)
    args = {"directory": tmp_path, "keys": keys}
    one, other = world.run("tests/dist_jobs/rl_jobs.py", "recorded", size=2, args=args)
    batches = [[*mine, *theirs] for mine, theirs in zip(one.batches, other.batches, strict=True)]
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert one.batches != other.batches
    trainer = PlainTrainer(model_of(config), one.start, config)
    follow(trainer, one, batches, 1, 1)
    found = records(config, "metrics")[-1]["rl"]
    for name, value in metrics_of(batches[-1], trainer.seen[-1:], config, 3).items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name
