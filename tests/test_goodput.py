"""Tests the chooser of the arm with the best goodput, on a simulated engine with its own clock."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit import arms
from kit.arms import World, draft_s, verify_s

from aedit.spec_rollout.choose import EngineView, Fixed, Goodput, StepObservation, score_bins
from aedit.spec_rollout.choose.goodput import PLAIN_STEPS, best_arm, ranked_nodes
from aedit.spec_rollout.choose.table import Acceptance, PathChances
from aedit.spec_rollout.drafters import OFF, Draft, parse_arm

ARMS = tuple(map(parse_arm, ("layer:1", "layer:2", "layer:4", "layer:8", "suffix:2", "suffix:4", "suffix:8")))
GOOD, MIDDLING, USELESS = {"layer": 0.85, "suffix": 0.3}, {"layer": 0.6, "suffix": 0.5}, {"layer": 0.02}


def always(agree):
    return {by: (lambda step, share=share: share) for by, share in agree.items()}


def world(agree, *, seed=0, noise=0.02):
    return World(always({"layer": 0.0, "suffix": 0.02, **agree}), seed=seed, noise=noise)


def plain(rows, steps):
    """Return the tokens per second of plain decoding."""
    times = [verify_s(rows, 0, rows * (64 + (2 * i) % 448)) for i in range(steps)]
    return rows * steps / sum(times)


class Listening:
    """Chooser that records the arms it chose; its calls take a share of each step."""

    def __init__(self, chooser, share=0.0):
        self.chooser, self.arms, self.share = chooser, [], share

    def choose(self, view):
        self.arms.append(self.chooser.choose(view))
        return self.arms[-1]

    def trim(self, *args):
        return self.chooser.trim(*args)

    def learn(self, observed):
        more_s = self.share * observed.total_s
        self.chooser.learn(replace(observed, learning_s=observed.learning_s + more_s))


@pytest.mark.parametrize(
    ("agree", "rows", "good"),
    [
        (GOOD, 16, ("layer:4", "layer:2")),
        (GOOD, 1, ("layer:8", "layer:4")),
        (MIDDLING, 4, ("layer:2", "suffix:4", "suffix:2")),
        ({"layer": 0.3, "suffix": 0.8}, 1, ("suffix:8",)),
    ],
)
def test_it_soon_does_as_well_as_the_best_fixed_arm_in_hindsight(agree, rows, good):
    def then(chooser):
        here = world(agree)
        here.run(chooser, rows, 150)
        return here.run(chooser, rows, 150 if rows > 1 else 500)

    best = max(then(Fixed.of(arm)) for arm in good)
    assert then(Goodput(ARMS)) >= 0.95 * best
    assert best > 1.2 * then(Fixed.of("off"))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rows", [4, 8, 16])
def test_what_the_first_pass_of_a_size_takes_once_is_not_what_its_arm_costs(rows, seed):
    """oneDNN prepares products of each number of tokens: in a model of 0.3 M, nine steps for one arm."""

    def then(chooser):
        here = World(always({"suffix": 0.8}), noise=0.02, seed=seed, once_s=9 * verify_s(rows, 0, 64 * rows))
        here.run(chooser, rows, 300)
        return here.run(chooser, rows, 300)

    best = max(then(Fixed.of(arm)) for arm in ("suffix:2", "suffix:4", "suffix:8"))
    assert best > 1.3 * plain(rows, 300)
    assert then(Goodput(ARMS[4:])) >= 0.9 * best


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("late", [60, 400])
def test_an_arm_that_was_useless_at_first_is_found_soon_after_it_is_useful(rows, late):
    """Text that begins to repeat itself: of 64 rows, once some were seen, it took 18,000 steps."""
    for seed in range(3):
        here, chooser = (
            World({"suffix": lambda step: 0.9 * (step >= late)}, seed=seed, noise=0.02),
            Goodput.of("suffix:2", "suffix:4", "suffix:8"),
        )
        here.run(chooser, rows, late)
        assert chooser.arm.is_off
        here.run(chooser, rows, 256)
        assert not chooser.arm.is_off, seed


@pytest.mark.parametrize(("rows", "seed", "slow", "steps"), [(8, 0, 3, 60), (64, 2, 2, 400)])
def test_an_arm_whose_first_steps_were_slow_is_found_all_the_same(monkeypatch, rows, seed, slow, steps):
    """A neighbour on the machine, for example. It took 15,000 steps, or more than 20,000."""
    here = World({"suffix": lambda step: 0.9}, seed=seed, noise=0.02)
    chooser = Goodput.of("suffix:2", "suffix:4", "suffix:8")
    with monkeypatch.context() as then:
        factors = {0: 1}
        then.setattr(
            arms, "verify_s", lambda rows, nodes, at: factors.get(nodes, slow) * verify_s(rows, nodes, at)
        )
        here.run(chooser, rows, steps)
    here.run(chooser, rows, 400)
    assert not chooser.arm.is_off


@pytest.mark.parametrize("rows", [1, 16])
def test_with_useless_drafters_it_is_as_fast_as_plain_decoding(rows):
    chooser = Listening(Goodput(ARMS))
    assert world(USELESS, noise=0.0).run(chooser, rows, 600) >= 0.98 * plain(rows, 600)
    assert Counter(chooser.arms)[OFF] >= 0.9 * 600


def test_a_new_engine_decodes_plainly_first_and_then_tries_for_a_few_steps():
    chooser = Listening(Goodput(ARMS))
    world(GOOD).run(chooser, 4, PLAIN_STEPS + 1)
    assert chooser.arms[:PLAIN_STEPS] == [OFF] * PLAIN_STEPS
    assert chooser.arms[PLAIN_STEPS] != OFF


def test_a_drafter_that_is_replaced_is_found_out_within_100_steps():
    """The drafter is bad for 200 steps, good for 200, then bad again: both directions are tested.

    Plain decoding is timed beside a good one, for six steps each time, and how often differs between worlds.
    """
    in_use = []
    for seed in range(8):
        here = World(
            {"layer": lambda step: 0.85 if 200 <= step < 400 else 0.02},
            noise=0.02,
            seed=seed,
            versions=lambda step: {"layer": step // 200},
        )
        chooser = Listening(Goodput(ARMS[:4]))
        here.run(chooser, 4, 600)
        off = [arm.is_off for arm in chooser.arms]
        assert sum(off[100:200]) >= 85
        in_use.append(sum(off[300:400]))
        assert sum(off[500:600]) >= 85
    assert np.mean(in_use) <= 10


@pytest.mark.parametrize(("rows", "choosing"), [(16, 0.0), (16, 0.05), (1, 0.0), (1, 0.05)])
def test_a_drafter_that_becomes_worse_without_a_word_is_dropped(rows, choosing):
    """Where steps are short, the calls of the chooser alone may take more than its share of the time."""
    here = World({"layer": lambda step: 0.85 if step < 200 else 0.0}, noise=0.02)
    chooser = Listening(Goodput(ARMS[:4]), choosing)
    here.run(chooser, rows, 700)
    off = [arm.is_off for arm in chooser.arms]
    assert sum(off[100:200]) <= 20, "plain decoding is timed beside it now and then"
    assert sum(off[600:700]) >= 85


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("until", [700, 1100])
def test_a_drafter_that_has_gained_is_tried_again_soon_whatever_the_budget(rows, until):
    """Found: after some text that did not repeat itself, plain decoding went on for 1,500 steps."""
    spent_s = {"auto": 0.0, "off": 0.0}
    for seed in range(8):
        agree = {"suffix": lambda step: 0.02 if 400 <= step < until else 0.95}
        chooser, there = Listening(Goodput(ARMS[-3:])), World(agree, noise=0.05, seed=seed)
        here = World(agree, noise=0.05, seed=seed)
        here.run(chooser, rows, 400)
        there.run(Fixed.of("off"), rows, 400)
        began_s = here.now_s - there.now_s
        here.run(chooser, rows, until - 400)
        there.run(Fixed.of("off"), rows, until - 400)
        spent_s["off"] += there.now_s
        spent_s["auto"] += here.now_s - began_s
        here.run(chooser, rows, 1000)
        off = [arm.is_off for arm in chooser.arms]
        assert off[until:].index(False) <= until - 400 + 70, "after 64 steps, then after twice as many"
    assert spent_s["auto"] < 1.02 * spent_s["off"], "where nothing is accepted it costs hardly anything"


@pytest.mark.parametrize(("used", "gain"), [(100, 90), (100, 36), (100, 7), (501, 300), (900, 1)])
def test_the_next_retry_is_the_first_step_at_which_old_observations_are_dropped(used, gain):
    acceptance = Acceptance()
    acceptance.last_used, acceptance.last_gain = used, gain
    expected = acceptance.next_retry
    found = next(step for step in itertools.count(used) if acceptance.begin_step(0, step, is_off=True))
    assert found == expected


def test_old_text_weighs_little_in_trials_and_no_retry_is_late():
    here = World({"suffix": lambda step: 0.95 if step < 200 else 0.02}, noise=0.05)
    chooser, num_trials = Goodput(ARMS[-3:]), 0
    for _ in range(900):
        seen, drafter = here.play(chooser, 16, 16 * 300), chooser.drafters["suffix"]
        if seen is None or not chooser.arm.is_off or not drafter.last_gain:
            continue
        assert chooser._next_compare <= max(drafter.next_retry, seen.skipped.num_steps + chooser._steps + 1)
        if not seen.arm.is_off:
            num_trials += 1
            assert drafter.num_rows <= 64 + 2 * 16
    assert num_trials >= 3


def test_a_trial_after_other_text_says_more_than_all_before():
    """Found: a trial of 32 rows was outweighed by 700 rows of text that did not repeat itself."""
    before, now, drafts = Acceptance(), Acceptance(), [[16.0, 16.0]] * 2
    for each in (before, now):
        for _ in range(60):
            each.count(ARMS[1], 16, [0.0, 0.0])
    now.doubt()
    for each in (before, now):
        for sums in drafts:
            each.count(ARMS[1], 16, sums)
    assert now.num_rows < 100 < before.num_rows
    assert before.expected(ARMS[1]) < 1.2
    assert now.expected(ARMS[1]) > 1.4


def walk(seed):
    """Return a pace that changes by a tenth with each step, between about a half and twice the usual one."""
    draw, at, paces = random.Random(seed), 0.0, []
    for _ in range(1200):
        paces.append(math.exp(at))
        at += 0.1 * draw.gauss(0, 1) - 0.03 * at
    return paces.__getitem__


@pytest.mark.parametrize(
    "pace", [lambda step: 2.0 if step < 200 else 1.0, lambda step: 1.0 + (step // 50) % 2, walk(1), walk(2)]
)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("agree", "least"), [(0.02, 0.95), (0.2, 0.95), (0.85, 1.8)])
def test_a_machine_that_others_use_does_not_lead_it_astray(pace, rows, agree, least):
    """The oracle is plain decoding at the same pace, step by step."""
    here, chooser = World(always({"suffix": agree}), noise=0.02, pace=pace), Goodput(ARMS[4:])
    here.run(chooser, rows, 150)
    began_s, plain_s = here.now_s, here.plain_s
    here.run(chooser, rows, 700)
    assert here.plain_s - plain_s >= least * (here.now_s - began_s)


def drained(chooser, here):
    """Return tokens per second from 64 rows down to 1.

    Each number of rows has the same share of the tokens, however many steps those take.
    """
    phases = ((64, 30), (32, 30), (12, 40), (4, 60), (2, 60), (1, 120))
    seconds = [rows * steps / here.run(chooser, rows, steps) for rows, steps in phases]
    return sum(rows * steps for rows, steps in phases) / sum(seconds)


def test_its_second_drain_is_as_good_as_with_any_one_arm_and_far_better_than_plain():
    """The mean of four worlds: in one, a trial at a bad moment costs two percent."""

    def second_drains(make):
        worlds = [(make(), world(GOOD, seed=seed)) for seed in range(4)]
        for chooser, here in worlds:
            drained(chooser, here)
        return np.array([drained(chooser, here) for chooser, here in worlds])

    found = second_drains(lambda: Goodput(ARMS))
    for arm, least in (("off", 1.4), ("layer:2", 1.05), ("layer:4", 0.98), ("layer:8", 0.98)):
        assert (found / second_drains(lambda arm=arm: Fixed.of(arm))).mean() >= least, arm


def test_a_log_replays_it_and_ranks_that_are_told_the_same_choose_the_same():
    first, here, seen = Goodput(ARMS), world(MIDDLING, noise=0.1), []
    for i in range(250):
        rows = (1, 4, 16)[i // 90]
        seen.append(here.play(first, rows, 100 * rows))
    seen = [observed for observed in seen if observed is not None]
    again = Goodput(ARMS)
    for observed in seen:
        assert again.choose(observed.view) == observed.arm
        if observed.draft is not None:
            kept = again.trim(observed.view, observed.arm, observed.draft)
            assert np.broadcast_to(kept, observed.view.rows).tolist() == observed.verified_B
        again.learn(observed)


def test_what_trying_may_cost_is_bounded():
    chooser, here = Goodput(ARMS), world(USELESS)
    here.run(chooser, 1, 400)
    assert chooser.exploration_budget_s <= 0.01 * here.now_s + 3 * 3.2e-3
    assert chooser.exploration_budget_s >= -8 * 3.2e-3


class Ending(Goodput):
    """Chooser of an engine whose samples end after each token, so that further accepted tokens are cut."""

    def learn(self, observed):
        super().learn(replace(observed, emitted=observed.view.rows))


def test_an_arm_that_does_not_bring_what_is_expected_of_it_is_refused():
    chooser = Listening(Ending(ARMS[:4]))
    here = world(GOOD)
    here.run(chooser, 4, 100)
    assert Counter(chooser.arms[:60])[OFF] < 40, "much is expected"
    chooser.arms.clear()
    here.run(chooser, 4, 600)
    assert Counter(chooser.arms[200:])[OFF] >= 0.85 * 400


def test_without_a_drafter_it_is_off():
    chooser = Goodput(ARMS)
    here = World(always(GOOD), versions=lambda step: {})
    listening = Listening(chooser)
    here.run(listening, 1, 60)
    assert set(listening.arms) == {OFF}


def drafted(scores, **more):
    scores = torch.tensor(scores)
    return Draft(torch.zeros(scores.shape, dtype=torch.int64), None, None, scores, **more)


def test_nodes_that_do_not_pay_are_not_verified_unless_they_were_drawn_to_be_rejected():
    chooser, here = Goodput(ARMS), world(GOOD)
    here.run(chooser, 16, 120)
    while chooser._trial is not None:
        here.run(chooser, 16, 1)
    view, arm = EngineView(16, 1600, {"layer": 0, "suffix": 0}), parse_arm("layer:8")
    surely = drafted([[-0.01 * n for n in range(1, 9)]] * 16)
    hardly = drafted([[-0.01] + [-9.0 - n for n in range(7)]] * 16)
    never = drafted([[-9.0 - n for n in range(8)]] * 16)
    assert min(chooser.trim(view, arm, surely)) >= 6
    assert set(chooser.trim(view, arm, hardly)) <= {1, 2}
    assert not any(chooser.trim(view, arm, never))
    mixed = drafted([surely.scores_BN[0].tolist(), hardly.scores_BN[0].tolist()] * 8)
    kept = chooser.trim(view, arm, mixed)
    assert min(kept[::2]) >= 6
    assert max(kept[1::2]) <= 2, "rows share the nodes that pay"
    drawn = drafted([[-9.0 - n for n in range(8)]] * 16, logq_BNV=torch.zeros(16, 8, 4))
    assert chooser.trim(view, arm, drawn) == 8


def test_the_best_nodes_of_all_rows_are_the_ones_with_most_expected_tokens():
    """The oracle goes through all numbers of nodes of three rows."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        chances = np.sort(rng.random((3, 4)) * (rng.random((3, 4)) > 0.2), axis=1)[:, ::-1]
        ranking, gains = ranked_nodes(chances)
        best = [0.0] * 13
        for counts in itertools.product(range(5), repeat=3):
            expected = sum(chances[row, :count].sum() for row, count in enumerate(counts))
            best[sum(counts)] = max(best[sum(counts)], expected)
        assert gains == pytest.approx(best[: len(gains)])
        assert gains[-1] == pytest.approx(chances.sum())
        for n in range(len(ranking) + 1):
            counts = np.bincount(ranking[:n], minlength=3)
            expected = sum(chances[row, :count].sum() for row, count in enumerate(counts))
            assert expected == pytest.approx(gains[n])


def test_a_node_is_never_ranked_above_its_parent():
    ranking, gains = ranked_nodes(np.array([[0.2, 0.9], [0.5, 0.4]]))
    assert ranking.tolist() == [1, 1, 0, 0]
    assert gains == pytest.approx([0.0, 0.5, 0.9, 1.1, 2.0])


def enumerated(values, current):
    """Return the arm that the rules name, by going through all arms one by one."""
    if current != OFF and values[OFF] * 1.01 > values[current]:
        current = OFF
    found = current
    for arm in values:
        beats_all_before = values[arm] > values[found] if found != current else True
        if values[arm] > 1.03 * values[current] and beats_all_before:
            found = arm
    return found


def test_the_choice_is_that_of_an_enumeration_ties_included():
    draw, arms = random.Random(0), (OFF, *ARMS)
    for _ in range(3000):
        values = {arm: draw.choice((99.5, 100.0, 101.5, 103.0, 103.5, 110.0)) for arm in arms}
        current = draw.choice(arms)
        assert best_arm(values, current) == enumerated(values, current), (values, current)


class Whole(Listening):
    """Chooser that verifies whole drafts, so that the worth of an arm can be enumerated."""

    def trim(self, view, arm, draft):
        return draft.tokens_BN.shape[1]


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("agree", [GOOD, MIDDLING, USELESS])
def test_the_arm_in_use_has_the_most_tokens_per_true_second(rows, agree):
    """The oracle knows the costs and how often drafts are accepted, and goes through all arms."""
    chooser, here = Whole(Goodput(ARMS)), world(agree)
    here.run(chooser, rows, 400)
    context = rows * 256

    def true_rate(arm):
        share = {"layer": 0.0, "suffix": 0.02, "none": 0.0, **agree}[arm.drafter]
        tokens = rows * sum(share**j for j in range(arm.depth + 1))
        return tokens / (verify_s(rows, arm.nodes, context) + draft_s(arm, rows, 0))

    best = max(map(true_rate, (OFF, *ARMS)))
    chosen = Counter(chooser.arms[-100:]).most_common(1)[0][0]
    assert true_rate(chosen) >= 0.9 * best, (chosen, true_rate(chosen), best)
    if best == true_rate(OFF):
        assert chosen == OFF


def test_the_bound_is_the_gain_of_perfect_acceptance_at_the_rows_that_occur():
    """The oracle is the table of the simulated engine; drafts are never accepted here."""
    chooser, here = Goodput(ARMS[4:]), world(USELESS, noise=0.0)
    assert chooser.bounds() == {"suffix": math.inf}, "nothing is measured"
    here.run(chooser, 16, 2000)
    found = chooser.bounds()["suffix"]

    def perfect(arm):
        seconds = verify_s(16, arm.nodes, 16 * 256) + draft_s(arm, 16, 0)
        return (1 + arm.depth) * verify_s(16, 0, 16 * 256) / seconds

    assert found == pytest.approx(max(map(perfect, ARMS[4:])), rel=0.15) or found == math.inf


def test_where_perfect_acceptance_gains_nothing_the_bound_says_so():
    chooser, view = Goodput.of("suffix:2", "suffix:4"), EngineView(64, 64 * 100, {"suffix": 0})
    for arm, seconds in (("off", 1e-3), ("suffix:2", 3e-3), ("suffix:4", 5e-3)):
        played = parse_arm(arm)
        for _ in range(20):
            chooser.learn(StepObservation(view, played, 64, seconds, 0.0, played.nodes))
    assert chooser.bounds()["suffix"] <= 1.02
    assert chooser.busiest_rows == 64


def test_choosing_is_limited_to_a_share_of_the_time_where_steps_are_short():
    """Each call of `learn` is said to take a fifth of a step; then most steps must not be learned from."""

    class Slow(Listening):
        def learn(self, observed):
            self.learned = len(counted)
            super().learn(replace(observed, learning_s=0.2 * observed.total_s * (self.last > 0)))
            self.last = len(counted) - self.learned

    chooser, here, counted = Slow(Goodput(ARMS)), world(GOOD), []
    chooser.last = 0
    for name in ("_learn_draft", "_learn_time", "_compare"):
        call = getattr(chooser.chooser, name)
        setattr(chooser.chooser, name, lambda *given, call=call: (counted.append(1), call(*given))[1])
    here.run(chooser, 4, 200)
    counted.clear()
    here.run(chooser, 4, 600)
    assert len(counted) <= 0.35 * 600
    assert Counter(chooser.arms[-200:])[OFF] <= 40, "the choice is still good"


def test_arms_without_one_to_choose_are_refused():
    with pytest.raises(ValueError, match="arms"):
        Goodput([OFF])


def test_plain_decoding_is_timed_again_and_again():
    chooser = Listening(Goodput(ARMS))
    world(GOOD).run(chooser, 4, 2600)
    for first in range(100, 2600, 625):
        assert 4 <= chooser.arms[first : first + 625].count(OFF) <= 20


def test_what_plain_decoding_takes_is_not_told_by_steps_right_after_drafted_ones():
    """After wide multiplications a processor is slower for a while; among plain steps it is not."""
    here, chooser = World(always(GOOD), noise=0.02, lame=0.5), Listening(Goodput(ARMS[:4]))
    here.run(chooser, 1, 1500)
    assert chooser.arms[100:].count(OFF) >= 12
    told = chooser.chooser.value(EngineView(1, 256, {"layer": 0, "suffix": 0}), OFF)
    assert told / chooser.chooser.cost.slowdown == pytest.approx(1 / verify_s(1, 0, 256), rel=0.08)


@pytest.mark.parametrize(("played", "worth", "then"), [(ARMS[0], 1.005, OFF), (ARMS[0], 1.02, ARMS[0])])
def test_an_arm_that_is_hardly_better_than_plain_decoding_is_not_kept(monkeypatch, played, worth, then):
    chooser, here = Goodput(ARMS[:1]), world({})
    here.run(chooser, 1, PLAIN_STEPS)
    chooser.arm = played
    worths = {OFF: (100.0, 1.0), ARMS[0]: (100 * worth, 1.0)}
    monkeypatch.setattr(chooser, "_predict", lambda view, arm: worths[arm])
    chooser.choose(EngineView(1, 64, {"layer": 0}))
    assert chooser.arm == then


def test_a_drafter_that_rests_falls_behind_by_what_is_said():
    chooser, here = Goodput(ARMS), world(GOOD)
    here.run(chooser, 4, 100)
    plain_step = observed(OFF, emitted=4)
    for _ in range(10):
        chooser.learn(plain_step)
    before = chooser.drafters["layer"].missing_tokens
    chooser.learn(plain_step)
    assert chooser.drafters["layer"].missing_tokens == before + 4
    chooser.learn(replace(plain_step, arm=ARMS[0], nodes=1, draft=chain(1), accepted_B=[1] * 4))
    assert chooser.drafters["layer"].missing_tokens == 0


def test_nodes_that_were_cut_do_not_count_as_refused():
    """Otherwise an arm whose drafts are cut would seem worse, and be cut even more."""
    arm, whole, cut = parse_arm("layer:4"), Acceptance(), Acceptance()
    bins = score_bins(chain(4))
    for step in range(64):
        whole.learn(arm, bins, [4] * 4, [4] * 4)
        kept = [1, 2, 0, 4] if step % 2 else [4] * 4
        cut.learn(arm, bins, kept, kept)
    assert cut.expected(arm) > 0.9 * whole.expected(arm) > 4


def chain(depth):
    """Return a draft for four rows; the drafter is nearly sure of each node."""
    scores = torch.full((4, depth), 0.97).log().cumsum(1)
    return Draft(torch.zeros(4, depth, dtype=torch.int64), None, None, scores)


def observed(arm, *, emitted, nodes=0, draft=None, accepted_B=(0, 0, 0, 0)):
    view = EngineView(4, 256, {"layer": 0, "suffix": 0})
    return StepObservation(
        view=view,
        arm=arm,
        emitted=emitted,
        total_s=5e-3,
        draft_s=0.0 if arm.is_off else 1e-3,
        nodes=nodes,
        draft=draft,
        accepted_B=accepted_B,
        path_Bm=None,
    )


def test_where_nothing_is_gained_hardly_anything_is_learned(monkeypatch):
    """At a batch of one a step takes 3 ms, so the computation in each must be negligible."""
    chooser, here, timed, compared = Goodput(ARMS[:4]), world(USELESS), [], []
    here.run(chooser, 1, 400)
    learn, compare = chooser.cost.learn, chooser._compare
    monkeypatch.setattr(chooser.cost, "learn", lambda *seen: (timed.append(1), learn(*seen))[1])
    monkeypatch.setattr(
        chooser, "_compare", lambda view, *more: (compared.append(1), compare(view, *more))[1]
    )
    here.run(chooser, 1, 400)
    assert 25 <= len(timed) <= 100
    assert 3 <= len(compared) <= 20


def test_where_plain_decoding_is_settled_it_is_asked_in_one_of_eight_steps_and_misses_none():
    chooser, here, asked = Goodput(ARMS[:4]), world(USELESS), []
    for step in range(1600):
        if here.play(chooser, 4, 400) is not None:
            asked.append(step)
    assert len([step for step in asked if step >= 1200]) <= 400 / 8 + 12 * len(ARMS[:4])
    assert chooser._steps + here.skipped.num_steps == 1600
    spent_s = sum(s for s, _ in chooser._spent.values()) + here.skipped.total_s
    assert spent_s == pytest.approx(here.now_s)


def test_where_steps_are_too_short_to_learn_from_each_the_arm_goes_on_without_a_question():
    """As choosing takes a fifth of a step here, and may take a hundredth: one step of twenty is asked."""
    chooser, here, asked = Goodput(ARMS), world(GOOD), []
    learn = chooser.learn
    chooser.learn = lambda seen: learn(replace(seen, learning_s=0.2 * seen.total_s))
    arms = Counter()
    for step in range(1600):
        seen = here.play(chooser, 4, 400)
        if seen is not None:
            asked.append(step)
            arms[seen.arm] += 1
            if seen.skipped.num_steps and not seen.arm.is_off and chooser._trial is None:
                assert set(seen.verified_B) == {seen.arm.nodes}, "one draft of twenty is not worth a trim"
        else:
            arms[here.skipped.arm] += 1
    assert sum(count for arm, count in arms.items() if not arm.is_off) > 1200
    assert 1200 / 32 <= len([step for step in asked if step >= 400]) <= 1200 / 8
    assert chooser._steps + here.skipped.num_steps == 1600
    played = Counter()
    for (_, arm), stats in chooser._stats.items():
        played[arm] += stats.num_played
    played[here.skipped.arm] += here.skipped.num_steps
    assert played == arms
    spent_s = sum(s for s, _ in chooser._spent.values()) + here.skipped.total_s
    assert spent_s == pytest.approx(here.now_s)


@pytest.mark.parametrize(("since", "budget"), [(1, 1.0), (1023, 1.0), (1024, 1 / 3)])
def test_long_after_the_last_gain_less_is_spent_on_choosing(since, budget):
    chooser, view = Goodput(ARMS[4:]), EngineView(1, 100, {"suffix": 0})
    for _ in range(since - 1):
        chooser.learn(StepObservation(view, OFF, 1, 1.0))
    before = chooser.exploration_budget_s
    chooser.learn(StepObservation(view, OFF, 1, 1.0))
    assert chooser.exploration_budget_s - before == pytest.approx(0.005 * budget)


def test_new_weights_of_a_drafter_bring_the_whole_budget_back():
    chooser = Goodput(ARMS[:4])
    for step in range(1500):
        view = EngineView(1, 100, {"layer": 0 if step < 1400 else 1})
        chooser.exploration_budget_s = -1.0  # no trial
        chooser.choose(view)
        chooser.learn(StepObservation(view, OFF, 1, 1.0))
    before = chooser.exploration_budget_s
    chooser.learn(StepObservation(view, OFF, 1, 1.0))
    assert chooser.exploration_budget_s - before == pytest.approx(0.005)


def test_arms_are_compared_at_once_when_rows_or_drafters_are_others(monkeypatch):
    chooser, compared = Goodput(ARMS[:4]), []
    world(USELESS).run(chooser, 1, 300)
    compare = chooser._compare
    monkeypatch.setattr(
        chooser, "_compare", lambda view, *more: (compared.append(view), compare(view, *more))[1]
    )
    versions = {"layer": 0, "suffix": 0}
    chooser.exploration_budget_s = -1.0
    chooser.choose(EngineView(1, 100, versions))
    compared.clear()
    changed = [
        EngineView(2, 200, versions),
        EngineView(1, 100, versions),
        EngineView(1, 100, {**versions, "layer": 1}),
    ]
    for view in changed:
        chooser.exploration_budget_s = -1.0  # no trial
        chooser.choose(view)
        chooser.choose(view)
    assert compared == changed


def test_the_error_of_expected_tokens_is_that_of_a_simulation():
    """The oracle draws as many rows again and again, and estimates from each."""
    draw, arm, rows, share = np.random.default_rng(0), parse_arm("suffix:4"), 200, 0.6
    survived = (draw.random((2000, rows, 4)) < share).cumprod(axis=2)
    lengths = 1 + survived.sum(axis=2)
    expected = lengths.mean(axis=1).std() / lengths.mean()
    errors = []
    for batch in survived[:50]:
        acceptance = Acceptance()
        acceptance.count(arm, rows, batch.sum(axis=0).tolist())
        errors.append(acceptance.deviation(arm))
    assert np.mean(errors) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("now", "error", "drafts"), [(0, 0.05, 1), (0, 0.2, 0), (1, 0.2, 1)])
def test_plain_decoding_ends_only_for_what_is_surely_better(monkeypatch, now, error, drafts):
    """The drafts are worth a tenth more tokens per second; an arm in use is kept."""
    chooser, arms = Goodput(ARMS[:1]), (OFF, ARMS[0])
    world(GOOD).run(chooser, 1, 100)
    monkeypatch.setattr(Acceptance, "deviation", lambda self, arm: error)
    worths = {OFF: (100.0, 1.0), ARMS[0]: (110.0, 1.0)}
    monkeypatch.setattr(chooser, "_predict", lambda view, arm: worths[arm])
    monkeypatch.setattr(chooser, "_deviation", lambda *_: 0.0)
    chooser.arm = arms[now]
    chooser._compare(EngineView(1, 64, {"layer": 0}))
    assert chooser.arm == arms[drafts]


def test_chances_by_score_forget_in_as_many_steps_as_those_by_position():
    """One row of four nodes is accepted 500 times, and then refused 300 times."""
    chances, nodes, none = PathChances(), [4 * (at == 12) for at in range(16)], [0] * 16
    for accepted, steps in ((nodes, 500), (none, 300)):
        for _ in range(steps):
            chances.learn(nodes, accepted)
    assert chances.table[12] == pytest.approx(math.exp(-300 / 150), abs=0.03)
    every_fourth = PathChances()
    for accepted, steps in ((nodes, 500), (none, 300)):
        for _ in range(steps // 4):
            every_fourth.learn(nodes, accepted, steps=4)
    assert every_fourth.table[12] == pytest.approx(chances.table[12], abs=0.03)


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_are_never_accepted_are_never_in_use_however_the_speed_changes(rows, seed):
    """A step with drafts cannot be shorter than a plain one, though measured times say so now and then."""
    here, chooser = World(always({"suffix": 0.0}), seed=seed, noise=0.2, pace=walk(seed)), Goodput(ARMS[4:])
    for step in range(1000):
        here.play(chooser, rows, rows * (64 + (2 * step) % 448))
        assert chooser.arm == OFF, step


@pytest.mark.parametrize("seed", range(3))
def test_the_outcome_of_drafts_is_counted_as_by_an_array_of_all_nodes(seed):
    """The oracle is one array by rows and nodes: accepted, or the chance where a node was not verified."""
    draw, arm, acceptance = np.random.default_rng(seed), parse_arm("suffix:4"), Acceptance()
    reached, accepted, seen, hits = np.zeros(4), np.zeros(4), np.zeros(17), np.zeros(17)
    for _ in range(60):
        rows, steps = int(draw.integers(1, 6)), int(draw.integers(1, 5))
        bins = draw.integers(0, 17, (rows, 4))
        verified = draw.integers(0, 5, rows)
        length = np.minimum(draw.integers(0, 5, rows), verified)
        chances = acceptance.chances(arm, bins)
        is_verified = np.arange(4) < verified[:, None]
        survived = np.where(is_verified, np.arange(4) < length[:, None], chances)
        found = acceptance.learn(arm, bins, verified.tolist(), length.tolist(), steps=steps)
        assert found == pytest.approx(survived.sum())
        kept = math.exp(-steps * max(1 / 150, rows / 600))
        reached = kept * reached + steps * np.array([rows, *survived.sum(0)[:-1]])
        accepted = kept * accepted + steps * survived.sum(0)
        if (here := np.bincount(bins[is_verified], minlength=17))[:16].any():
            kept = math.exp(-steps * max(here[:16].sum() / 4000, 1 / 150))
            seen = kept * seen + steps * here
            hits = kept * hits + steps * np.bincount(bins[is_verified], survived[is_verified], 17)
    assert acceptance._reached == pytest.approx(reached)
    assert acceptance._accepted == pytest.approx(accepted)
    assert acceptance._chances[OFF].num_observed == pytest.approx(seen[:16])
    assert acceptance._chances[OFF].num_accepted == pytest.approx(hits[:16])
