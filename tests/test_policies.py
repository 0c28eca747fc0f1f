"""Tests the policies of the rollout benchmarks: their rows, stopping, resuming, and finding them again."""

from dataclasses import asdict
from functools import partial
from itertools import count

import pytest
import torch
from benchmarks import policies
from benchmarks.kit import policy_drafter
from benchmarks.kit.policy_drafter import Recipe, drafter_ready, prompts_of
from benchmarks.kit.policy_training import IGNORED, Budget, Training, mean_loss, task_rows
from benchmarks.policies import Policy, load, new_model, prompts, ready
from transformers import AutoModelForCausalLM, AutoTokenizer

from aedit.launch.cli.train_drafter import collect_rollouts
from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.rl.tasks.scratchpad import worked
from aedit.spec_rollout.training import DraftTrainingConfig, train_drafter

QUICK = Policy(size="quick", minutes=0.001)
END = 256


def segments(ids, labels):
    """Return prompt and answer of each task in a row, separated by which positions have a label."""
    shown = [*zip(ids.tolist(), [IGNORED, *labels.tolist()], strict=False)]
    prompt, answer, found = [], [], []
    for token, label in shown:
        if label == IGNORED:
            if token == END:
                break  # padding
            prompt.append(token)
        elif label == END:
            found.append((bytes(prompt).decode(), bytes(answer).decode()))
            prompt, answer = [], []
        else:
            assert label == token
            answer.append(token)
    return found, prompt


def test_a_row_is_whole_tasks_and_only_answers_and_their_ends_have_labels():
    ids_KT, labels_KT = task_rows(3, 512, "seed")
    assert ids_KT.shape == labels_KT.shape == (3, 512)
    for ids, labels in zip(ids_KT, labels_KT, strict=True):
        found, rest = segments(ids, labels)
        assert len(found) > 1
        for prompt, answer in found:
            assert answer == worked(prompt)
        ends_at_the_edge = labels[-1] == END
        assert rest == [] or ends_at_the_edge
    assert (labels_KT != IGNORED).float().mean() > 0.6


def test_another_seed_gives_other_rows():
    assert torch.equal(task_rows(1, 256, "a")[0], task_rows(1, 256, "a")[0])
    assert not torch.equal(task_rows(1, 256, "a")[0], task_rows(1, 256, "b")[0])


def test_arithmetic_begins_with_short_tasks_and_ends_with_all():
    lengths = []
    for done in (0.0, 0.3, 0.6, 1.0):
        _, labels_KT = policies._rows(Policy(), 4096, 0, done)
        ends = (labels_KT == ByteTokenizer().eos_id).sum()
        lengths.append(float((labels_KT != IGNORED).sum() / ends))
    assert lengths[0] < 40 < lengths[1] < lengths[2]
    assert lengths[2] == pytest.approx(lengths[3])
    whole = task_rows(8, 512, "0/0")
    assert all(torch.equal(a, b) for a, b in zip(policies._rows(Policy(), 4096, 0, 0.6), whole, strict=True))


def rows_of(step, done):
    return task_rows(1, 128, f"0/{step}")


def ticking(stop=None):
    """Return a clock that advances 0.5 s per reading and raises KeyboardInterrupt at reading `stop`."""
    looks = count()

    def now():
        look = next(looks)
        if look == stop:
            raise KeyboardInterrupt
        return look / 2

    return now


def trained(place, *clocks):
    for clock in clocks:
        training = Training(new_model(QUICK), rows_of, Budget(seconds=6), place)
        try:
            for _ in training.run(clock):
                pass
        except KeyboardInterrupt:
            assert place.exists()
    return training


def test_stopped_and_resumed_it_is_the_same_policy(tmp_path):
    whole = trained(tmp_path / "a", ticking())
    resumed = trained(tmp_path / "b", ticking(stop=8), ticking())
    assert whole.progress == resumed.progress
    assert whole.progress.step == 12
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_lowers_the_loss(tmp_path):
    held_out = task_rows(1, 512, "held out")
    training = Training(new_model(QUICK), rows_of, Budget(seconds=15, lr=5e-3), tmp_path / "t")
    before = float(mean_loss(training.model, held_out, "cpu").detach())
    *_, last = training.run(ticking())
    assert float(mean_loss(training.model, held_out, "cpu").detach()) < before - 1
    assert last.step == 30
    assert last.tokens >= 30 * 128


def test_a_policy_is_trained_once_and_read_by_transformers(tmp_path, monkeypatch):
    out = ready(QUICK, tmp_path, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    monkeypatch.setattr(policies, "_train", partial(pytest.fail, "trained again"))
    assert ready(QUICK, tmp_path) == out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.eos_token_id == tokenizer.eos_token_id == END
    assert tokenizer("add 1+2\n")["input_ids"] == list(b"add 1+2\n")


def test_other_settings_are_another_policy():
    others = ({"task": "python"}, {"size": "25m"}, {"minutes": 1.0}, {"seed": 1}, {})
    assert len({Policy(**asdict(Policy()) | other).name for other in others}) == len(others)


@pytest.mark.parametrize("task", ["scratchpad", "python"])
def test_prompts_are_the_same_for_the_same_seed(task):
    policy = Policy(task=task)
    first = prompts(policy, 3, seed=7)
    assert first == prompts(policy, 3, seed=7) != prompts(policy, 3, seed=8)
    assert all(0 <= token < 257 for tokens in first for token in tokens)


@pytest.mark.slow
def test_a_drafter_learns_from_the_rollouts_of_its_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_drafter, "MAX_TOKENS", 96)
    recipe, training = Recipe(policy=QUICK, num_tokens=3000), DraftTrainingConfig(lr=3e-3)
    model = load(QUICK, tmp_path)
    model.get_input_embeddings().weight.data.mul_(8)  # says something, as one that was trained for longer
    samples = collect_rollouts(model, prompts_of(recipe), recipe.num_tokens)
    assert sum(len(sample.tokens_N) for sample in samples) >= 3000
    assert all(bytes(sample.tokens_N[: sample.num_prompt].tolist()).endswith(b"\n") for sample in samples)
    _, untaught = train_drafter(model, samples, training, 0.1, clock=iter((0.0, 6.0)).__next__)
    _, taught = train_drafter(model, samples, training, 0.1, clock=count(0, 0.08).__next__)
    assert taught.overlap_D[0] > untaught.overlap_D[0] + 0.05


def test_a_drafter_is_trained_once_and_lies_beside_its_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_drafter, "MAX_TOKENS", 96)
    recipe = Recipe(policy=QUICK, num_tokens=1500, minutes=0.001)
    path = drafter_ready(recipe, tmp_path)
    assert path.parent.name == QUICK.name
    monkeypatch.setattr(policy_drafter, "collect_rollouts", partial(pytest.fail, "collected again"))
    assert drafter_ready(recipe, tmp_path) == path
    DraftLayer.load(path, load(QUICK, tmp_path))
    assert Recipe(policy=QUICK).name != Recipe(policy=QUICK, lr=1e-4).name


def test_too_few_rollouts_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="too few to learn from"):
        train_drafter(new_model(QUICK), [], DraftTrainingConfig(), 0.1)
