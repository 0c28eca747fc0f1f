"""Tests every transport against one contract (tests/kit/transport_contract.py)."""

import subprocess
import sys

import pytest
import torch
from kit import transport_contract
from kit.nodes import in_threads

from aedit.proto.transports import MemoryWorld

JOBS = "tests/dist_jobs/contract_jobs.py"


def check_equal_bits(answers):
    for answer in answers:
        assert torch.equal(answer.view(torch.uint8), answers[0].view(torch.uint8))


@pytest.mark.parametrize("promise", transport_contract.PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_in_memory(promise, nodes):
    check_equal_bits(in_threads(nodes, lambda transport, node: promise(transport, node, nodes)))


@pytest.mark.parametrize("sizes", transport_contract.BUCKETS)
def test_in_memory_every_element_is_reduced(sizes):
    job = lambda transport, node: transport_contract.every_element_is_reduced(transport, node, 3, sizes)  # noqa: E731
    check_equal_bits(in_threads(3, job))


@pytest.mark.parametrize("nodes", [1, 3])
def test_over_torch_every_promise_is_kept(world, nodes):
    """A traceback names the contract function that failed."""
    kept = world.run(JOBS, "keep_all", size=nodes)
    for name in kept[0]:
        check_equal_bits([answers[name] for answers in kept])


# -- deadlines, where the transports differ on purpose


@pytest.mark.parametrize(("kind", "key"), [("mean", "7/block.3"), ("gather", "7/open")])
def test_over_torch_a_node_that_never_comes_fails_the_wait_at_the_deadline_by_name(world, kind, key):
    args = {"kind": kind}
    met = world.run(JOBS, "wait_for_a_node_that_never_comes", size=3, args=args)
    assert met.pop(0) is None
    for message, waited_s in met:
        assert key in message
        assert "0.5 s" in message
        assert waited_s < 5


@pytest.mark.parametrize("numel", [4, 5, 3, 100])
@pytest.mark.parametrize("swaps", [(), (1,)], ids=["one order", "other orders"])
def test_over_torch_own_collectives_of_any_size_keep_apart_from_those_of_the_transport(world, numel, swaps):
    found = world.run(JOBS, "beside_own_collectives", size=2, args={"numel": numel, "swaps": swaps})
    assert found == [[[3.0], [21.0], [100.5], [7.0, 8.0]]] * 2


def test_over_torch_groups_are_independent_of_those_that_ranks_have_made_and_destroyed(world):
    assert world.run(JOBS, "survive_other_groups", size=3) == [
        (2.0, 11.0, [0.0, 2.0]),
        None,
        (2.0, 11.0, [0.0, 2.0]),
    ]


def test_over_torch_channels_of_other_names_are_refused_on_all_nodes(world):
    errors = world.run(JOBS, "name_channels", size=2, args={"names": ["actor", "critic"]})
    assert "channel 1 of the transport is 'actor' on node 0 and 'critic' on node 1" in errors[0]
    assert "channel 1 of the transport is 'critic' on node 1 and 'actor' on node 0" in errors[1]


def test_over_torch_a_channel_that_a_node_does_not_make_fails_at_the_deadline_by_name(world):
    error, none = world.run(JOBS, "name_channels", size=2, args={"names": ["actor", None]})
    assert none is None
    assert error.startswith("actor: waited 0.5 s for all nodes to make this channel")


def test_in_memory_the_second_of_two_nodes_with_other_names_is_refused():
    place = MemoryWorld(2)
    place.node(0).channel("actor")
    with pytest.raises(ValueError, match="is 'critic' on node 1 and 'actor' on node 0"):
        place.node(1).channel("critic")


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", 3])
def test_a_name_of_a_channel_is_a_text_that_can_begin_a_key(name):
    with pytest.raises(ValueError, match="name must be a text without slash and line break"):
        MemoryWorld(1).node(0).channel(name)


def test_over_torch_closing_leaves_no_thread(world):
    assert world.run(JOBS, "open_and_close", size=2) == [[], []]


PROGRAM = """
import atexit, threading
import torch.distributed as dist
from aedit import TorchTransport

names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print(names()))  # runs last
dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=0, world_size=1)
transport = TorchTransport()
assert len(names()) == 2
dist.destroy_process_group()
"""


def test_over_torch_a_program_that_does_not_close_ends_without_a_thread_inside_the_store(tmp_path):
    program = PROGRAM.replace("{FILE}", str(tmp_path / "store"))
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


def test_in_memory_the_answer_is_over_those_who_came_by_the_deadline():
    place = MemoryWorld(3, timeout_s=0.05)
    first, second, late = (place.node(n) for n in range(3))
    asked = [
        first.weighted_mean("k", torch.tensor([1.0]), 1.0),
        second.weighted_mean("k", torch.tensor([4.0]), 2.0),
    ]
    assert [pending.result().value.item() for pending in asked] == [3.0, 3.0]
    answer = late.weighted_mean("k", torch.tensor([100.0]), 1.0)
    assert answer.done()
    assert answer.result().value.item() == 3.0
    assert answer.result().total_weight.item() == 3


def test_in_memory_rows_are_those_of_who_came_by_the_deadline():
    place = MemoryWorld(3, timeout_s=0.05)
    transports = [place.node(n) for n in range(3)]
    asked = [transports[n].gather("k", torch.tensor([float(n)])) for n in (2, 0)]
    assert [pending.result().rows.tolist() for pending in asked] == [[[0.0], [2.0]]] * 2
    assert [pending.result().mine for pending in asked] == [1, 0]
    late = transports[1].gather("k", torch.tensor([1.0])).result()
    assert late.mine is None
    assert late.rows.tolist() == [[0.0], [2.0]]


def test_in_memory_nobody_waits_for_a_node_that_has_left():
    place = MemoryWorld(3, timeout_s=60)
    first, second, gone = (place.node(n) for n in range(3))
    asked = first.weighted_mean("k", torch.tensor([1.0]), 1.0)
    second.weighted_mean("k", torch.tensor([3.0]), 1.0)
    assert not asked.done()
    gone.close()
    assert asked.done()
    assert asked.result().value.item() == 2
