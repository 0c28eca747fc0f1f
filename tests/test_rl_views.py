"""Tests the views of reinforcement learning against run directories whose figures are known by arithmetic."""

import io
import json
import math
import re

import matplotlib.image
import pytest
from kit.rl_runs import RLNode, closing, rl_run
from rich.console import Console
from test_hub_views import line, node_at, write
from test_views import full_run

from aedit.launch.records import read_run
from aedit.launch.views import after_warm_up, newest, plot
from aedit.launch.views import run_report as report_module
from aedit.launch.views.figures import recent_rollout_tokens_per_s, rl_totals, seconds_by_use, splits
from aedit.launch.views.panel import Fitted, panel
from aedit.launch.views.panel import line as plain_line
from aedit.launch.views.plots import time_per_node
from aedit.launch.views.rl_plots import drafter, policy_health, reward_by_steps, reward_by_time, step_split

RL_PLOTS = {
    "time_per_node.png",
    "reward_by_steps.png",
    "reward_by_time.png",
    "step_split.png",
    "acceptance.png",
    "policy_health.png",
}


@pytest.fixture(autouse=True)
def _files_are_closed():
    with closing():
        yield


def shown(run_dir, width=80, height=None):
    run = read_run(run_dir)
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(Fitted(run, run.indices) if height else panel(run, run.indices))
    return console.file.getvalue()


def cells(row):
    """Return the words of a row of a panel."""
    return row.strip("\u2502 ").split()


def totals_of(run_dir, *nodes):
    run = read_run(run_dir)
    return rl_totals(run.nodes[node].metrics[-1].rl for node in nodes)


def curve(axes, label):
    """Return the x and y values of a curve by its label."""
    (found,) = (drawn for drawn in axes.get_lines() if drawn.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


def heights(axes, label):
    """Return the heights of the part of a stack with this label."""
    (found,) = (part for part in axes.patches if part.get_label() == label)
    values, _, baseline = found.get_data()
    return list(values - baseline)


@pytest.fixture
def report(monkeypatch):
    """Return `report` without the plots, which other tests draw."""
    monkeypatch.setattr(report_module, "draw", lambda run: [])
    return report_module.report


def test_the_totals_are_those_worked_out_by_hand(tmp_path):
    run_dir = rl_run(tmp_path, 40)
    both = totals_of(run_dir, 0, 1)
    assert both.tokens_per_s == 640 + 320
    assert both.speed_up == pytest.approx(1.6)
    assert both.accepted == pytest.approx(2.5)
    assert both.no_signal == 0.25
    assert list(both.arms) == ["suffix:8", "layer:4", "layer:6x2x12", "off"]
    assert sum(both.arms.values()) == pytest.approx(1)
    assert both.arms["layer:4"] == pytest.approx(0.3)
    assert both.idle_s == {"hub": 24.0, "longest sample": 8.0, "rewards": 8.0}
    assert (both.idle_used_s, both.waited_s, both.published) == (24.0, 40.0, 8)


def test_a_speed_up_is_not_guessed_where_no_plain_step_was_timed(tmp_path, report):
    run_dir = rl_run(tmp_path, 10, plain=False)
    assert math.isnan(totals_of(run_dir, 0, 1).speed_up)
    assert "-x" not in report(run_dir)
    assert "nan" not in report(run_dir)
    (rollouts,) = (row for row in report(run_dir).splitlines() if "while generating" in row)
    assert "tokens/s while generating; accepted length 2.50; no plain step was timed" in rollouts


def test_the_speed_up_is_over_the_nodes_that_have_timed_plain_steps(tmp_path):
    run_dir = rl_run(tmp_path, 10)
    RLNode(run_dir, 2, speed=100.0, plain=False).step(10)
    RLNode(run_dir, 3).step(10, compared_s=10.0, as_plain_s=10.0)
    assert totals_of(run_dir, 0, 1, 2).speed_up == pytest.approx(1.6)
    assert totals_of(run_dir, 0, 1, 2, 3).speed_up == pytest.approx((8 + 8 + 10) / 20)


def test_the_speed_of_workers_is_over_the_time_in_which_they_generate(tmp_path):
    """Nobody waits for what they generate beside the training: a second of waiting, 8 of generation."""
    run_dir = rl_run(tmp_path, 10)
    RLNode(run_dir, 2).step(10, rollout_tokens=1600.0, rollout_s=1.0, worker_s=8.0)
    assert totals_of(run_dir, 2).tokens_per_s == pytest.approx(200)
    (node,) = (node for node in read_run(run_dir).nodes if node.index == 2)
    assert recent_rollout_tokens_per_s(node.metrics) == pytest.approx(200)
    assert newest(node).report()["rollout_s"] == 8.0


def test_the_recent_speed_is_over_ten_seconds_and_over_more_if_nothing_was_generated(tmp_path):
    node = RLNode(tmp_path, 0)
    (tmp_path / "run.toml").write_text("")
    for n in range(1, 11):
        node.step(n)
    for n in range(11, 16):  # five times the tokens in the same time
        node.step(n, rollout_tokens=6400.0 + 3200 * (n - 10))
    metrics = read_run(tmp_path).nodes[0].metrics
    assert recent_rollout_tokens_per_s(metrics) == pytest.approx(3200)
    assert recent_rollout_tokens_per_s(metrics[:1]) == pytest.approx(640)
    assert math.isnan(recent_rollout_tokens_per_s(()))
    still = metrics[14].rl
    for n in range(16, 30):
        node.step(n, rollout_tokens=still.rollout_tokens, rollout_s=still.rollout_s)
    assert recent_rollout_tokens_per_s(read_run(tmp_path).nodes[0].metrics) == pytest.approx(3200)


def test_each_step_is_split_by_use_and_nothing_is_counted_twice(tmp_path):
    run_dir = rl_run(tmp_path, 10)
    node = read_run(run_dir).nodes[0]
    found = splits(node)
    assert [(step, steps) for step, steps, _ in found] == [(step, 1) for step in range(2, 11)]
    expected = {"rewards": 0.1, "training": 0.4, "waiting": 0.1, "used": 0.3, "other": 0.2}
    expected["rollouts"] = 0.9  # without the wait for the longest sample
    for _, _, spent in found:
        assert dict(spent) == pytest.approx(expected)
        assert sum(spent.values()) == pytest.approx(2.0)
    assert seconds_by_use(node.metrics[-1].rl)["rollouts"] == pytest.approx(9.0)


def test_lines_of_two_attempts_are_no_step(tmp_path):
    node = RLNode(tmp_path, 0)
    (tmp_path / "run.toml").write_text("")
    for n in (1, 2):
        node.step(n)
    node.now = 5.0
    node.start(attempt=1, step=2)
    for n in (3, 4):
        node.step(n)
    assert [step for step, _, _ in splits(read_run(tmp_path).nodes[0])] == [2, 4]


def test_the_solved_share_counts_from_the_end_of_the_supervised_warm_up(tmp_path, report):
    node = RLNode(tmp_path, 0)
    (tmp_path / "run.toml").write_text('name = "warm"\n')
    node.start()
    node.evaluate(0, 0.0)
    for n in (1, 2, 3):
        node.step(n, supervised_steps=n, groups=0, reward=None, solved=None)
    assert "warm-up" in shown(tmp_path)
    assert after_warm_up(read_run(tmp_path)) == []
    node.evaluate(3, 0.25)
    for n in (4, 5):
        node.step(n, supervised_steps=3)
    node.evaluate(5, 0.5)
    run = read_run(tmp_path)
    assert [e.solved for e in after_warm_up(run)] == [0.25, 0.5]
    text = report(tmp_path)
    assert "25.0 % -> 50.0 % of 64 problems, at 0:06 and 0:10; 0.0 % before the warm-up" in text
    assert "25.0 % -> 50.0 % of 64 problems at 0:10" in shown(tmp_path)
    assert "warm-up" not in shown(tmp_path)


@pytest.mark.parametrize(("arms", "end"), [
    ({"off": 30}, "off 100 %; 1.31x as fast as without drafts if all were accepted, but too few are"),
    ({"off": 10, "layer:4": 30}, "off 25 %; 1.31x as fast as without drafts if all were accepted"),
])  # fmt: skip
def test_the_report_says_what_drafts_could_gain_and_why_they_are_off(tmp_path, report, arms, end):
    (tmp_path / "run.toml").write_text('name = "bound"\n')
    node = RLNode(tmp_path, 0)
    node.start()
    node.step(1, arms=arms, drafting_bound=1.31)
    (line,) = (line for line in report(tmp_path).splitlines() if line.startswith("  arms"))
    assert line.endswith(end)


def test_the_report_shows_every_figure(tmp_path, report):
    run_dir = rl_run(tmp_path)
    text = report(run_dir)
    assert text.isascii()
    rows = [row[2:].split("  ", 1) for row in text.splitlines() if row.startswith("  ") and row[2] != " "]
    found = {row[0]: row[-1].strip() for row in rows}
    assert found["held-out solved"] == "26.0 % -> 75.0 % of 64 problems, at 0:02 and 1:40"
    assert found["reward"] == "0.31 -> 0.76, 21.0 % -> 65.5 % solved"
    speed = "960 tokens/s while generating; decoding 1.60x as fast as without drafts; accepted length 2.50"
    assert found["rollouts"] == speed
    assert found["arms"] == "suffix:8 40 %, layer:4 30 %, layer:6x2x12 20 %, off 10 %"
    assert (
        found["groups"] == "400 (3,200 rollouts), 25.0 % without signal, 2 retried, 4 rollouts without reward"
    )
    assert found["policy"].startswith("staleness 0.5 versions (max 2), mismatch KL 2.0e-04, 1.0 %")
    assert found["idle"] == "30.0 s of 50.0 s used; hub 30.0 s, longest sample 10.0 s, rewards 10.0 s"
    assert found["drafter"] == "500 steps of training, 10 published, 4 refused by the gate, 10 taken"
    assert "nats/token" not in text, "a policy loss is no measure of quality"


def test_errors_in_rewards_are_in_report_and_status(tmp_path, report):
    run_dir = rl_run(tmp_path, 4)
    node = RLNode(run_dir, 1)
    node.out.event(
        "reward_error", function="mine:score", sample=7, line="/a/mine.py:12", message="ZeroDivisionError"
    )
    assert "1 error in reward functions" in report(run_dir)
    text = shown(run_dir)
    assert "reward error: mine:score (mine.py:12), sample 7:" in text
    assert "ZeroDivisionError" in text


def test_status_of_reinforcement_learning_fits_80_columns(tmp_path):
    run_dir = rl_run(tmp_path)
    text = shown(run_dir)
    assert all(len(row) <= 80 for row in text.splitlines())
    assert "\u2026" not in text
    assert "26.0 % -> 75.0 % of 64 problems at 1:40" in text
    (row,) = (row for row in text.splitlines() if " 1 done" in row)
    assert cells(row) == ["1", "done", "50", "12", "0.80", "70.0", "%", "320", "1.60x", "2.50"]
    (health,) = (row for row in text.splitlines() if "0.5 (max 2)" in row and " 0 0.5" in row)
    wanted = ["0", "0.5", "(max", "2)", "2.0e-04", "1.0", "%", "25.0", "%", "25.0", "s", "60.0", "%", "v5"]
    assert cells(health) == wanted
    assert "train loss" not in text


@pytest.mark.parametrize("num_nodes", [1, 8, 40])
def test_top_of_large_numbers_fits_a_terminal_of_80_by_24(tmp_path, num_nodes):
    (tmp_path / "run.toml").write_text("")
    big = {
        "rollout_tokens": 1.2e12,
        "rollout_s": 1e6,
        "compared_s": 1e5,
        "as_plain_s": 1.2e6,
        "staleness_max": 128,
    }
    big |= {"reward": -12.5, "solved": 1.0, "idle_s": {"longest sample": 123_456.7}, "no_signal": 4}
    for index in range(num_nodes):
        node = RLNode(tmp_path, index)
        node.step(1)
        node.step(1_234_567, **big)
        node.out.close()
    lines = shown(tmp_path, height=24).splitlines()
    assert len(lines) <= 24
    assert all(len(row) <= 80 for row in lines)
    assert any("held-out solved" in row for row in lines)
    assert any("1,234,567" in row for row in lines)


def test_arms_and_waits_that_hardly_occur_are_not_named(tmp_path, report):
    node = RLNode(tmp_path, 0)
    (tmp_path / "run.toml").write_text("")
    node.step(1, arms={"off": 9990, "layer:4": 10}, idle_s={"rank": 0.01, "hub": 2.0}, idle_used_s=1.0)
    text = report(tmp_path)
    assert "off 100 %\n" in text
    assert "1.0 s of 2.0 s used; hub 2.0 s\n" in text
    node.step(2, idle_s={"rank": 0.01}, idle_used_s=0.0)
    assert "  idle             none\n" in report(tmp_path)
    assert "idle             none " in shown(tmp_path)


def test_a_line_of_a_log_shows_reward_and_rollouts(tmp_path):
    run = read_run(rl_run(tmp_path, 10))
    told = plain_line(run, run.indices)
    assert "held-out solved 75.0 %" in told
    assert "node 1 done step 10 reward 0.40 solved 30.0 % 320 rollout tokens/s" in told


def test_a_run_on_text_looks_as_it_did(tmp_path, report):
    run_dir = full_run(tmp_path)
    text = report(run_dir) + shown(run_dir)
    assert not any(word in text for word in ("reward", "solved", "rollout", "staleness", "idle  "))
    assert "held-out loss" in text


def test_a_run_whose_figures_are_all_missing_breaks_no_view(tmp_path, report):
    (tmp_path / "run.toml").write_text('[prompts]\nsource = "x"\n')
    assert "no node has started yet" in shown(tmp_path)
    assert "0 nodes" in report(tmp_path)
    node = RLNode(tmp_path, 0)
    node.start()
    for n in (1, 2, 3):
        node.now = float(n)
        node.out.metrics(step=n, tokens=1, rl={"reward": None, "arms": {}, "passes": math.nan})
    node.out.event("rl_eval", step=3, round=1)
    text = report(tmp_path) + shown(tmp_path)
    assert "nan" not in text.lower().replace("nanosecond", "")
    assert "no plain step was timed" in text
    assert {path.name for path in plot.plot_command(tmp_path)} == RL_PLOTS


def test_plots_of_reward_hold_each_nodes_series_and_the_held_out_answers(tmp_path):
    run = read_run(rl_run(tmp_path, 50))
    reward, solved = reward_by_steps(run).axes
    steps, values = curve(reward, "node 1, rollouts")
    assert (steps, values) == (list(range(1, 51)), pytest.approx([0.3 + 0.01 * n for n in range(1, 51)]))
    assert curve(solved, "node 0, rollouts")[1] == pytest.approx([0.2 + 0.01 * n for n in range(1, 51)])
    assert curve(solved, "held-out") == ([1, 25, 50], [0.26, 0.5, 0.75])
    late = read_run(_with_an_evaluation_of_a_slow_node(tmp_path))
    assert curve(reward_by_steps(late).axes[1], "held-out")[0][-1] == (50 + 20) / 2, "the nodes' mean step"
    reward, solved = reward_by_time(run).axes
    assert curve(solved, "held-out")[0] == [2, 50, 100], "seconds"
    assert curve(reward, "node 0, rollouts")[0] == [2.0 * n for n in range(1, 51)]


def test_the_warm_up_of_one_node_does_not_cover_the_rewards_of_another(tmp_path):
    (tmp_path / "run.toml").write_text("")
    for index, last in ((0, 10), (1, 4), (2, 0)):
        node = RLNode(tmp_path, index)
        for n in range(1 if last else 8, 16):
            in_warm_up = {"supervised_steps": n, "groups": 0, "reward": None, "solved": None}
            node.step(n, **(in_warm_up if n <= last else {"supervised_steps": last}))
        if index < 2:
            run = read_run(tmp_path)
            for figure, unit in ((reward_by_steps(run), 1), (reward_by_time(run), 2)):
                for axes in figure.axes:
                    (grey,) = axes.patches
                    ends = [line for line in axes.get_lines() if "end of the warm-up" in line.get_label()]
                    assert [line.get_xdata()[0] for line in ends] == [10 * unit, 4 * unit][: index + 1]
                    assert grey.get_x() + grey.get_width() == min(line.get_xdata()[0] for line in ends)
    late = reward_by_time(read_run(tmp_path)).axes[0]
    assert late.patches[0].get_width() == 8, "the third node came at 16 s, without a warm-up"
    assert not reward_by_steps(read_run(tmp_path)).axes[0].patches, "its first step is of rollouts"


def test_no_line_crosses_the_time_in_which_a_node_was_away(tmp_path):
    (tmp_path / "run.toml").write_text("")
    node = RLNode(tmp_path, 0)
    node.start()
    for n in range(1, 31):
        if n == 11:
            node.now = 55.0
            node.start(step=10)
        if n <= 10 or n > 28:
            node.step(n)
    (accepted, _), (reward, _) = drafter(read_run(tmp_path)).axes, reward_by_time(read_run(tmp_path)).axes
    for axes, label in ((accepted, "node 0"), (reward, "node 0, rollouts")):
        times, values = curve(axes, label)
        assert [t for t, value in zip(times, values, strict=True) if math.isnan(value)] == [55.0]
        assert times == sorted(times)
    assert not any(map(math.isnan, curve(reward_by_steps(read_run(tmp_path)).axes[0], "node 0, rollouts")[1]))


def test_a_warm_up_that_goes_on_is_all_grey_up_to_now(tmp_path):
    (tmp_path / "run.toml").write_text("")
    node = RLNode(tmp_path, 0)
    for n in range(1, 4):
        node.step(n, supervised_steps=n, groups=0, reward=None, solved=None)
    node.evaluate(3, 0.0)
    assert reward_by_steps(read_run(tmp_path)).axes[0].patches[0].get_width() == 3


def _with_an_evaluation_of_a_slow_node(tmp_path):
    run_dir = tmp_path / "late"
    (run_dir / "nodes").mkdir(parents=True)
    (run_dir / "run.toml").write_text("")
    fast, slow = RLNode(run_dir, 0), RLNode(run_dir, 1)
    for n in (10, 50):
        fast.step(n)
    slow.step(20)
    slow.now = 101.0
    slow.evaluate(20, 0.9)
    return run_dir


def test_the_plot_of_a_steps_split_stacks_its_seconds_for_each_node(tmp_path):
    figure = step_split(read_run(rl_run(tmp_path, 20)))
    assert len(figure.axes) == 2
    parts = {
        "rollouts": 0.9,
        "rewards": 0.1,
        "training": 0.4,
        "waiting": 0.1,
        "waiting, used": 0.3,
        "other": 0.2,
    }
    for axes in figure.axes:
        for label, height in parts.items():
            assert heights(axes, label) == pytest.approx([height] * 19), label
        assert max(max(part.get_data().values) for part in axes.patches) == pytest.approx(2.0)


def test_a_long_runs_split_is_averaged_over_equal_parts(tmp_path):
    (tmp_path / "run.toml").write_text("")
    node = RLNode(tmp_path, 0)
    for n in range(1, 1000):
        node.step(n)
    (axes,) = step_split(read_run(tmp_path)).axes
    drawn = heights(axes, "training")
    assert len(drawn) <= 120
    assert drawn == pytest.approx([0.4] * len(drawn))
    edges = axes.patches[0].get_data().edges
    assert (edges[0], edges[-1]) == (1, 999)


def test_the_plot_of_the_drafter_holds_accepted_length_and_shares_of_arms(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "nodes").mkdir(parents=True)
    (run_dir / "run.toml").write_text("")
    node = RLNode(run_dir, 0)
    for n in range(1, 41):
        node.step(n, arms={"off": 1.0 * n, "layer:4": 3.0 * n}, passes=640.0 * n / (1 if n <= 20 else 2))
    accepted, arms = drafter(read_run(run_dir)).axes
    times, lengths = curve(accepted, "node 0")
    assert times == [2.0 * n for n in range(2, 41) if n != 21], "passes fall in that line: a new count"
    assert lengths == pytest.approx([1.0] * 19 + [2.0] * 19)
    assert curve(accepted, "node 0, steps of the layer")[1] == pytest.approx(
        [1.5 + 0.01 * n for n in range(1, 41)]
    )
    assert heights(arms, "layer:4") == pytest.approx([0.75] * len(heights(arms, "layer:4")))
    assert heights(arms, "off") == pytest.approx([0.25] * len(heights(arms, "off")))


def test_one_trial_of_the_layer_is_one_point(tmp_path):
    (tmp_path / "run.toml").write_text("")
    node = RLNode(tmp_path, 0)
    for n in range(1, 41):
        tried = 0 if n < 7 else 1 if n < 30 else 2
        length = None if n < 7 else 1.0 if n < 30 else 1.5
        told = {
            "steps": 0,
            "published": 0,
            "adopted": 0,
            "refused": 0,
            "accepted_length": length,
            "version": 0,
        }
        node.step(n, arms={"off": 10.0 * n, "layer:1": tried}, drafter=told)
    (line,) = (a for a in drafter(read_run(tmp_path)).axes[0].get_lines() if "layer" in a.get_label())
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([14.0, 60.0], [1.0, 1.5])
    assert (line.get_linestyle(), line.get_marker()) == ("None", "x")


def test_plots_of_the_policy_and_of_the_nodes_time_hold_their_figures(tmp_path):
    run = read_run(rl_run(tmp_path, 10))
    mismatch, staleness, clipped, entropy = policy_health(run).axes
    for axes, value in ((mismatch, 2e-4), (staleness, 0.5), (clipped, 0.01), (entropy, 1.5)):
        assert curve(axes, "node 1") == (list(range(1, 11)), [value] * 10)
    (axes,) = time_per_node(run).axes
    lengths = {part.get_label(): [bar.get_width() for bar in part] for part in axes.containers}
    assert lengths["rollouts"] == pytest.approx([9.0, 9.0])
    assert lengths["waiting, used"] == pytest.approx([3.0, 3.0])
    assert lengths["other"] == pytest.approx([2.0, 2.0])


def test_every_plot_is_an_image_with_something_on_it(tmp_path):
    run_dir = rl_run(tmp_path, 10)
    paths = plot.plot_command(run_dir)
    assert {path.name for path in paths} == RL_PLOTS
    for path in paths:
        assert matplotlib.image.imread(path)[..., :3].std() > 0.02, path


def test_status_and_plots_of_a_hub_show_what_its_nodes_report(tmp_path):
    state = RLNode.state(RLNode(tmp_path / "other", 0), 20)
    told = {
        name: state[name] for name in ("reward", "solved", "staleness", "staleness_max", "rollout_tokens")
    }
    told |= {name: state[name] for name in ("rollout_s", "compared_s", "as_plain_s", "passes", "idle_used_s")}
    told |= {"arms": {"off": 20, "layer": 60}, "idle_s": {"hub": 6.0}}
    lines = [line(t, [node_at(0, 10 * t, rl=told), node_at(1, 5 * t)], [t]) for t in range(1, 6)]
    run_dir = tmp_path / "hubbed"
    write(run_dir / "hub", json.loads(json.dumps(lines)))
    text = shown(run_dir)
    assert all(len(row) <= 80 for row in text.splitlines())
    (row,) = (row for row in text.splitlines() if "1.60x" in row)
    assert cells(row) == ["0", "0.50", "40.0", "%", "640", "1.60x", "2.50", "0.5", "(max", "2)"]
    assert "layer 75 %, off 25 %" in text
    assert "hub 6.0 s; 100.0 % used" in text
    RLNode(run_dir, 0).step(1)
    assert "layer 75 %" in shown(run_dir), "node 1 is on another machine"
    RLNode(run_dir, 1).step(1)
    assert "layer 75 %" not in shown(run_dir), "all files are here"


def test_the_ledger_says_what_became_of_waits_in_all_and_by_node(report, tmp_path):
    """The first node's drafter saves 0.6 s per 1 s of decoding; the second one helps, and has none in use."""
    drafters = [(4.0, {"adopted": 1}), (0.5, {"adopted": 0, "starved": 1})]
    for index, (used_s, state) in enumerate(drafters):
        node = RLNode(tmp_path, index)
        node.start()
        helped = {"asked": 0, "helped_s": 3.0 * index}
        seconds = {"idle_used_s": used_s, "idle_usable_s": 5.0, "compared_s": 10.0, "as_plain_s": 16.0}
        node.step(1, idle_s={"round": 6.0}, **seconds, drafter=state, pool=helped)
    first = "6.0 s waited, 5.0 s usable, 4.0 s used by the drafter, 6.0 s of rollouts gained by it"
    second = "6.0 s waited, 5.0 s usable, 0.5 s used by the drafter, 3.0 s for other nodes"
    both = "12.0 s waited, 10.0 s usable, 4.5 s used by the drafter, 6.0 s of rollouts gained by it, 3.0 s"
    for text in (report(tmp_path), re.sub("[\u2502\n]", " ", shown(tmp_path, width=160))):
        assert f"ledger {both} for other nodes node 0 {first} node 1 {second}" in " ".join(text.split())
    assert "idle 4.5 s of 12.0 s used; round 12.0 s" in " ".join(report(tmp_path).split())
    assert "its trainer on node 1 gets less than a tenth" in " ".join(shown(tmp_path, width=160).split())
    used = {"idle_s": {"round": 6.0, "rank": 1.0}, "used_s": {"round": 4.0, "rank": 0.0}}
    RLNode(tmp_path, 1).step(2, **used, worker_s=5.0, worker_idle_s=2.5, idle_usable_s=5.0, idle_used_s=4.0)
    text = " ".join(report(tmp_path).split())
    assert "idle 8.0 s of 13.0 s used; round 12.0 s (4.0 s used), rank 1.0 s" in text
    assert "of rollouts gained by it, 2.5 s of workers without samples node 0 6.0 s waited" in text
