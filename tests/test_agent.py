"""Tests that a node's agent sends pushes and fetches anchors, and counts each push once if the hub fails."""

import gc
import math
import threading

import numpy as np
import psutil
import pytest
from kit.agents import SHAPES, MemoryHub, exchange, node, order, plan
from kit.waiting import until

from aedit.proto.agent import AgentLost, Progress, attach_agent
from aedit.proto.codecs import codec
from aedit.proto.rpc import HubClient
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError, Verdict

MODES = ("process", "thread")


@pytest.fixture
def hub():
    made = MemoryHub()
    made.serve()
    yield made
    made.kill()


# The first node's first push of a unit is its parameters, so its exchange 1 is the hub's push 2.


def address(hub):
    return hub.server.address


@pytest.mark.parametrize("mode", MODES)
def test_the_first_node_gives_its_parameters_and_pushes_come_back_as_anchors(hub, mode):
    with node(plan([address(hub)]), mode=mode) as link:
        first = [anchor.copy() for anchor in link.anchors]
        assert link.join(10) == (1, 1)
        assert all(np.array_equal(a, b) for a, b in zip(hub.anchors, first, strict=True))
        push = np.linspace(-1, 1, 5000, dtype=np.float32)
        answer = exchange(link, 1, 1, push, 1, steps=3)
        assert (answer.version, answer.verdict) == (2, Verdict.MERGED)
        assert np.array_equal(link.anchors[1], first[1] - push)
        assert np.array_equal(link.anchors[0], first[0])
        link.leave(10)
    assert hub.left == {0}


@pytest.mark.parametrize("mode", MODES)
def test_a_node_that_joins_gets_the_anchors_of_the_run(hub, mode):
    with node(plan([address(hub)])) as first:
        first.join(10)
        exchange(first, 0, 1, 0.5, 1)
        with node(plan([address(hub)], name="b"), mode=mode, start=[0, 0]) as second:
            assert second.join(10) == (2, 1)
            assert second.node == 1
            assert all(np.array_equal(a, b) for a, b in zip(second.anchors, hub.anchors, strict=True))


def test_a_node_waits_for_the_weights_of_the_one_that_founds_the_run(hub):
    hub.names, hub.founder = {"other": 0}, 0
    hub.sessions[0] = 77
    with node(plan([address(hub)]), start=[0, 0]) as link:
        with pytest.raises(TimeoutError, match="no anchors yet"):
            link.join(0.5)
        for unit, numel in enumerate(hub.numels):
            head = pb.PushHead(who=pb.Who(run="test", node=0, session=77), unit=unit, seq=1, codec="fp32")
            hub.push(head, memoryview(np.full(numel, unit + 1, np.float32)).cast("B"))
        link.join(10)
        assert [set(anchor.tolist()) for anchor in link.anchors] == [{1.0}, {2.0}]


def test_all_ranks_of_a_node_see_the_same_and_a_push_waits_for_the_slowest(hub):
    with node(plan([address(hub)]), ranks=2) as link:
        other = attach_agent(link.path, 1)
        link.join(10)
        assert other.join(10) == (1, 1)
        half = slice(2500, 5000)
        link.outbox[1][:2500] = 1
        link.written(1, 1)
        link.send(1, 1, base=1, steps=1, tokens=1)
        until(lambda: len(hub.heartbeats) > 5, "heartbeats")
        assert hub.pushed == []
        other.outbox[1][half] = 2
        other.written(1, 1)
        mine = until(lambda: link.answer(1, 1), "the answer")
        assert other.answer(1, 1) == mine
        assert np.array_equal(hub.pushed[0][3], np.repeat(np.float32([1, 2]), 2500))
        assert np.array_equal(other.anchors[1], link.anchors[1])


def test_several_hub_processes_split_the_units():
    hubs = [MemoryHub(), MemoryHub()]
    addresses = [hub.serve() for hub in hubs]
    with node(plan(addresses)) as link:
        link.join(10)
        for unit in (0, 1):
            exchange(link, unit, 1, 1.0, 1)
        link.leave(10)
    assert [hub.versions for hub in hubs] == [[2, 0], [0, 2]]
    assert all(hub.left == {0} for hub in hubs)
    for hub in hubs:
        hub.kill()


@pytest.mark.parametrize("when", ["push before", "push after", "pull"])
def test_a_hub_that_dies_around_a_push_merges_it_once(hub, when):
    with node(plan([address(hub)])) as link:
        link.join(10)
        hub.broken.append(when)
        exchange(link, 1, 1, 1.0, 1)
        exchange(link, 1, 2, 2.0, 2)
        assert hub.broken == []
        assert [(seq, value[0]) for _, _, seq, value in hub.pushed] == [(2, 1.0), (3, 2.0)]
        assert np.array_equal(link.anchors[1], np.arange(5000) + 97)


@pytest.mark.parametrize("mode", MODES)
def test_a_hub_that_was_away_finds_the_pushes_waiting_and_forgotten_members_back(hub, mode):
    with node(plan([address(hub)]), mode=mode) as link:
        link.join(10)
        where, before = address(hub), link.session
        assert before == hub.sessions[0] > 0
        hub.kill()
        hub.sessions.clear()  # as after a restart that took longer than a silent member is kept
        for unit in (0, 1):
            order(link, unit, 1, 1.0, 1)
        until(lambda: link.news().age_s > 0.3, "the silence")
        assert link.answer(0, 1) is None
        hub.serve(where)
        for unit in (0, 1):
            assert until(lambda u=unit: link.answer(u, 1), "the answer").verdict == Verdict.MERGED
        assert [seq for _, _, seq, _ in hub.pushed] == [2, 2]
        assert link.node == 0
        assert link.session == hub.sessions[0] > before


@pytest.mark.parametrize("mode", MODES)
def test_the_next_number_of_a_push_is_the_one_that_the_hub_has_it_under(hub, mode):
    """With pushes that the hub refuses, a restart of the hub, and a second process of the node."""
    where = address(hub)
    hub.refuse = {(1, 3): pb.REFUSED, (1, 4): pb.DISTRUSTED}
    for attempt in (0, 1):
        with node(plan([where]), mode=mode) as link:
            link.join(10)
            assert link.next_number(0) == 2
            for seq in (1, 2, 3, 4):
                if seq == 4:
                    hub.kill()
                    hub.sessions.clear()
                    hub.serve(where)
                assert link.next_number(1) == 4 * attempt + seq + 1
                exchange(link, 1, seq, 1.0, 1)
                assert hub.seqs[0, 1] == 4 * attempt + seq + 1


def test_a_push_whose_acknowledgement_is_lost_with_the_hub_is_merged_once(hub):
    with node(plan([address(hub)], call_timeout_s=0.3)) as link:
        link.join(10)
        merge = hub._merge

        def merge_and_die(*push):
            merge(*push)
            hub._merge, hub.dead = merge, True
            hub._live()

        hub._merge = merge_and_die
        order(link, 0, 1, 1.0, 1)
        until(lambda: link.news().age_s > 1, "the silence")
        hub.sessions.clear()
        hub.dead = False
        assert until(lambda: link.answer(0, 1), "the answer").verdict == Verdict.MERGED
        assert exchange(link, 0, 2, 2.0, 2).version == 3
        assert [value[0] for *_, value in hub.pushed] == [1.0, 2.0]


def test_a_decision_that_comes_later_is_heard_by_beat(hub):
    hub.slow = True
    with node(plan([address(hub)])) as link:
        link.join(10)
        assert exchange(link, 0, 1, 1.0, 1).version == 2


@pytest.mark.parametrize(("verdict", "wanted"), [(pb.REFUSED, "REFUSED"), (pb.DISTRUSTED, "DISTRUSTED")])
def test_a_push_that_is_refused_comes_back_with_the_newest_anchor(hub, verdict, wanted):
    with node(plan([address(hub)])) as link:
        link.join(10)
        hub.refuse[0, 2] = verdict
        answer = exchange(link, 0, 1, 1.0, 1)
        assert (answer.verdict.name, answer.version) == (wanted, 1)
        assert exchange(link, 0, 2, 1.0, 1).verdict == Verdict.MERGED
        assert [seq for _, _, seq, _ in hub.pushed] == [3]


def test_a_hub_that_follows_and_knows_less_gets_the_push_again():
    first, second = MemoryHub(slow=True), MemoryHub()
    addresses = [first.serve(), second.serve()]
    second.leads = False
    with node(plan(addresses[:1], standbys=(addresses[1],))) as link:
        link.join(10)
        second.names, second.founder = dict(first.names), 0
        second.anchors, second.versions = [a.copy() for a in first.anchors], list(first.versions)
        second.seqs = dict(first.seqs)
        first.keeps = True
        order(link, 0, 1, 1.0, 1)
        until(lambda: first.waiting, "the push at the first hub")
        first.kill()
        answer = until(lambda: link.answer(0, 1), "the answer of the second hub")
        assert (answer.verdict, second.term) == (Verdict.MERGED, 2)
        assert exchange(link, 0, 2, 1.0, 2).version == 3
        assert [seq for _, _, seq, _ in second.pushed] == [2, 3]
        link.leave(10)
    assert second.left == {0}
    second.kill()


def test_a_hub_of_an_older_term_is_not_believed():
    first, second = MemoryHub(), MemoryHub()
    addresses = [first.serve(), second.serve()]
    second.leads = False
    with node(plan(addresses[:1], standbys=(addresses[1],))) as link:
        link.join(10)
        second.__dict__.update({k: v for k, v in first.__dict__.items() if k in ("names", "founder", "seqs")})
        second.anchors, second.versions = list(first.anchors), list(first.versions)
        first.leads = False
        until(lambda: second.heartbeats, "a heartbeat at the second hub")
        first.leads = True  # it comes back and believes that it still leads
        assert exchange(link, 0, 1, 1.0, 1).version == 2
        assert first.pushed == []
        assert second.heartbeats[-1].who.term == 2
        second.dead = True
        first.stubborn = True
        until(lambda: first.votes > 1, "the question to the old hub")
        second.dead = False
        assert exchange(link, 0, 2, 1.0, 2).version == 3
        assert first.pushed == []
    first.kill()
    second.kill()


@pytest.mark.parametrize("codec_down", ["bf16", "e3m0", "ternary", "topk"])
def test_anchors_that_come_as_deltas_have_the_bits_of_the_hub(codec_down):
    hub = MemoryHub(codec_down=codec_down)
    where = hub.serve()
    rng = np.random.default_rng(0)
    with (
        node(plan([where], codec_down=codec_down)) as link,
        node(plan([where], codec_down=codec_down, name="b")) as other,
    ):
        link.join(10)
        other.join(10)
        before = hub.pulled_bytes
        for seq in range(1, 4):
            exchange(link, 1, seq, rng.standard_normal(5000, np.float32), seq)
        exchange(other, 1, 1, rng.standard_normal(5000, np.float32), 1)
        assert hub.versions[1] == 5
        assert np.array_equal(other.anchors[1], hub.anchors[1])
        num_bytes = codec(codec_down).num_bytes(5000)
        # `other` is four versions behind: in 16 bits each, the whole is shorter.
        assert hub.pulled_bytes - before == 3 * num_bytes + min(4 * num_bytes, 20000)
        exchange(link, 1, 4, 0.0, 4)
        assert np.array_equal(link.anchors[1], hub.anchors[1])
    hub.kill()


@pytest.mark.parametrize("name", ["e3m0", "ternary", "topk"])
def test_all_that_was_pushed_is_merged_less_what_is_owed(hub, name):
    rng = np.random.default_rng(1)
    with node(plan([address(hub)], codec=name)) as link:
        link.join(10)
        pushed = np.zeros(5000)
        for seq in range(1, 9):
            if seq == 4:
                hub.refuse[1, seq + 1] = pb.REFUSED
            value = rng.standard_normal(5000, np.float32)
            refused = exchange(link, 1, seq, value, seq).verdict == Verdict.REFUSED
            assert refused == (seq == 4)
            pushed += 0 if refused else value
        merged = np.sum([value for _, _, _, value in hub.pushed], axis=0, dtype=np.float64)
        owed = link.residuals()[1]
        assert np.abs(owed).max() > 0.01
        assert np.allclose(merged, pushed - owed, atol=1e-4)
        hub.refuse[1, 10] = pb.DISTRUSTED
        exchange(link, 1, 9, 1.0, 9)
        assert not link.residuals()[1].any()


def test_what_was_owed_at_a_checkpoint_is_pushed_after_it(hub):
    with node(plan([address(hub)], codec="topk")) as link:
        link.residuals()[1][:] = 1
        link.join(10)
        exchange(link, 1, 1, 0.0, 1)
        assert hub.pushed[0][3].sum() > 30


def test_codecs_that_owe_nothing_have_no_residuals(hub):
    with node(plan([address(hub)], codec="int8")) as link:
        assert link.residuals() == {}


def test_data_is_leased_ahead_and_what_was_used_is_said(hub):
    with node(plan([address(hub)], samples_per_step=4)) as link:
        link.join(10)
        until(lambda: link.leases(), "a lease")
        assert list(link.leases()) == [(0, 16)]
        link.tell(Progress(steps=1, used=4, drawn=4))
        link.tell(Progress(steps=5, used=20, drawn=20))
        until(lambda: hub.used.get(0) == 16, "the report")
        until(lambda: sum(end - start for start, end in link.leases()) > 20, "more leases")
        assert next(iter(link.leases())) == (0, 16)
        link.leases(40)
        until(lambda: sum(end - start for start, end in link.leases()) >= 40, "what the trainer asks for")
        link.tell(Progress(steps=10, used=40, drawn=40))
        link.leave(10)
    assert sum(upto - start for start, upto in hub.used.items()) == 40
    assert hub.position < 80, "a node leases for 4 steps, and asks again when a third is used"


def test_a_trainer_that_waits_for_samples_as_the_run_ends_gets_them(hub):
    """Another node's push ends the run after this one has looked whether it goes on."""
    finished = {"finished": True, "progress": 1.0}
    with node(plan([address(hub)], samples_per_step=4)) as link:
        link.join(10)
        until(lambda: list(link.leases()) == [(0, 16)], "a lease")
        hub.news = finished
        until(lambda: link.news().finished, "the news")
        link.tell(Progress(steps=4, drawn=16))
        until(lambda: sum(end - start for start, end in link.leases(20)) >= 20, "what the trainer asks for")
        known = hub.position
        beats = len(hub.heartbeats)
        until(lambda: len(hub.heartbeats) > beats + 3, "more heartbeats")
        assert hub.position == known, "no more than it asks for"
        link.leave(10)


def test_a_stock_of_many_leases_is_there_before_the_next_heartbeat(hub):
    more = {"samples_per_step": 4, "lease_samples": 4, "heartbeat_s": 60.0}
    with node(plan([address(hub)], **more)) as link:
        link.join(10)
        until(lambda: hub.position >= 16, "a stock for four steps")


def test_a_lease_whose_reply_is_lost_with_the_hub_is_not_lost(hub):
    hub.broken = ["lease"]
    with node(plan([address(hub)], samples_per_step=4)) as link:
        link.join(10)
        until(lambda: link.leases(), "a lease")
        assert list(link.leases()) == [(0, 16)]
        assert hub.broken == []


def test_a_lease_that_the_hub_does_not_answer_holds_no_heartbeat_up_for_longer_than_one(hub, monkeypatch):
    """The lease waits as long as a heartbeat does, 2 s here, and not `call_timeout_s`."""
    release, limits = threading.Event(), []
    answer, call = hub.lease, HubClient.lease
    hub.lease = lambda request: (release.wait(20), answer(request))[1]
    monkeypatch.setattr(
        HubClient,
        "lease",
        lambda self, request, limit=None: limits.append(limit) or call(self, request, limit),
    )
    with node(plan([address(hub)], samples_per_step=4, call_timeout_s=60.0)) as link:
        link.join(10)
        until(lambda: limits, "a lease")
        before = len(hub.heartbeats)
        until(lambda: len(hub.heartbeats) > before, "the next heartbeat", limit_s=15)
        assert limits[0] == 2.0
        release.set()
        until(lambda: link.leases(), "a lease", limit_s=30)
        assert list(link.leases()) == [(0, 16)], "what nobody answered is not lost"


def test_what_the_trainer_tells_reaches_the_hub_and_what_the_hub_tells_reaches_the_trainer(hub):
    with node(plan([address(hub)])) as link:
        assert math.isinf(link.news().age_s)
        link.join(10)
        hub.news = {"pace_steps": 7, "round": 3, "progress": 0.5, "finished": True, "evaluates": True}
        link.tell(Progress(steps=5, tokens=50, busy_s=2.0, wait_s=0.5, loss=1.5))
        link.tell(Progress(steps=9, tokens=90, busy_s=4.0, wait_s=0.5, loss=1.25))
        until(lambda: link.news().finished, "the news")
        news = link.news()
        assert (news.pace_steps, news.round, news.progress, news.evaluates) == (7, 3, 0.5, True)
        assert news.age_s < 5
        heartbeat = until(lambda: next((b for b in hub.heartbeats if b.steps == 9), None), "the report")
        assert (heartbeat.tokens, heartbeat.wait_s, heartbeat.loss, heartbeat.state) == (
            90,
            0.5,
            1.25,
            "training",
        )
        assert heartbeat.steps_per_s == pytest.approx(9 / 4)
        exchange(link, 1, 1, 1.0, 1)
        heartbeat = until(lambda: next((b for b in hub.heartbeats if b.bytes_down >= 20000), None), "bytes")
        assert link.bytes_sent == heartbeat.bytes_up == 4 * (22 + 5000 + 5000)
        assert heartbeat.wire_s > 0


def test_an_exchange_without_steps_sends_nothing_and_brings_the_newest_anchor_once(hub):
    with node(plan([address(hub)])) as link, node(plan([address(hub)], name="b")) as other:
        link.join(10), other.join(10)
        sent, pulled = link.bytes_sent, hub.pulled_bytes
        mine = lambda: [each for each in hub.heartbeats if each.who.node == link.node]  # noqa: E731
        until(lambda: len(mine()) >= 2, "a second heartbeat, after the versions")
        first = until(lambda: asked(link, 1), "the answer")
        assert (first.version, first.verdict, hub.pulled_bytes) == (1, Verdict.NONE, pulled)
        exchange(other, 1, 1, 3.0, 1)
        newer = until(
            lambda: (found := asked(link, first.seq + 1)).version == 2 and found, "the newer anchor"
        )
        assert np.array_equal(link.anchors[1], np.arange(5000) + 97)
        assert (newer.verdict, link.bytes_sent) == (Verdict.NONE, sent)
        assert [number for number, *_ in hub.pushed] == [1]
        exchange(link, 1, newer.seq + 1, 2.0, 2)
        assert [(number, seq) for number, _, seq, _ in hub.pushed] == [(1, 1), (0, 2)], "numbers have no gap"


def asked(link, first):
    """Return the answer to the next exchange without steps."""
    seq = max(first, asked.last.get(id(link), 0) + 1)
    asked.last[id(link)] = seq
    return exchange(link, 1, seq, 9.0, 1, steps=0)


asked.last = {}


def test_a_node_that_the_hub_does_not_want_is_told_why(hub):
    with node(plan([address(hub)], shapes=(SHAPES[0], ((10,), (5,))))) as link:
        with pytest.raises(UserError, match="unit1 has another number of parameters"):
            link.join(10)
        with pytest.raises(UserError, match="another number"):
            link.answer(0, 1)


def test_leaving_without_a_hub_ends_at_the_deadline(hub):
    with node(plan([address(hub)])) as link:
        link.join(10)
        hub.kill()
        order(link, 0, 1, 1.0, 1)
        with pytest.raises(TimeoutError, match="to leave"):
            link.leave(0.3)
        with pytest.raises(AgentLost):
            until(lambda: link.answer(0, 1), "the end")


def test_nodes_that_have_left_leave_no_descriptors_behind(hub):
    def visit(name):
        with node(plan([address(hub)], name=name)) as link:
            link.join(10)
            link.leave(10)

    visit("first")
    before = psutil.Process().num_fds()
    for i in range(5):
        visit(f"n{i}")
    gc.collect()
    assert psutil.Process().num_fds() - before < 5


def test_leaving_pushes_what_is_under_way_first(hub):
    with node(plan([address(hub)])) as link:
        link.join(10)
        for unit in (0, 1):
            order(link, unit, 1, 1.0, 1)
        link.leave(10)
        assert link.answer(0, 1).verdict == link.answer(1, 1).verdict == Verdict.MERGED
    assert len(hub.pushed) == 2


def leased(link, samples):
    """Ask for so many samples and wait for them."""
    until(lambda: sum(end - start for start, end in link.leases(samples)) >= samples, "leases")


def test_a_push_says_what_it_has_used_before_any_report(hub):
    with node(plan([address(hub)], samples_per_step=4, heartbeat_s=60.0, expire_s=300.0)) as link:
        link.join(10)
        leased(link, 20)
        exchange(link, 0, 1, 0.5, 1, used=18)
        assert hub.calls == [("push", 0), ("used", 18)]
        assert sum(len(beat.consumed) for beat in hub.heartbeats) == 0
        hub.refuse[1, 2] = pb.REFUSED
        exchange(link, 1, 1, 0.5, 1, used=20)
        assert hub.calls[2:] == [("push", 1)], "a refused push has used nothing"


def test_blocks_that_are_used_up_are_reported_once_however_long_the_run_is(hub):
    with node(plan([address(hub)], samples_per_step=4)) as link:
        link.join(10)
        for step in range(10, 400, 10):
            leased(link, 4 * step)
            link.tell(Progress(steps=step, used=4 * step, drawn=4 * step))
            until(lambda n=4 * step: sum(u - s for s, u in hub.used.items()) == n, "the report")
        assert len(hub.used) > 20
        assert max(len(beat.consumed) for beat in hub.heartbeats[-5:]) <= 6


@pytest.fixture
def calls():
    """Return two hubs that split the units, and their pushes and uses in one list."""
    hubs, found = [MemoryHub(), MemoryHub()], []
    for made in hubs:
        made.calls = found
        made.serve()
    yield hubs, found
    for made in hubs:
        made.kill()


def test_another_hub_gets_a_push_only_when_the_hub_that_leases_knows_what_it_uses(calls):
    hubs, found = calls
    settings = {"samples_per_step": 4, "heartbeat_s": 0.5, "expire_s": 60.0, "call_timeout_s": 1.0}
    with node(plan([address(hub) for hub in hubs], **settings)) as link:
        link.join(10)
        leased(link, 20)
        for push, used in ((1, 8), (2, 12)):
            exchange(link, 1, push, 0.5, push, used=used)
            assert found == [("used", used), ("push", 1)]
            found.clear()
        where = address(hubs[0])
        hubs[0].kill()
        order(link, 1, 3, 0.5, 3, used=16)
        with pytest.raises(AssertionError, match="waited"):
            until(lambda: found, "nothing", limit_s=1.0)
        hubs[0].serve(where)
        until(lambda: link.answer(1, 3), "the answer")
        assert found == [("used", 16), ("push", 1)]


def test_another_hub_gets_a_push_in_the_end_if_the_hub_that_leases_is_gone(calls):
    hubs, found = calls
    settings = {"samples_per_step": 4, "heartbeat_s": 0.1, "expire_s": 1.0, "call_timeout_s": 1.0}
    with node(plan([address(hub) for hub in hubs], **settings)) as link:
        link.join(10)
        leased(link, 20)
        hubs[0].kill()
        exchange(link, 1, 1, 0.5, 1, used=8)
        exchange(link, 1, 2, 0.5, 2, used=12)
        assert found == [("push", 1)] * 2


def test_all_hubs_of_a_run_know_a_process_of_a_node_by_one_number_and_the_next_one_by_another(calls):
    """The journals of hubs that split the units are joined by it: see `aedit ledger`."""
    hubs, found = calls[0], []
    for _ in range(2):
        with node(plan([address(hub) for hub in hubs])) as link:
            link.join(10)
            link.leave(10)
        found.append({hub.processes[-1] for hub in hubs})
    assert [len(numbers) for numbers in found] == [1, 1]
    assert found[0] != found[1]
