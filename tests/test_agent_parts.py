"""Tests the parts of a node agent that need no network: shared memory, leases, the watchdog."""

import os

import numpy as np
import pytest

from aedit.child import from_json, to_json
from aedit.proto.agent import AgentPlan, Answer, Leases, Progress, mailbox
from aedit.proto.agent.leases import Speed, Watchdog
from aedit.proto.agent.mailbox import AgentState, Wants
from aedit.types import News, TensorLayout, UnitLayout, Verdict


@pytest.fixture
def box():
    return mailbox.create_mailbox([5, 5000], ranks=2, feedback=True)


def test_another_end_of_the_mailbox_sees_the_same_memory(box):
    other = mailbox.attach_mailbox(box.path)
    for vectors in (box.anchors, box.outbox, list(box.residuals.values())):
        for i, vector in enumerate(vectors):
            vector[:] = np.arange(vector.size) + i
    assert [v.size for v in other.anchors] == [5, 5000]
    for kind in ("anchors", "outbox", "residuals"):
        for unit in (0, 1):
            assert np.array_equal(getattr(other, kind)[unit], np.arange([5, 5000][unit]) + unit)
    assert not other.all_attached()
    box.attach(0)
    other.attach(1)
    assert box.all_attached()


def test_what_is_no_mailbox_is_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="not the mailbox"):
        mailbox.attach_mailbox(str(tmp_path / "other"))


def test_words_travel_both_ways(box):
    other = mailbox.attach_mailbox(box.path)
    assert other.wanted() == Wants.NOTHING
    box.want(Wants.LEAVE)
    box.order(1, 3, (7, 8, 9, 6), (-1, 2, -3))
    box.written(1, 0, 3)
    assert not other.all_written(1, 3)
    box.written(1, 1, 3)
    box.tell(Progress(5, 6, 0.5, 0.25, 1.5, 7, 9))
    assert other.wanted() == Wants.LEAVE
    assert other.all_written(1, 3)
    assert other.orders().tolist() == [[0] * 8, [3, 7, 8, 9, 6, -1, 2, -3]]
    assert other.progress() == Progress(5, 6, 0.5, 0.25, 1.5, 7, 9)

    other.answer(1, Answer(3, 11, Verdict.REFUSED))
    other.publish_news(News(0.0, 1, 2, 3, 4, 5, 6.5, 0.25, True, False), 100.0)
    other.add_blocks([(0, 16), (32, 48)])
    other.admit(4, [11, 12])
    assert box.answered(1, 3) == Answer(3, 11, Verdict.REFUSED)
    assert box.answered(1, 4) is None
    assert box.news(102.0) == News(2.0, 1, 2, 3, 4, 5, 6.5, 0.25, True, False)
    assert box.blocks(1) == [(32, 48)]
    assert (box.node, box.versions(), box.state()) == (4, (11, 12), AgentState.MEMBER)


def test_the_first_reason_for_an_end_is_the_one_that_is_told(box):
    box.end(AgentState.REFUSED, "another model")
    box.end(AgentState.LOST, "ended with 1")
    assert (box.state(), box.error()) == (AgentState.REFUSED, "another model")


def test_too_many_leases_are_an_error(box, monkeypatch):
    monkeypatch.setattr(mailbox, "MAX_BLOCKS", 2)
    with pytest.raises(RuntimeError, match="lease_samples"):
        box.add_blocks([(0, 1), (1, 2), (2, 3)])


def test_numbers_are_never_half_old_and_half_new():
    """A writer fills both slots again while a reader copies."""
    count, slots = np.zeros(1, np.int64), np.zeros((2, 4))
    writer = mailbox._Published(count, slots)
    writer.write((1, 1, 1, 1))

    class Torn:
        overtaken = False

        def __getitem__(self, slot):
            return self if not self.overtaken else slots[slot]

        def copy(self):
            half = slots[1, :2].tolist()
            writer.write((2, 2, 2, 2))
            writer.write((3, 3, 3, 3))
            self.overtaken = True
            return np.array([*half, *slots[1, 2:]])

    torn = Torn()
    assert mailbox._Published(count, torn).read() == (3, 3, 3, 3)
    assert torn.overtaken


def test_a_mailbox_in_a_file_is_removed_once(tmp_path, monkeypatch):
    path = tmp_path / "box"
    monkeypatch.setattr(mailbox.sys, "platform", "other")
    monkeypatch.setattr(
        mailbox.tempfile, "mkstemp", lambda prefix: (os.open(path, os.O_RDWR | os.O_CREAT), str(path))
    )
    box = mailbox.create_mailbox([5], 1, False)
    other = mailbox.attach_mailbox(str(path))
    mailbox.remove(box)
    mailbox.remove(box)
    assert not path.exists()
    mailbox.release(box)
    mailbox.release(box)
    box.anchors[0][:] = 3
    assert other.anchors[0].tolist() == [3.0] * 5


def test_used_samples_are_told_block_by_block_and_whole_ones_only_once():
    leases = Leases().more([(0, 4), (10, 16)]).give(10).more([(4, 8)]).give(14)
    assert leases.num_samples == 14
    assert leases.consumed(0) == []
    assert leases.consumed(3) == [(0, 3)]
    assert leases.consumed(6) == [(0, 4), (10, 12)]
    settled = leases.settle(6)
    assert settled.blocks == ((10, 16), (4, 8))
    assert settled.consumed(6) == [(10, 12)]
    assert settled.consumed(14) == [(10, 16), (4, 8)]
    assert settled.settle(14) == Leases((), 14)
    assert settled.settle(14).more([(20, 24)]).give(15).consumed(15) == [(20, 21)]


def test_a_trainer_is_stalled_after_30_s_and_20_usual_steps():
    dog = Watchdog()
    assert not dog.is_stalled(1e6)
    for step in range(4):
        dog = dog.see(step, 10.0 * step)
    assert dog.usual_s == pytest.approx(10)
    assert not dog.is_stalled(30 + 199)
    assert dog.is_stalled(30 + 201)
    quick = Watchdog().see(1, 0.0).see(11, 1.0)
    assert not quick.is_stalled(30)
    assert quick.is_stalled(32)
    assert not quick.see(12, 32.0).is_stalled(33)


def test_speed_counts_computing_only():
    speed = Speed().see(10, 5.0)
    assert speed.per_s == 2
    assert speed.see(10, 5.0) == speed
    assert speed.see(20, 10.0).per_s == pytest.approx(2)
    assert speed.see(20, 7.5).per_s == pytest.approx(0.9 * 2 + 0.1 * 4)


def test_a_plan_survives_the_way_to_another_process():
    units = (UnitLayout("a", (TensorLayout("w", (2, 3)), TensorLayout("b", ()))),)
    made = AgentPlan(
        addresses=("h:1", "h:2"),
        standbys=("", "h:3"),
        name="n",
        run="r",
        units=units,
        facts=(("seed", "1"),),
        num_samples=7,
        prefers=2,
    )
    assert from_json(type(made), to_json(made)) == made
    assert made.numels == (7,)
    assert [made.standbys_of(k) for k in range(3)] == [(), ("h:3",), ()]
