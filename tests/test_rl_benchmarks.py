"""Tests that the benchmarks of whole RL runs read what runs have written, and judge it. No timing decides."""

from dataclasses import replace

import pytest
from benchmarks import rl, rl_idle
from benchmarks.kit import rl_runs
from benchmarks.kit.cpu_time import Spent
from kit.rl_runs import rl_run

from aedit.launch.config import load
from aedit.launch.records import read_run
from aedit.spec_rollout.sampling import Rollout

GOOD = rl.Outcome(0.4, 0.65, 1000.0, 9000.0, 240.0)


def test_a_run_is_asked_for_as_a_user_would_and_both_ways_take_as_many_steps():
    ways = rl.ways(5, quick=False)
    flags = {name: dict(flag.split("=", 1) for flag in run.flags) for name, run in ways.items()}
    together, alone = flags[rl.TOGETHER], flags[rl.ALONE]
    assert (ways[rl.TOGETHER].nodes, ways[rl.ALONE].nodes) == (2, 1)
    for key in ("--train.steps", "--rl.supervised_steps"):
        assert int(alone[key]) == 2 * int(together[key]) > 0
    assert together["--seed"] == alone["--seed"] == "5"
    assert alone["--local.slowdown"] == "1"
    assert "--local.slowdown" not in together
    assert rl_runs.CONFIG.exists()


def test_what_a_run_reached_is_read_from_its_records(tmp_path, monkeypatch):
    run = read_run(rl_run(tmp_path, num_steps=50))
    monkeypatch.setattr(rl, "run_rl", lambda wanted, directory: run)
    found = rl.outcome(rl.ways(0, quick=True)[rl.TOGETHER], tmp_path)
    assert (found.before, found.after) == pytest.approx((0.25 + 0.5 / 50, 0.75))
    assert found.rollouts == 2 * 32 * 50
    assert found.tokens == 640 * 50 * 1.5
    assert found.seconds == 100.0


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"train\.nothing"):
        rl_runs.run_rl(rl_runs.RLRun(nodes=1, flags=("--train.nothing=1",)), tmp_path)


@pytest.mark.parametrize(
    ("together", "alone", "expected"),
    [
        ({}, {}, [True, True, True]),
        ({"after": 0.59}, {"after": 0.6}, [False, True, True]),
        ({}, {"after": 0.69}, [True, False, True]),
        ({"seconds": 361.0}, {"seconds": 900.0}, [True, True, False]),
    ],
)
def test_the_worst_seed_decides_about_the_gain(together, alone, expected):
    found = {rl.TOGETHER: [GOOD, replace(GOOD, **together)], rl.ALONE: [replace(GOOD, **alone)] * 2}
    if not together:
        found[rl.TOGETHER] = [GOOD, GOOD]
    told = rl.report(found, quick=False)
    assert [bar.passed for bar in told.bars] == expected
    assert {bar.passed for bar in rl.report(found, quick=True).bars} == {None}
    assert told.rows[1][1] == "40.0 +- 0.0 %"


def test_waits_are_per_step_from_the_first_rollouts_on(tmp_path):
    run = read_run(rl_run(tmp_path, num_steps=20))
    one = rl_idle.waiting("a hub", run.nodes[1], 2.0)
    assert one.steps == 19
    assert (one.step_s, one.rollout_s, one.train_s) == pytest.approx((2.0, 1.0, 0.4))
    assert one.idle_s == pytest.approx(
        {"hub": 0.3, "round": 0, "longest sample": 0.1, "rollouts": 0, "rank": 0, "rewards": 0.1}
    )
    assert one.used_s == pytest.approx(0.3)
    (row,) = rl_idle.report([one]).rows
    assert row[:6] == ("a hub", "1", "2", "2000", "1000", "400")
    assert row[6:] == ("300", "0", "100", "0", "0", "100", "25.0 %", "300")


def test_each_mode_is_a_configuration_that_runs(tmp_path):
    configs = {}
    for mode in rl_idle.MODES:
        file = rl_runs.CONFIG if mode.hub else rl_idle.without_hub(tmp_path)
        configs[mode.name] = load(file, list(mode.flags), strict=True).config
    quorums = [config.hub.quorum if config.hub.address else None for config in configs.values()]
    assert quorums == [1, "all", None, 1, 1, None, None]
    assert [config.local.ranks for config in configs.values()] == [1, 1, 1, 2, 1, 1, 1]
    assert [config.rl.workers for config in configs.values()] == [0, 0, 0, 0, 1, 0, 0]
    assert [config.rl.pool for config in configs.values()] == [False] * 6 + [True]


def test_a_node_without_rollouts_is_no_row_of_zeros(tmp_path):
    run = read_run(rl_run(tmp_path, num_steps=1))
    with pytest.raises(RuntimeError, match="run it for longer"):
        rl_idle.waiting("a hub", run.nodes[0], 1.0)


def test_the_table_of_roles_has_a_row_per_window_and_the_servers_only_where_one_is():
    nodes = tuple({"longest sample": 0.01, "rollouts": 0.1 * i, "ahead": 0.25, "steps": 9} for i in (1, 2, 3))
    found = [rl_idle.Offered(0, False, nodes, None), rl_idle.Offered(2, True, nodes, 0.7)]
    rows = rl_idle.roles_report(found).rows
    assert [row[:3] for row in rows].count(("server: no requests", "2", "1")) == 1
    assert len(rows) == 7
    assert rows[1] == ("trainer: rollouts", "0", "0", "10.0 %", "20.0 %", "30.0 %", "drafter")


def test_a_node_of_the_roles_admits_what_its_staleness_allows_and_counts_its_waits():
    class Source:
        """Finishes all samples at once, with one token each."""

        def __init__(self, node):
            self.node, self.prompts, self.running = node, [], []

        def update_weights(self, weights, version):
            self.running.append(len(self.prompts))

        def add(self, prompts):
            self.prompts += prompts

        def step(self):
            with self.node.window("rollouts"):
                done, self.prompts = self.prompts[:32], self.prompts[32:]
            return [Rollout(p, tokens=[1], logprobs=[-0.5], versions=[1]) for p in done]

        def status(self):
            return {"worker_idle_s": 0.5}

    for staleness in (0, 2):
        node = rl_idle.RoleNode(0, staleness, ())
        source = Source(node)
        stream, version = node._stream(source), 1
        for _ in range(2):
            version = node._step(rl_idle.make_policy(), source, stream, version)
        assert version == 3
        assert source.running == [0, 32 * staleness], "samples that run while the node trains"
        assert node.waited_s["rollouts"] > 0
        waited = {"longest sample": 0.0, "rollouts": node.waited_s["rollouts"]}
        assert node._so_far(source) == waited | {"ahead": 0.5}


def test_cpu_time_beside_trls_trainer_is_that_of_the_steps_between_two_runs():
    trl = [(Spent(5.0, 9.0, {}), 0.1), (Spent(11.0, 20.0, {}), 0.5)]
    run = [
        (Spent(8.0, 9.0, {"node": 6.0}), 10, 0.2),
        (Spent(20.0, 30.0, {"node": 15.0, "hub": 1.0}), 40, 0.4),
    ]
    found = rl._beside(trl, run, 20)
    assert (found.trl_s, found.run_s) == pytest.approx((6.0 / 20, 12.0 / 30)), "the run has done 30 steps"
    assert found.by_role == pytest.approx({"node": 9.0 / 30, "hub": 1.0 / 30})
    assert found.rewards == (0.5, 0.4)
    with pytest.raises(RuntimeError, match="has taken 10 steps, the shorter one 10"):
        rl._beside(trl, [run[0], (run[1][0], 10, 0.4)], 20)


def test_trls_trainer_gets_the_policy_and_the_rows_of_the_preset(tmp_path):
    preset = load(rl.CONFIG, []).config
    config = load(rl._config(tmp_path, tmp_path / "model"), [], strict=True).config
    assert (config.model.pretrained, config.rl.supervised_steps) == (str(tmp_path / "model"), 0)
    assert (config.prompts, config.rl.sampling, config.train.lr) == (
        preset.prompts,
        preset.rl.sampling,
        preset.train.lr,
    )
