"""Tests that a draft layer learns from the policy's samples, and resumes exactly where it stopped."""

import copy

import pytest
import torch
from kit.tiny_policies import drafter, ends, policy, said

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training import DraftTrainer, DraftTrainingConfig, held_out_match, pack_samples
from aedit.spec_rollout.training.losses import LossConfig, draft_losses


def equal(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def fresh(model):
    return DraftLayer.of(model, generator=torch.Generator().manual_seed(0))


def test_a_few_dozen_steps_make_a_drafter_of_a_beginner():
    model = policy(dtype=torch.float32)
    prompts = torch.randint(48, (14, 4), generator=torch.Generator().manual_seed(0)).tolist()
    samples = said(model, prompts, 40)
    taught, apart = samples[:10], samples[10:]
    trainer = DraftTrainer(fresh(model), DraftTrainingConfig(lr=2e-3, warmup_steps=10))
    judge = pack_samples(apart, 256)
    before = held_out_match(trainer.layer, judge, ends(model), 3)
    first = trainer.step(taught, ends(model))
    for _ in range(40):
        last = trainer.step(taught, ends(model))
    after = held_out_match(trainer.layer, judge, ends(model), 3)
    assert last.loss < 0.8 * first.loss
    assert after.rate > 1.3 * before.rate
    assert after.overlap_D[0] > before.overlap_D[0] + 0.05
    assert after.coupled_D[0] > before.coupled_D[0]
    assert last.overlap_S[0] > first.overlap_S[0]


def test_a_step_is_plain_adamw_on_the_mean_over_pairs():
    model = policy()
    samples = said(model, [[1, 2, 3], [4, 5, 6]], 12)
    config = DraftTrainingConfig(row_pairs=16, warmup_steps=0, lr=1e-3, clip=1e9)
    trainer, plain = DraftTrainer(drafter(model), config), drafter(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(3):
        metrics = trainer.step(samples, ends(model))
        (row,) = pack_samples(samples, 64)
        loss = draft_losses(plain, row, ends(model), config.loss).total / 24
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-9)
        assert metrics.num_pairs == 24
    for a, b in zip(trainer.layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_training_goes_on_exactly_where_it_was():
    model = policy(dtype=torch.float32)
    parts = [said(model, [[1, 2, 3]] * 2, 10, seed=seed) for seed in range(8)]
    config = DraftTrainingConfig(warmup_steps=3)
    through = DraftTrainer(drafter(model), config)
    through.lr_factor = 0.5
    for samples in parts[:4]:
        through.step(samples, ends(model))
    state = copy.deepcopy(through.state())
    again = DraftTrainer(drafter(model, seed=9), config)
    again.resume(state)
    for samples in parts[4:]:
        assert through.step(samples, ends(model)) == again.step(samples, ends(model))
    assert equal(through.layer, again.layer)
    assert again.num_steps == 8


def test_a_step_that_is_broken_off_has_changed_nothing():
    model = policy(dtype=torch.float32)
    samples = said(model, [[1, 2, 3]] * 6, 30)
    through, broken = (DraftTrainer(drafter(model), DraftTrainingConfig(row_pairs=32)) for _ in range(2))
    pieces = broken.rows(samples, ends(model))
    for _ in range(3):
        assert next(pieces) is None
    pieces.close()
    assert equal(broken.layer, drafter(model))
    assert through.step(samples, ends(model)) == broken.step(samples, ends(model))
    assert equal(broken.layer, through.layer)


def test_a_state_holds_nothing_of_the_policys():
    model = policy(dtype=torch.float32)
    trainer = DraftTrainer(drafter(model), DraftTrainingConfig())
    trainer.step(said(model, [[1, 2, 3]], 10), ends(model))
    largest = max(value.numel() for value in trainer.layer.parameters())
    own = 4 * sum(value.numel() for value in trainer.layer.parameters()) + 3
    assert sum(value.numel() for value in trainer.state().values()) == own
    assert max(value.numel() for value in trainer.state().values()) == largest


def test_a_state_of_another_drafter_is_refused_and_harms_nothing():
    model = policy(dtype=torch.float32)
    trainer = DraftTrainer(drafter(model), DraftTrainingConfig())
    for spoil in ("num_steps", "exp_avg.fuse.weight", "layer.fuse.weight"):
        state = trainer.state()
        state[spoil] = torch.zeros(3, 3)
        with pytest.raises(ValueError, match=spoil.removeprefix("layer.")):
            trainer.resume(state)
        del state[spoil]
        with pytest.raises(ValueError, match=spoil.removeprefix("layer.")):
            trainer.resume(state)
    state = trainer.state() | {"layer.embed_tokens.weight": torch.zeros(48, 32)}
    with pytest.raises(ValueError, match="belongs to the policy"):
        trainer.resume(state)
    assert equal(trainer.layer, drafter(model))


def test_training_changes_no_tensor_of_the_policy():
    model = policy(dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    trainer = DraftTrainer(drafter(model), DraftTrainingConfig())
    trainer.step(said(model, [[1, 2, 3]], 10), ends(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_fresh_optimizer_warms_up():
    model = policy(dtype=torch.float32)
    samples = said(model, [[1, 2, 3]], 10)
    trainer = DraftTrainer(drafter(model), DraftTrainingConfig(lr=1e-3, warmup_steps=4))
    rates = [trainer.step(samples, ends(model)).lr for _ in range(6)]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3])
    trainer.restart(drafter(model).state_dict())
    assert trainer.step(samples, ends(model)).lr == pytest.approx(2e-4)


def test_samples_with_nothing_to_learn_take_no_step():
    model = policy(dtype=torch.float32)
    trainer = DraftTrainer(drafter(model), DraftTrainingConfig())
    assert trainer.step([], ends(model)) is None
    assert trainer.step(said(model, [[1, 2, 3]], 0), ends(model)) is None
    assert trainer.num_steps == 0


def test_settings_that_mean_nothing_are_refused():
    for wrong in ({"lr": 0.0}, {"warmup_steps": -1}, {"clip": 0.0}, {"row_pairs": 3}, {"batch_pairs": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DraftTrainingConfig(**wrong)
    assert DraftTrainingConfig(loss=LossConfig(num_passes=1)).loss.num_passes == 1


def test_the_average_is_that_of_float64_and_begins_with_a_trained_layer():
    model = policy(dtype=torch.float32)
    samples = said(model, [[1, 2, 3]] * 2, 10)
    for is_trained in (False, True):
        config = DraftTrainingConfig(lr=1e-2, warmup_steps=0, decay=0.6)
        trainer = DraftTrainer(drafter(model), config, is_trained=is_trained)
        expected = trainer.layer.down.weight.detach().double().numpy().copy()
        for step in range(1, 31):
            trainer.step(samples, ends(model))
            kept = 0.6 if is_trained else min(0.6, step / (step + 10))
            expected = kept * expected + (1 - kept) * trainer.layer.down.weight.detach().double().numpy()
        assert trainer.averaged.down.weight.numpy() == pytest.approx(expected, abs=1e-6)
        assert not torch.equal(trainer.averaged.down.weight, trainer.layer.down.weight)
    trainer.restart(drafter(model).state_dict())
    assert equal(trainer.averaged, drafter(model))
