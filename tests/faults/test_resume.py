"""Tests resuming with other nodes or ranks per node: same anchors, no sample drawn twice."""

import shutil
import signal

import pytest
from faults.tiny_run import deed, differing


def anchors(state):
    kinds = ("sync.anchor/", "sync.momentum/")
    return {name: value for name, value in state.items() if name.startswith(kinds)}


def parameters(state):
    return {name.removeprefix("model."): v for name, v in state.items() if name.startswith("model.")}


def leave_after_one_step(run, nodes, ranks, step):
    """Resume and stop before any round, so that the checkpoint left behind shows what was resumed from."""
    run.train(nodes, ranks, [deed(node, "drawing", step, "SIGTERM") for node in range(nodes)])


SHAPES = [
    ((2, 1), (3, 1)),
    ((2, 2), (2, 1)),
    *(
        pytest.param(*shapes, marks=pytest.mark.slow)
        for shapes in (((2, 1), (2, 2)), ((3, 1), (2, 1)), ((2, 2), (3, 1)))
    ),
]


@pytest.mark.parametrize(("before", "after"), SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_another_shape_goes_on_from_the_same_anchors_and_draws_no_sample_twice(make_run, before, after):
    run = make_run(steps=12)
    run.train(*before)
    ended = run.newest()
    run.configure(steps=20)
    leave_after_one_step(run, *after, step=12)
    for node in range(after[0]):
        assert run.checkpoints(node)[-1].name == run.checkpoints()[-1].name
        assert differing(anchors(run.newest(node)), anchors(ended)) == []
    run.train(*after)
    ends = [run.newest(node) for node in range(after[0])]
    for end in ends:
        assert end["sync"]["steps"] == 20
        assert differing(anchors(end), anchors(ends[0])) == []
        assert differing(parameters(end), parameters(ends[0])) == []
        assert differing(anchors(end), anchors(ended)) == list(anchors(end))  # everything has moved
    assert_no_sample_twice(run, nodes=max(before[0], after[0]), steps=12 * before[0] + 8 * after[0])


def assert_no_sample_twice(run, nodes, steps):
    drawn = [index for node in range(nodes) for taken in run.draws(node).values() for index in taken]
    assert len(drawn) == 2 * steps  # batches of two
    assert len(set(drawn)) == len(drawn)


def test_a_node_of_several_ranks_leaves_and_goes_on_with_the_same_bits(make_run):
    calm, run = make_run("calm"), make_run("run")
    calm.train(2, 2)
    run.train(2, 2, [deed(0, "drawn", 2, "SIGTERM")])
    run.train(2, 2, [deed(1, "stepped", 7, "SIGTERM"), deed(0, "drawn", 9, "SIGTERM")])
    run.train(2, 2)
    for node in range(2):
        assert differing(run.newest(node), calm.newest(node)) == []


def test_a_node_that_joins_takes_part_in_the_round_the_others_owe(make_run):
    run = make_run()
    nodes = run.start(deeds=[deed(1, "stepped", 10, "SIGSTOP"), deed(0, "waiting", 12, "SIGTERM")])
    nodes.wait_until_stopped(1)
    run.until_done("SIGTERM")  # node 0 has opened round 2, node 1 has not
    nodes.send(signal.SIGTERM, 1)
    nodes.send(signal.SIGCONT, 1)
    nodes.end_well()
    assert run.newest(0)["sync"]["owed"] == [[2, 4]]
    run.train(3)
    rounds = [[event["id"] for event in run.events("round", node)] for node in range(3)]
    assert rounds[2] == rounds[0][1:]  # the first had landed before it came
    assert rounds[1] == rounds[0]
    assert run.events("heal", 2) == []
    assert len({path.name for node in range(3) for path in run.checkpoints(node)[-1:]}) == 1


def test_a_node_cannot_join_during_the_warm_up(make_run):
    run = make_run()
    run.train(deeds=[deed(0, "drawn", 1, "SIGTERM")])
    nodes = run.start(3)
    assert nodes.wait(2) == 2
    assert "aedit: round_000000_1: made during the warm-up" in nodes.log()


def test_a_node_that_was_away_does_not_take_the_others_back(make_run):
    run = make_run(steps=12)
    run.train(3)
    run.configure(steps=16)
    run.train(2)
    alone = run.newest()
    run.configure(steps=20)
    leave_after_one_step(run, 3, 1, step=16)
    for node in range(3):
        assert differing(anchors(run.newest(node)), anchors(alone)) == []


def test_a_node_whose_last_checkpoint_is_lost_takes_the_others_back_with_it(make_run, undisturbed):
    run = make_run()
    run.train(deeds=[deed(0, "drawn", 17, "SIGTERM")])
    shutil.rmtree(run.checkpoints(1)[-1])
    run.train()
    assert run.events("start", 0)[-1]["resumed_round"] == 3
    for node in range(2):
        assert differing(run.newest(node), undisturbed[node]) == []


def test_a_node_that_lost_everything_gets_anchors_from_the_others(make_run):
    run = make_run(steps=12)
    run.train()
    ended = run.newest()
    shutil.rmtree(run.dir / "nodes/1")
    run.configure(steps=20)
    leave_after_one_step(run, 2, 1, step=12)
    assert differing(anchors(run.newest(1)), anchors(ended)) == []
    run.train()
    assert differing(parameters(run.newest(0)), parameters(run.newest(1))) == []
