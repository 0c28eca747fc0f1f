"""Tests what `benchmarks.rollout` measures: turns, forecasts, equality, bars. No timing decides."""

import json
import random
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks import rollout
from benchmarks.policies import Policy, new_model
from benchmarks.rollout import (
    ADAPTIVE,
    AGAIN,
    FIXED,
    OURS,
    PLAIN,
    RANDOM,
    THEIRS,
    Cast,
    Cell,
    Contestant,
    Foretold,
    Same,
    Scores,
    Spoken,
    Theirs,
    Watched,
    bars,
    contestants,
    drains,
    gap,
    race,
    random_layer,
    stream,
    tail,
    without_stop,
)
from benchmarks.rollout import NO_DRAFT as OFF
from transformers import LlamaForCausalLM

from aedit.spec_rollout.choose import EngineView, Goodput, StepObservation, score_bins
from aedit.spec_rollout.drafters import Arm, Draft, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Sampling

QUICK = Policy(size="quick", minutes=0.001)


@pytest.fixture(scope="module")
def model():
    """Return an untrained model; its head is scaled so that some next tokens are likely."""
    policy = new_model(QUICK).eval()
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(8)
    return policy


@pytest.fixture(scope="module")
def cast(model):
    return Cast(QUICK, model, random_layer(model, seed=1), random_layer(model))


def ticking(by=1.0):
    ticks = count()
    return lambda: by * next(ticks)


def said(model, temperature, num_tokens=12, seed=1):
    """Return plain decoding of two samples of the stream."""
    samples = stream(QUICK, temperature, seed)
    prompts = [next(samples) for _ in range(2)]
    prompts = [replace(p, sampling=replace(p.sampling, max_new_tokens=num_tokens)) for p in prompts]
    return list(Engine.of(model, rows=2, max_tokens=160).generate(prompts))


class Steps:
    """Engine whose steps make three tokens each."""

    def __init__(self, rows=2):
        self.target, self.chooser, self.added = SimpleNamespace(rows=rows), None, 0
        self.steps = 0

    def add(self, prompt):
        self.added += 1
        return prompt

    def step(self):
        self.steps += 1
        return SimpleNamespace(counts=(1, 2), finished=(), total_s=0.25)


# --- turns


def test_what_a_turn_makes_too_much_is_the_next_ones():
    one = Contestant("x", Steps(), iter(range(100)), clock=ticking())
    steps = []
    for num_tokens in (4, 4, 6):
        before = one.engine.steps
        assert one.turn(num_tokens) == pytest.approx(3.0)
        steps.append(one.engine.steps - before)
    assert steps == [2, 1, 2]
    assert one.step_rates == pytest.approx([12.0] * 3), "prompts are not in the time of steps"


def test_watching_is_not_measured():
    one = Contestant("x", Steps(), iter(range(100)), clock=ticking(10.0))
    watch = Watched(Goodput([Arm("suffix", 1, 1, 1)]))
    step = one.engine.step

    def watched_step():
        watch.spent_s += 4.0
        return step()

    one.engine.chooser, one.engine.step = watch, watched_step
    assert one.turn(3) == pytest.approx(3 / 6)


def test_samples_wait_before_rows_are_free():
    one = Contestant("x", Steps(rows=5), iter(range(100)), clock=ticking())
    one.turn(3)
    assert one.engine.added == len(one.rollouts) == 10


def test_the_stream_is_the_same_for_all_and_another_for_another_seed():
    some = [[next(samples) for _ in range(3)] for samples in (stream(QUICK, 1.0, s) for s in (1, 1, 2))]
    assert some[0] == some[1]
    assert {p.tokens for p in some[0]}.isdisjoint(p.tokens for p in some[2])
    assert all(p.group == -1 and p.sampling.stop_tokens == (256,) for p in some[0])
    without_end = stream(replace(QUICK, task="python"), 1.0, 1)
    lengths = {next(without_end).sampling.max_new_tokens for _ in range(20)}
    assert len(lengths) > 5
    assert all(64 <= length <= 320 for length in lengths)


def test_all_contestants_say_the_same_with_a_full_batch(cast):
    racers = contestants(cast, 2, 1.0, seed=1)
    assert [one.name for one in racers] == [PLAIN, AGAIN, *FIXED, ADAPTIVE, RANDOM]
    rates = race(racers, 24, 2, random.Random(0))
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
    for one in racers:
        meters = one.engine.meters
        assert meters.num_passes == 2 * meters.num_steps, "some row was empty"
        assert 2 * 48 <= meters.num_tokens < 2 * 48 + 2 * 10
        same = Same.of(cast.model, racers[0].rollouts, one.rollouts)
        assert same.differences == 0
        assert same.tokens > 40
    by_name = {one.name: Spoken.of(one) for one in racers}
    assert by_name[PLAIN].accepted_length == 1
    assert set(by_name["layer:8"].arms) == {"layer:8"}
    assert len(by_name["layer:8"].by_position) == 8


# --- equality


@pytest.mark.parametrize("temperature", [0.0, 30.0])
def test_the_token_that_was_drawn_is_ahead_of_all_others(model, temperature):
    for one in said(model, temperature):
        token = one.tokens[5]
        others = [t for t in range(0, 257, 17) if t != token]
        assert all(gap(model, one.prompt, one.tokens[:5], (token, t)) > 0 for t in others)


def test_another_token_is_a_difference_and_what_follows_it_is_not_compared(model):
    one = said(model, 1.0)[0]
    wrong = [*one.tokens]
    wrong[7] = (wrong[7] + 1) % 256
    wrong[9] = (wrong[9] + 1) % 256
    assert Same.of_tokens(model, one.prompt, one.tokens, wrong) == Same(7, 0, 1)
    assert Same.of_tokens(model, one.prompt, one.tokens, one.tokens[:9]) == Same(9)


def test_two_tokens_of_one_score_are_a_tie_only_where_nothing_else_tells_them_apart(model):
    twins = LlamaForCausalLM(model.config)
    twins.load_state_dict(model.state_dict())
    prompt = Prompt(tokens=(65, 66, 67), sampling=Sampling(temperature=0.0))
    with torch.no_grad():
        twins.get_input_embeddings().weight[98] = twins.get_input_embeddings().weight[99]
    assert Same.of_tokens(twins, prompt, [97, 98], [97, 99]) == Same(1, 1, 0)
    warm = replace(prompt, sampling=Sampling(temperature=1.0))
    assert Same.of_tokens(twins, warm, [97, 98], [97, 99]) == Same(1, 0, 1)


def test_looking_at_a_difference_leaves_the_policy_as_it_is(model):
    weight = model.get_input_embeddings().weight
    gap(model, Prompt(tokens=(65, 66)), [67], (1, 2))
    assert weight is model.get_input_embeddings().weight
    assert weight.dtype == torch.float32


# --- beside transformers


def test_generate_gives_our_greedy_tokens_in_every_way(model):
    theirs = Theirs(QUICK, without_stop(model), model, num_new=8, temperature=0.0)
    rates, same = theirs.race(1, 1, random.Random(0))
    assert list(rates) == [OURS, THEIRS, "prompt lookup", "assisted"]
    assert (same.differences, same.tokens) == (0, 8)


def test_prompts_of_unequal_length_are_one_batch_of_generate(model):
    theirs = Theirs(QUICK, without_stop(model), None, num_new=6, temperature=0.0)
    assert len({len(p.tokens) for p in theirs._prompts(6)}) > 1
    rates, same = theirs.race(3, 1, random.Random(0))
    assert list(rates) == [OURS, THEIRS]
    assert (same.differences, same.tokens) == (0, 18)


# --- forecasts


def observed(total_s, rows=2, arm=OFF, **more):
    return StepObservation(
        view=EngineView(rows, 40, {"suffix": 0}), arm=parse_arm(arm), emitted=rows, total_s=total_s, **more
    )


def test_a_step_is_foretold_before_it_is_learnt():
    watch = Watched(Goodput([parse_arm("suffix:2")]))
    first_s = watch.inner.cost.verify_s(2, 0, 40)
    watch.learn(observed(first_s / 2))
    assert watch.foretold.step_error == pytest.approx(1.0)
    for _ in range(40):
        watch.learn(observed(first_s / 2))
    watch.forget()
    watch.learn(observed(first_s / 2))
    assert watch.foretold.step_error < 0.02
    assert (watch.foretold.steps, watch.foretold.speedup) == (1, 1.0)


def test_chances_are_judged_as_they_were_before_they_were_learnt():
    watch, other = (Watched(Goodput([parse_arm("suffix:2")])) for _ in range(2))
    draft = Draft(
        torch.zeros(2, 2, dtype=torch.int64), None, None, torch.tensor([[0.9, 0.9], [0.9, 0.3]]).log()
    )
    step = observed(1e-3, arm="suffix:2", draft=draft, nodes=2, accepted_B=(0, 2))
    chances_BN = other.inner.drafters["suffix"].chances(step.arm, score_bins(draft))
    watch.learn(step)
    assert watch.foretold.chance_nodes == {"suffix": 4}
    (first, second), (third, fourth) = chances_BN
    assert first == second == third, "one bin"
    error = (abs(3 * first - 1) + abs(fourth - 1)) / 4
    assert watch.foretold.chance_errors["suffix"] == pytest.approx(error)


def test_a_calibration_error_is_the_mean_over_bins():
    scores = Scores()
    scores.add(np.array([0.81, 0.81, 0.11, 0.11]), np.array([1.0, 0.0, 0.0, 0.0]))
    assert scores.error == pytest.approx((0.62 + 0.22) / 4)


# --- drains


def test_a_drain_ends_with_the_same_tokens(cast, monkeypatch):
    monkeypatch.setattr("benchmarks.rollout.DRAIN_TOKENS", 150)
    found = drains(cast, 3, 2, 1.0)
    assert [len(drain.lengths) for drain in found] == [3, 3]
    assert found[0].lengths != found[1].lengths
    for drain in found:
        assert drain.same.tokens == sum(drain.lengths)
        assert drain.same.differences == 0
        assert drain.speedup == drain.plain_s / drain.adaptive_s
    assert tail(found) >= 1


# --- bars


def cell(rows=1, temperature=1.0, task="scratchpad", **speedups):
    """Return five repeats of a cell.

    Arms not named are as fast as plain decoding, and the first is an outlier.
    """
    names = (PLAIN, AGAIN, *FIXED, ADAPTIVE, RANDOM)
    later = {name: 100 * speedups.get(name.replace(" ", "_"), 1.0) for name in names}
    rates = {name: (1.0 if name == PLAIN else 9.0, *([rate] * 4)) for name, rate in later.items()}
    foretold = Foretold(0.1, 0.1, {"layer": 0.04, "suffix": 0.5}, {"layer": 5000, "suffix": 10}, 2.0, 99)
    spoken = {name: Spoken(1.0, (), {}) for name in names}
    theirs = {OURS: (150.0,), THEIRS: (100.0,)}
    steps = {name: tuple(1.2 * rate for rate in rates[name]) for name in (PLAIN, ADAPTIVE)}
    return Cell(task, temperature, rows, rates, steps, theirs, spoken, foretold, Same(9), Same())


def verdicts(*cells):
    return {bar.text.partition(":")[0]: bar.passed for bar in bars(cells)}


def test_bars_are_those_of_the_worst_cell():
    good = cell(1, adaptive=2.1, random_drafter=0.99)
    slow = cell(4, adaptive=1.4, random_drafter=0.97, **{"layer:2": 1.5})
    alone = verdicts(good)
    assert all(alone.values())
    both = verdicts(good, slow)
    assert both["scratchpad, adaptive, batch 1"]
    missed = {name for name, passed in both.items() if passed is False}
    assert {"scratchpad, adaptive, batch 2 to 4", "scratchpad, with a random drafter"} < missed
    assert {"scratchpad, over the best fixed arm"} < missed
    assert len(missed) == 4, "and measured / foretold, 1.4 / 2"


def test_a_forecast_of_steps_is_compared_with_steps():
    one = cell(adaptive=1.8)
    assert one.kept == pytest.approx(0.9)
    slower = one.step_rates | {ADAPTIVE: (1.0, *[180.0] * 4)}
    assert replace(one, step_rates=slower).kept == pytest.approx(0.75)
    assert one.figures["measured_over_foretold"] == one.kept


def test_hard_text_has_a_bar_of_its_own():
    found = verdicts(cell(4, task="python", adaptive=1.2), cell(8, task="python"), cell(1, 0.0, "python"))
    assert found["python, adaptive, T 1, batch 1 to 4"]


def test_a_noisy_machine_cannot_tell_two_percent():
    near = cell(8, adaptive=0.97)
    noisy = replace(near, rates=near.rates | {AGAIN: (1.0, 90.0, 100.0, 110.0, 100.0)})
    far = replace(noisy, rates=noisy.rates | {ADAPTIVE: (1.0, 50.0, 50.0, 50.0, 50.0)})
    assert [verdicts(one)["scratchpad, adaptive over plain"] for one in (near, noisy, far)] == [
        False,
        None,
        False,
    ]


def test_plain_decoding_is_a_fixed_arm_too():
    slower = cell(adaptive=0.99, **dict.fromkeys(FIXED, 0.9))
    assert slower.best_fixed == OFF
    assert slower.over_best.middle == pytest.approx(0.99)
    faster = cell(adaptive=1.5, **{"suffix:8": 2.0})
    assert faster.best_fixed == "suffix:8"
    assert faster.over_best.middle == pytest.approx(0.75)
    assert faster.first(ADAPTIVE) == 9.0


def test_what_cannot_be_a_batch_or_a_temperature_is_refused(capsys):
    for words in (["--batches", "0"], ["--batches", "1,x"], ["--temperatures", "-1"]):
        with pytest.raises(SystemExit):
            rollout.main(words)
        assert "invalid" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_prints_tables_and_bars_and_keeps_all_numbers(tmp_path, capsys):
    file, threads = tmp_path / "found.json", torch.get_num_threads()
    try:
        rollout.main(["--quick", "--root", str(tmp_path / "policies"), "--json", str(file)])
    finally:
        torch.set_num_threads(threads)
    text, end = capsys.readouterr().out, json.loads(file.read_text())["reports"][-1]
    found = end["figures"]
    assert [(one["task"], one["temperature"], one["rows"]) for one in found["cells"]] == [
        ("scratchpad", 1.0, 1),
        ("scratchpad", 1.0, 4),
    ]
    assert all(one["same"]["differences"] == 0 for one in found["cells"])
    assert len(found["drains"]) == 2
    for bar in end["bars"]:
        assert bar["text"] in text.replace("\n", " ")
    assert "PASS" not in text
    assert "MISS" not in text
