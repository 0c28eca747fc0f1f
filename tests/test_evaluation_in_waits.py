"""Tests evaluations in the waits of a node: results as those at once, and waits that end on time."""

from types import SimpleNamespace

import pytest
import torch
from kit.deferred import Looked, alone, node
from kit.nodes import tower
from kit.rl_nodes import records, weights
from kit.text_nodes import config_of, run

from aedit.edit import Shards
from aedit.launch.node.evaluation import EvaluationInWaits, make_evaluation

NEVER = 10**9
LONG_S = 1e9


class Pieces:
    """Work of some pieces, which notes how long the wait had lasted."""

    used_s = 1.5

    def __init__(self, pieces):
        self.left, self.waited_s = pieces, []

    def piece(self, waited_s):
        if self.left == 0:
            return False
        self.left -= 1
        self.waited_s.append(waited_s)
        return True


class Answer:
    def __init__(self, value=7):
        self.value = value

    def done(self):
        return True

    def result(self):
        return self.value


def wait_for(kind, pieces, looks, while_waiting=None):
    """Let a node wait for an answer that is there at the look of this number, from 0 on."""
    sync, _ = node(tower(), alone())
    sync.pieces, sync.while_waiting = pieces, while_waiting
    pending = Looked(Answer(), looks)
    if kind == "hub":
        return sync, sync.wait_together(pending, "an answer")
    return sync, sync.wait(pending, needed=1)


@pytest.mark.parametrize("kind", ["round", "hub"])
@pytest.mark.parametrize("watched", [False, True])
def test_a_waiting_node_looks_for_its_answer_after_each_piece(kind, watched):
    pieces = Pieces(10)
    sync, found = wait_for(kind, pieces, 4, (lambda position: None) if watched else None)
    assert found == 7
    assert len(pieces.waited_s) in (2, 3)
    assert pieces.waited_s == sorted(pieces.waited_s)
    assert sync.idle_used_s == 1.5


def test_without_further_work_the_node_waits_as_before():
    pieces = Pieces(3)
    assert wait_for("round", pieces, NEVER)[1] == 7, "it waits in `result`"
    assert len(pieces.waited_s) == 3


def test_a_wait_with_pieces_can_be_given_up():
    def give_up(position):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for("round", Pieces(3), NEVER, give_up)


# -- nodes


def evaluations(config):
    return [
        (each["step"], each["round"], each["loss"])
        for each in records(config, "events")
        if each["event"] == "eval"
    ]


KEYS = {"train__eval_samples": 9}
"""The last batch of an evaluation is a short one."""


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    config = config_of(tmp_path_factory.mktemp("at_once"), **KEYS)
    return run(config)


@pytest.mark.parametrize("looks", [None, 2, 4, NEVER], ids=["no waits", "short", "longer", "long"])
def test_results_and_weights_are_those_of_evaluations_at_once(at_once, tmp_path, looks):
    """The answer of each wait comes after so many looks; an evaluation has three batches and its end."""
    config = config_of(tmp_path, **KEYS, train__eval_in_waits=True)
    used_s = []

    def watch(node):
        step, evaluation = node.sync.step, node.objective.in_waits
        evaluation._batch_s = LONG_S  # the node's own waits are too short

        def step_and_wait():
            step()
            if looks is not None:
                evaluation._batch_s = 0.0
                node.sync.wait(Looked(Answer(), looks))
                evaluation._batch_s = LONG_S
            used_s.append(node.sync.idle_used_s)

        node.sync.step = step_and_wait

    node = run(config, watch)
    expected = evaluations(at_once.config)
    assert len(expected) == 4
    assert evaluations(config) == expected
    theirs = weights(at_once)
    assert all(value.equal(theirs[name]) for name, value in weights(node).items())
    assert (used_s[-1] > 0) == (looks is not None)
    assert used_s[-1] == node.objective.in_waits.used_s
    in_waits = [each.get("in_wait", False) for each in records(config, "events") if each["event"] == "eval"]
    assert in_waits == [False, *([looks is not None] * 2), False]


def test_an_evaluation_that_no_wait_has_finished_is_finished_before_the_next_and_at_an_early_end(tmp_path):
    config = config_of(tmp_path, train__eval_in_waits=True)
    known = []

    def watch(node):
        step = node.sync.step
        node.objective.in_waits._batch_s = LONG_S

        def step_and_look():
            step()
            known.append([each[1] for each in evaluations(config)])
            if node.sync.steps == 20:
                node.stop._signalled = True

        node.sync.step = step_and_look

    run(config, watch)
    assert known[0] == [0], "the first evaluation is of the start"
    assert known[15] == [0]
    assert known[17] == [0, 1]
    assert [each[1] for each in evaluations(config)] == [0, 1, 2]


def test_short_waits_are_not_prolonged():
    """A batch begins in a wait that has lasted as long as a batch."""
    began = []

    class Evaluation(EvaluationInWaits):
        __slots__ = ()

        def _next_batch(self, batches, *, in_wait):
            began.append(next(batches))

    found = Evaluation(copy=None, corpus=None, config=None, shards=Shards(), record=None)
    assert not found.piece(10.0), "there is nothing to evaluate"
    found._batches, found._batch_s = iter(range(100)), 2.0
    assert [found.piece(waited_s) for waited_s in (0.0, 1.0, 1.9)] == [True] * 3
    assert began == []
    assert found.piece(2.0)
    assert began == [0]
    assert found.used_s > 0


def test_a_node_of_several_ranks_evaluates_at_once(tmp_path):
    config = config_of(tmp_path, train__eval_in_waits=True)
    parts = SimpleNamespace(config=config, recorder=None, world=SimpleNamespace(ranks=2))
    assert make_evaluation(parts, torch.zeros(0)) is None
