"""Tests that the benchmark of rollout servers keeps its pace and its books, and judges. No timing decides."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from benchmarks import rl_servers
from benchmarks.programs import rollout_server
from benchmarks.programs.rollout_server import make_policy
from benchmarks.rl_servers import Difference, Ledger, Plan, Trainer, deal, difference, reward, step

from aedit.spec_rollout import Engine
from aedit.spec_rollout.engine import EngineSource
from aedit.spec_rollout.sampling import Rollout

PLAN = Plan(batches=2, groups=2, group_size=3, rows=2, max_new_tokens=12, step_s=0.0, train_s=0.0)


class FakeTime:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def spec(**options):
    fields = rl_servers.engine_of(PLAN) | {"options": options}
    return rollout_server.EngineSpec(**fields | {"arms": tuple(fields["arms"])})


def generated(engine, prompts):
    engine.update_weights(make_policy().state_dict(), 1)
    return {rollout.prompt.key: rollout for rollout in engine.generate(prompts)}


def test_a_paced_engine_draws_the_tokens_of_a_plain_one_and_each_step_lasts_as_long(monkeypatch):
    clock, prompts = FakeTime(), deal(PLAN, 0)
    monkeypatch.setattr(rollout_server, "time", clock)
    plain = generated(Engine.of(make_policy(), rows=4, max_tokens=PLAN.max_tokens), prompts)
    engine = rollout_server.make_paced(spec(step_s=0.25))
    found = generated(engine, prompts)
    assert [found[key].tokens for key in plain] == [each.tokens for each in plain.values()]
    assert clock.now_s - 100.0 == pytest.approx(0.25 * engine.meters.num_steps)
    clock.now_s += 60.0  # a pause is not caught up with
    generated_s, steps = clock.now_s, engine.meters.num_steps
    generated(engine, deal(PLAN, 1))
    assert clock.now_s - generated_s == pytest.approx(0.25 * (engine.meters.num_steps - steps))


class Careless(EngineSource):
    """Source that returns samples in another order, and loses, repeats or changes some."""

    def __init__(self, engine, mistake):
        super().__init__(engine, None)
        self.mistake = mistake

    def step(self):
        found = list(reversed(super().step()))
        return [one for each in found for one in self.mistake(each)]


def trained(mistake=lambda rollout: [rollout], rows=2):
    model = make_policy()
    engine = Engine.of(model, rows=rows, max_tokens=PLAN.max_tokens)
    outcome = Trainer(PLAN, model, Careless(CopiedWeights.of(engine), mistake)).run()
    outcome.status = {"server_tokens": 0}
    return outcome


class CopiedWeights(Engine):
    """Engine whose weights are the model's own, which change in place."""

    @classmethod
    def of(cls, engine):
        return cls(engine.target)

    def update_weights(self, weights, version):
        super().update_weights(None, version)


@pytest.fixture(scope="module")
def undisturbed():
    return trained()


def first(rollout):
    return rollout.prompt.key == (0, 0)


MISTAKES = {
    "lost": lambda r: [] if first(r) else [r],
    "repeated": lambda r: [r, r] if first(r) else [r],
    "tokens": lambda r: [dataclasses.replace(r, tokens=[*r.tokens[:-1], 1])] if first(r) else [r],
    "versions": lambda r: [dataclasses.replace(r, versions=[7] * len(r.tokens))] if first(r) else [r],
    "logprobs": lambda r: (
        [dataclasses.replace(r, logprobs=[1e-3 + p for p in r.logprobs])] if first(r) else [r]
    ),
}


def test_the_same_run_on_another_engine_has_the_same_books_and_weights_bit_for_bit(undisturbed):
    other = trained(rows=5)
    assert rl_servers.Checked("x", other, undisturbed, rl_servers.Done()).is_same
    assert other.ledger.asked.total() == PLAN.batches * PLAN.groups * PLAN.group_size
    start = dict(make_policy().named_parameters())
    assert not any(torch.equal(start[name], value) for name, value in other.weights.items())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sample_that_is_lost_repeated_or_other_is_found(undisturbed, mistake):
    if mistake in ("lost", "repeated"):  # a group of another size cannot be trained
        ledger = Ledger()
        ledger.ask(deal(PLAN, 0))
        came = [one for p in deal(PLAN, 0) for one in MISTAKES[mistake](Rollout(p, [2], [-1.0], [1]))]
        ledger.add(came, [0.0] * len(came))
        assert (ledger.num_lost, ledger.num_repeated) == (mistake == "lost", mistake == "repeated")
        return
    run = rl_servers.Checked("x", trained(MISTAKES[mistake]), undisturbed, rl_servers.Done())
    assert run.differences[mistake] >= 1
    assert not run.is_same
    assert rl_servers._sameness(run).passed is False


def test_rewards_and_missing_samples_are_compared():
    ours, theirs = Ledger(), Ledger()
    prompts = deal(PLAN, 0)[:3]
    rollouts = [Rollout(prompt, [2, 3], [-1.0, -2.0], [1, 1]) for prompt in prompts]
    ours.add(rollouts, [0.5, 0.5, 0.5])
    theirs.add(rollouts[:2], [0.5, 0.25])
    expected = Difference(compared=2, missing=1, tokens=0, logprobs=0, versions=0, rewards=1)
    assert difference(ours.entries, theirs.entries) == expected
    assert reward(rollouts[0]) == 0.5


def test_a_step_is_that_of_policy_gradients_in_plain_torch():
    model, plain = make_policy(), make_policy()
    prompts = deal(PLAN, 0)[: PLAN.group_size]
    engine = Engine.of(model, rows=3, max_tokens=PLAN.max_tokens)
    rollouts = sorted(engine.generate(prompts), key=lambda rollout: rollout.prompt.key)
    rewards = torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)
    terms, num_tokens = [], sum(len(rollout.tokens) for rollout in rollouts)
    for rollout, gained in zip(rollouts, rewards - rewards.mean(), strict=True):
        ids = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens]])
        logp = plain(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        terms.append(-(gained * logp[len(rollout.prompt.tokens) - 1 :]).sum() / len(rollout.tokens))
    (torch.stack(terms).sum() / len(rollouts)).backward()
    inner = SimpleNamespace(zero_grad=model.zero_grad, step=lambda: None)
    step(model, inner, rollouts, rewards.tolist(), PLAN.group_size)
    assert num_tokens > 3
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_the_bars_are_those_of_the_table(undisturbed):
    def way(seconds):
        return dataclasses.replace(undisturbed, rollouts_s=[9.0, seconds], steps_s=[9.0, seconds + 1])

    size = dataclasses.replace(rl_servers.QUICK, timed=PLAN)
    times = {"alone": 4.0, "one server": 2.5, "two servers": 2.0, "two servers, one 4 times slower": 2.2}
    told = rl_servers.speed_report(size, {name: way(s) for name, s in times.items()}, decided=True)
    assert [row[2:4] for row in told.rows][::2] == [("4.00", "1.00"), ("2.00", "2.00")]
    assert [bar.passed for bar in told.bars] == [True, True]
    times["two servers"] = 2.3
    told = rl_servers.speed_report(size, {name: way(s) for name, s in times.items()}, decided=True)
    assert [bar.passed for bar in told.bars] == [False, True]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_changes_nothing_whatever_happens_to_its_servers():
    speed, harmed = rl_servers.measure(quick=True)
    assert [row[0] for row in speed.rows] == list(rl_servers.WAYS)
    assert speed.bars[1].passed
    assert [bar.passed for bar in harmed.bars if "other final weights" in bar.text] == [True, True]
    assert harmed.bars[-1].passed
