"""Tests that the benchmark of steps deals, compares and judges as it says. No test asserts a timing."""

from dataclasses import replace

import pytest
import torch
from benchmarks import rl_speed
from benchmarks.idle import Harvest, Ratio
from benchmarks.policies import Policy
from benchmarks.rl_speed import NODES, WAYS, Done, Size, Spent, Step, Waited, World, deal, node_of, rewarded
from benchmarks.rollout import Same

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.sampling import Rollout

SIZE = Size(
    policy=Policy(size="quick", minutes=0.02),
    groups=3,
    samples=2,
    max_tokens=96,
    practice=2,
    learned_s=0.1,
    steps=1,
)
SURE = Ratio(1.0, 0.99, 1.01, 1.1, 60)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step(plain_s=3.0, speculating_s=1.5, lengths=(10, 10, 80), **others):
    """Return a step in which node 1 takes half as long as node 0."""
    facts = {"same": Same(100), "solved": 0.5, "trained": 0.5, **others}
    ways = {
        way: Done((Spent(s, 0.0, 0.5), Spent(s / 2, 0.0, 0.5)), 2.0, {"off": 3})
        for way, s in zip(WAYS, (plain_s, speculating_s), strict=True)
    }
    return Step(seed=0, number=1, ways=ways, lengths=lengths, **facts)


def test_nodes_steps_and_seeds_have_prompts_and_keys_of_their_own():
    dealt = [deal(SIZE, seed, number, node) for seed in (0, 1) for number in (0, 1) for node in range(NODES)]
    prompts = [one for part in dealt for one in part]
    assert len({(one.rollout, one.sample) for one in prompts}) == len(prompts) == 8 * 6
    assert len({one.tokens for one in prompts}) > 20
    for part, node in zip(dealt, [0, 1] * 4, strict=True):
        assert [one.group for one in part] == sorted(2 * [one.group for one in part[::2]])
        assert {node_of(SIZE, Rollout(one)) for one in part} == {node}
        assert all(len(one.tokens) + one.sampling.max_new_tokens == SIZE.max_tokens for one in part)
    assert deal(SIZE, 1, 1, 1) == dealt[-1]


@pytest.mark.parametrize(("text", "expected"), [("7\n=12\n", 1.0), ("=12", 1.0), ("=21\n", 0.0), ("", 0.0)])
def test_a_sample_is_solved_if_its_last_line_is_right(text, expected):
    prompt = replace(deal(SIZE, 0, 0, 0)[0], tokens=tuple(map(int, ByteTokenizer().encode("add 5+7\n"))))
    tokens = [*map(int, ByteTokenizer().encode(text)), ByteTokenizer().eos_id]
    assert rewarded(Rollout(prompt, tokens)) == expected


def test_a_step_takes_as_long_as_its_slowest_node_and_the_other_waits_for_it():
    one = step(3.0, 1.5)
    assert one.ways["plain"].seconds == 3.5
    assert one.ways["plain"].waits_s == (0.0, 1.5)
    assert one.speedup == 3.5 / 2.0
    assert one.rollout_speedup == 2.0
    told = rl_speed.steps_report([rl_speed.Seed((one,), 1.0, 1.0)], replace(rl_speed.FULL, size=SIZE))
    assert told.rows[0][3:7] == ("64.3 %", "0.0 %", "14.3 %", "21.4 %")
    assert told.rows[1][1:3] == ("2.00", "0.57 [0.57, 0.57]")


@pytest.mark.parametrize(
    ("wrong", "shared", "missed"),
    [
        ({}, 1.0, []),
        ({"speculating_s": 2.0}, 1.0, ["step"]),
        ({"lengths": (10, 10, 50)}, 1.0, ["lengths"]),
        ({"same": Same(100, 2, 1)}, 1.0, ["100 tokens equal, 2 near ties of fp32 apart; other differences"]),
        ({}, 0.94, ["acceptance without own training / with"]),
    ],
)
def test_a_bar_that_is_missed_is_said_so_and_no_other(wrong, shared, missed):
    seed = rl_speed.Seed((step(**wrong),), 1.0, shared)
    told = rl_speed.steps_report([seed], replace(rl_speed.FULL, size=SIZE))
    assert [bar.text.partition(":")[0] for bar in told.bars if bar.passed is False] == missed
    quick = rl_speed.steps_report([seed], replace(rl_speed.QUICK, size=SIZE))
    assert [bar.passed for bar in quick.bars if "tokens equal" not in bar.text] == [None] * 4


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({}, [True, True, True]),
        ({"used_s": 0.84}, [False, True, True]),
        ({"drafter": replace(SURE, middle=1.02)}, [True, True, False]),
        ({"control": replace(SURE, low=1.01)}, [True, False, None]),
        ({"same": replace(SURE, high=1.2)}, [True, True, None]),
        ({"drafter": replace(SURE, num_pairs=10)}, [True, True, None]),
    ],
)
def test_the_cost_of_a_trainer_is_told_only_where_its_harm_could_be_seen(wrong, expected):
    ratios = {"same": SURE, "drafter": SURE, "control": replace(SURE, middle=1.3, low=1.2)}
    ratios |= {name: ratio for name, ratio in wrong.items() if name in ratios}
    seen = Waited((Harvest(1.0, wrong.get("used_s", 0.9), 0.0, 0.0),) * 3, ratios)
    assert [bar.passed for bar in rl_speed.waits_report(seen, rl_speed.FULL).bars] == expected
    assert {bar.passed for bar in rl_speed.waits_report(seen, rl_speed.QUICK).bars} == {None}


@pytest.mark.slow
def test_steps_are_equal_in_both_ways_and_the_trainer_has_what_the_waits_gave(tmp_path, one_thread):
    said = []
    plan = replace(rl_speed.QUICK, size=SIZE, root=tmp_path, drafter=tmp_path / "drafter.safetensors")
    drafter = rl_speed.drafter_of(plan, said.append)
    assert any(value.count_nonzero() for value in drafter.values())
    assert said[-1].startswith("drafter: ")
    again = rl_speed.drafter_of(plan, pytest.fail)  # read, not trained
    assert all(torch.equal(again[name], value) for name, value in drafter.items())
    said.clear()
    seed = rl_speed.run(plan, 0, drafter, said.append)
    (measured,) = seed.steps
    assert measured.number == SIZE.warm + 1  # the first is not measured
    assert measured.same.tokens == sum(measured.lengths) > 0
    assert measured.same.differences == 0
    assert len(measured.lengths) == NODES * SIZE.groups * SIZE.samples
    for way in WAYS:
        assert all(node.rollouts_s > 0 and node.training_s > 0 for node in measured.ways[way].nodes)
        assert 0.0 in measured.ways[way].waits_s
    assert len(said) == 1


def test_the_node_that_trains_none_takes_a_shared_drafter_while_it_generates(tmp_path, one_thread):
    """One sample in eight is held out, and one too short to compare drafters on decides nothing."""
    with World(SIZE, 0, tmp_path) as world:
        before = world.other.status()["adopted"]
        for _ in range(20):
            world.other.take_shared({name: t.clone() for name, t in world.other.tensors().items()})
            world.step(("speculating",))
            if world.other.status()["adopted"] > before:
                return
    pytest.fail("no step compared the shared drafter with the one in use")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_prints_both_tables(tmp_path):
    small = replace(rl_speed.QUICK, size=SIZE, root=tmp_path)
    steps, waits = rl_speed.measure(small, print)
    assert [row[0] for row in steps.rows] == list(WAYS)
    assert len(waits.rows) == 5
    assert set(waits.figures["ratios"]) == {"same", "drafter", "control"}
