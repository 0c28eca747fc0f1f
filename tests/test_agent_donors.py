"""Tests that new nodes get their anchors from other nodes, and continue elsewhere when a donor dies."""

import hashlib
import threading
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import pytest
from kit.agents import MemoryHub, exchange, node, plan
from kit.waiting import until

from aedit.proto.agent.connections import Donor
from aedit.proto.rpc import Limits, Refusal, Server, Service, donor_service, frames
from aedit.proto.rpc import hub_pb2 as pb

SHAPES = (((3, 5), (7,)), ((4 * 2**20,),))
SIZE = 16 * 2**20
HERE = "127.0.0.1:0"


@pytest.fixture
def hub():
    made = MemoryHub(shapes=SHAPES)
    made.serve()
    yield made
    made.kill()


def of(hub, **changes):
    return plan([hub.server.address], shapes=SHAPES, **changes)


def with_anchors(hub):
    """Return the hub of a founded run."""
    rng = np.random.default_rng(0)
    hub.anchors = [rng.standard_normal(numel, np.float32) for numel in hub.numels]
    hub.versions, hub.founder = [1, 1], 7
    return hub


@contextmanager
def donors(hub, count, dies_at=None):
    """Yield nodes that hold the hub's anchors; `asked` lists what they were asked for unit 1.

    The first one asked for it dies after `dies_at` bytes.
    """
    asked, servers, lock = [], [], threading.Lock()

    def service(i):
        plain = Donor("test", hub.anchors, hub.versions, [threading.Lock()] * 2)

        def behaviour(message, context):
            request = pb.PullRequest.FromString(message)
            head, data = plain.pull(request)
            with lock:
                asked.append(request.offset) if request.unit else None
                dies = request.unit == 1 and dies_at is not None and len(asked) == 1
            for chunk in frames.chunks(head.SerializeToString(), data, offset=request.offset):
                if dies and chunk.offset >= dies_at:
                    threading.Thread(target=servers[i].stop, args=(0,)).start()
                    context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
                yield frames.pack_chunk(chunk)

        return Service("aedit.v1.Exchange", {"Pull": grpc.unary_stream_rpc_method_handler(behaviour)})

    for i in range(count):
        servers.append(Server([service(i)], HERE))
    hub.donors = {90 + i: server.address for i, server in enumerate(servers)}
    try:
        yield asked
    finally:
        for server in servers:
            server.stop(0)


def bytes_down(hub):
    return until(lambda: hub.heartbeats and hub.heartbeats[-1], "a heartbeat").bytes_down


def test_a_node_takes_its_anchors_from_another_one_and_gives_them_on(hub):
    with node(of(hub, donor=HERE)) as first:
        first.join(10)
        exchange(first, 1, 1, 0.5, 1)
        before = hub.pulled_bytes
        with node(of(hub, donor=HERE, name="b"), start=[0, 0]) as second:
            assert second.join(10) == (1, 2)
            del hub.donors[first.node]
            with node(of(hub, name="c"), start=[0, 0]) as third:
                assert third.join(10) == (1, 2)
                for link in (second, third):
                    assert all(np.array_equal(a, b) for a, b in zip(link.anchors, hub.anchors, strict=True))
        assert hub.pulled_bytes == before


def test_many_who_join_at_once_hardly_burden_the_hub(hub):
    with ExitStack() as held:
        first = held.enter_context(node(of(hub, donor=HERE)))
        first.join(10)
        joiners = [of(hub, donor=HERE, name=f"j{i}") for i in range(6)]
        links = [held.enter_context(node(made, start=[0, 0])) for made in joiners]
        threads = [threading.Thread(target=link.join, args=(30,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for link in links:
            assert link.join(1) == (1, 1)
            assert np.array_equal(link.anchors[1], hub.anchors[1])
        assert sorted(link.node for link in links) == list(range(1, 7))


@pytest.mark.parametrize("count", [1, 2])
def test_when_a_donor_dies_halfway_no_more_than_a_tenth_is_sent_again(hub, count):
    """If there is no other donor, the hub sends the rest."""
    with donors(with_anchors(hub), count, dies_at=SIZE // 2) as asked, node(of(hub), start=[0, 0]) as link:
        assert link.join(20) == (1, 1)
        assert np.array_equal(link.anchors[1], hub.anchors[1])
        until(lambda: bytes_down(hub) > SIZE, "the report")
        assert bytes_down(hub) < 1.1 * SIZE
        assert all(offset >= 0.4 * SIZE for offset in asked[1:])
        assert len(asked) == count


def test_when_a_donor_dies_and_the_run_has_moved_on_the_newest_anchor_is_taken_whole(hub):
    with donors(with_anchors(hub), 1, dies_at=SIZE // 2):
        old = hub.anchors[1]
        pull = hub.pull

        def moved_on(request):
            if request.unit == 1 and hub.versions[1] == 1:
                hub.anchors[1], hub.versions[1] = old + 1, 2
            return pull(request)

        hub.pull = moved_on
        hub.server.stop(0)
        hub.serve()
        with node(of(hub), start=[0, 0]) as link:
            assert link.join(20) == (1, 2)
            assert np.array_equal(link.anchors[1], old + 1)


def test_damage_on_the_way_is_found(hub):
    plain = Donor("test", with_anchors(hub).anchors, hub.versions, [threading.Lock()] * 2)

    def wrong(request):
        head, data = plain.pull(request)
        changed = bytearray(data)
        changed[5] ^= 1
        return head, memoryview(changed)

    server = Server([donor_service(wrong, Limits(), 2)], HERE)
    hub.donors = {9: server.address}
    with node(of(hub), start=[0, 0]) as link:
        assert link.join(20) == (1, 1)
        assert all(np.array_equal(a, b) for a, b in zip(link.anchors, hub.anchors, strict=True))
    server.stop(0)


def test_anchors_of_a_donor_that_lies_are_not_used_whatever_hash_it_names(hub):
    """As found: a member's donor address gave joiners any anchors."""
    forged = [np.full(anchor.size, 6.66, np.float32) for anchor in with_anchors(hub).anchors]
    given = []

    def lie(request):
        given.append(request.unit)
        return liar.pull(request)

    liar = Donor("test", forged, hub.versions, [threading.Lock()] * 2)
    server = Server([donor_service(lie, Limits(), 2)], HERE)
    hub.donors = {9: server.address}
    with node(of(hub), start=[0, 0]) as link:
        assert link.join(20) == (1, 1)
        assert all(np.array_equal(a, b) for a, b in zip(link.anchors, hub.anchors, strict=True))
    server.stop(0)
    assert sorted(given) == [0, 1]


def test_a_donor_gives_only_what_it_has_to_those_of_its_run():
    anchors, guards = [np.ones(5, np.float32), np.zeros(3, np.float32)], [threading.Lock() for _ in range(2)]
    donor = Donor("test", anchors, [4, 0], guards)
    head, data = donor.pull(pb.PullRequest(who=pb.Who(run="test"), unit=0))
    anchors[0][:] = 2
    assert bytes(data) == np.ones(5, np.float32).tobytes()
    assert (head.version, head.sha256) == (4, hashlib.sha256(data).digest())
    for run, unit, code in (
        ("test", 1, "FAILED_PRECONDITION"),
        ("test", 2, "INVALID_ARGUMENT"),
        ("other", 0, "NOT_FOUND"),
    ):
        with pytest.raises(Refusal) as refused:
            donor.pull(pb.PullRequest(who=pb.Who(run=run), unit=unit))
        assert refused.value.code.name == code
    with guards[0], pytest.raises(Refusal, match="changes just now"):
        donor.pull(pb.PullRequest(who=pb.Who(run="test"), unit=0))


def test_a_donor_that_is_gone_is_asked_once_and_not_again_for_every_unit(hub):
    asked = []

    def behaviour(message, context):
        asked.append(pb.PullRequest.FromString(message).unit)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    service = Service("aedit.v1.Exchange", {"Pull": grpc.unary_stream_rpc_method_handler(behaviour)})
    server = Server([service], HERE)
    with_anchors(hub).donors = {9: server.address}
    try:
        with node(of(hub, streams=1), start=[0, 0]) as link:
            assert link.join(20) == (1, 1)
            assert np.array_equal(link.anchors[1], hub.anchors[1])
    finally:
        server.stop(0)
    assert len(asked) == 1
