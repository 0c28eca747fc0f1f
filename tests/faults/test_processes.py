"""Tests that a run whose processes are killed, frozen or stopped ends with the bits of an undisturbed run.

The processes are real; faults happen at steps, not at times (saboteur.py). A run has 20 steps: four of
warm-up (0-3), then a round opens after steps 7, 11, 15 and 19 and lands in the forward pass of the next step.
"""

import signal
import threading
from types import SimpleNamespace

import pytest
from faults.tiny_run import deed, differing

from aedit.edit import Shards
from aedit.launch.node.stop import Stop, Stopped


def assert_same_end(run, undisturbed):
    for node, end in enumerate(undisturbed):
        assert differing(run.newest(node), end) == []


LEAVINGS = {
    "in the warm-up": [deed(0, "drawing", 1, "SIGTERM"), deed(1, "drawn", 1, "SIGTERM")],
    "at the end of the warm-up": [deed(0, "stepped", 3, "SIGTERM"), deed(1, "stepped", 3, "SIGTERM")],
    "at different steps": [deed(0, "drawn", 9, "SIGTERM"), deed(1, "drawing", 8, "SIGTERM")],
    "as a round opens": [deed(0, "stepped", 11, "SIGTERM"), deed(1, "stepped", 11, "SIGTERM")],
    "one node only, the other is told": [deed(1, "drawn", 13, "SIGTERM")],
    "one node only, as a round opens": [deed(1, "stepped", 11, "SIGTERM")],
}


@pytest.mark.parametrize("deeds", LEAVINGS.values(), ids=LEAVINGS.keys())
def test_nodes_that_leave_on_sigterm_go_on_as_if_they_had_not(make_run, undisturbed, deeds):
    run = make_run()
    run.train(deeds=deeds)
    assert [event["reason"] for event in run.events("stop")] == ["signal"]
    assert run.events("stop")[0]["step"] < 20
    run.train()
    assert_same_end(run, undisturbed)


def test_one_that_is_asked_to_leave_tells_the_others_at_its_next_step():
    board = {}
    notes = SimpleNamespace(post=board.setdefault, read=board.get)
    asked, other = (Stop(node, 2, notes, Shards()) for node in range(2))
    other.check()
    asked._signalled = True  # as its handler does
    for node in (asked, other):
        with pytest.raises(Stopped):
            node.check()


@pytest.mark.parametrize(
    ("stops", "waits"), [(1, 2), (6, 8), (18, 19)], ids=["in the warm-up", "for a round", "to end the run"]
)
def test_a_node_that_waits_for_one_that_has_left_leaves_too(make_run, undisturbed, stops, waits):
    run = make_run()
    asked = [deed(1, "stepped", stops, "SIGSTOP"), deed(0, "waiting", waits, "SIGTERM")]
    nodes = run.start(deeds=asked)
    nodes.wait_until_stopped(1)
    run.until_done("SIGTERM")  # node 0 waits for node 1 now
    nodes.send(signal.SIGTERM, 1)
    nodes.send(signal.SIGCONT, 1)
    nodes.end_well()
    assert run.events("stop", 1)[0]["step"] == stops + 1
    run.train()
    assert_same_end(run, undisturbed)


def test_leaving_again_and_again_changes_nothing(make_run, undisturbed):
    run = make_run()
    for step in (2, 7, 7, 8, 14):
        run.train(deeds=[deed(0, "drawn", step, "SIGTERM"), deed(1, "stepped", step, "SIGTERM")])
    run.train()
    assert [event["reason"] for event in run.events("stop")] == ["signal"] * 5 + ["done"]
    assert_same_end(run, undisturbed)


def test_a_node_frozen_for_a_while_changes_nothing(make_run, undisturbed):
    run = make_run()
    nodes = run.start(deeds=[deed(1, "drawn", 10, "SIGSTOP")])
    nodes.wait_until_stopped(1)
    threading.Event().wait(3)  # the fault itself: others wait this long for it
    nodes.send(signal.SIGCONT, 1)
    nodes.end_well()
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize("every", [0, 3])
def test_how_often_a_run_is_saved_changes_nothing(make_run, undisturbed, every):
    run = make_run(more=f"[checkpoint]\nevery = {every}")
    run.train()
    assert len(run.events("checkpoint")) == {0: 1, 3: 2}[every]
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize(
    ("moment", "step"), [("renaming", 9), ("drawn", 14)], ids=["writing a checkpoint", "training"]
)
def test_a_node_killed_while(make_run, undisturbed, moment, step):
    run = make_run()
    nodes = run.start(deeds=[deed(1, moment, step, "SIGKILL")])
    assert nodes.wait(1) == -signal.SIGKILL
    assert nodes.wait(0) == 1  # it says so and leaves, long before its deadline
    assert "for the other nodes" in run.events("error")[-1]["message"]
    run.train()
    assert run.events("start", 1)[-1]["resumed_round"] > 0
    assert not list(run.dir.glob("nodes/*/checkpoints/.writing*"))
    assert_same_end(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_saves_and_the_same_command_goes_on_also_when_a_process_of_it_is_killed(make_run, undisturbed):
    run = make_run()
    process = run.aedit(deeds=[deed(0, "drawn", 9, "Ctrl-C")])
    _, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    assert run.checkpoints(0)
    assert run.checkpoints(1)
    assert run.processes() == []
    process = run.aedit(deeds=[deed(1, "drawn", 14, "SIGKILL")])
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert [event["attempt"] for event in run.events("start", 1)] == [1, 2, 3]
    assert_same_end(run, undisturbed)
    assert run.processes() == []


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_and_the_run_goes_on_from_its_last_checkpoint(make_run, undisturbed):
    run = make_run()
    process = run.aedit(deeds=[deed(1, "drawn", 13, "SIGSTOP"), deed(0, "waiting", 13, "SIGSTOP")])
    run.until_done("SIGSTOP")
    process.send_signal(signal.SIGINT)
    while "Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert run.processes() == []
    run.train()
    assert_same_end(run, undisturbed)
