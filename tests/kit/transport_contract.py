"""Contract of every transport. Each function runs on all nodes at once with the transport under test.

It checks what one node can see and returns a tensor, which must have the same bits on all nodes.
"""

import math

import pytest
import torch

from kit.waiting import until

LIMIT_S = 10.0


def numbers(node, size=6):
    return torch.randn(size, generator=torch.Generator().manual_seed(node))


def mean_of(weights, size=6):
    """Return the weighted mean of all nodes' `numbers`, in float64."""
    total = sum(weights)
    return sum(w * numbers(node, size).double() for node, w in enumerate(weights)) / total


def a_mean_is_weighted(transport, node, nodes):
    weights = [0.5 + other for other in range(nodes)]
    mean = transport.weighted_mean("k", numbers(node), weights[node]).result()
    torch.testing.assert_close(mean.value.double(), mean_of(weights), rtol=0, atol=1e-6)
    assert mean.value.dtype == torch.float32
    assert mean.total_weight.shape == ()
    assert mean.total_weight.item() == sum(weights)
    return mean.value


def a_weight_may_be_a_tensor(transport, node, nodes):
    mean = transport.weighted_mean("k", numbers(node), torch.tensor(node + 1.0)).result()
    torch.testing.assert_close(mean.value.double(), mean_of(range(1, nodes + 1)), rtol=0, atol=1e-6)
    return mean.value


def a_value_of_weight_zero_harms_nobody(transport, node, nodes):
    bad = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 3e38, 0.0])
    last = node == nodes - 1
    mean = transport.weighted_mean("k", bad if last else numbers(node), 0.0 if last else 1.0).result()
    if nodes > 1:
        torch.testing.assert_close(mean.value.double(), mean_of([1.0] * (nodes - 1)), rtol=0, atol=1e-6)
    assert mean.value.isfinite().all()
    assert mean.total_weight.item() == nodes - 1
    return mean.value


def all_weights_zero_give_zeros(transport, node, nodes):
    mean = transport.weighted_mean("k", torch.full((4,), math.nan), 0.0).result()
    assert torch.equal(mean.value, torch.zeros(4))
    assert mean.total_weight.item() == 0
    return mean.value


def one_value_of_weight_one_arrives_unchanged(transport, node, nodes):
    """Check that a single value is exact; healing and resuming rely on it."""
    mean = transport.weighted_mean("k", numbers(node, 1000) * 1e-3, float(node == 0)).result()
    assert torch.equal(mean.value, numbers(0, 1000) * 1e-3)
    return mean.value


def what_was_sent_may_change_at_once(transport, node, nodes):
    value, row = numbers(node), numbers(node).double()
    pending = transport.weighted_mean("k", value, 1.0)
    value.fill_(math.nan)
    rows = transport.gather("rows", row)
    row.fill_(math.nan)
    mean = pending.result().value
    torch.testing.assert_close(mean.double(), mean_of([1.0] * nodes), rtol=0, atol=1e-6)
    assert torch.equal(rows.result().rows, torch.stack([numbers(n).double() for n in range(nodes)]))
    return mean.contiguous()


def an_answer_belongs_to_the_caller(transport, node, nodes):
    value = torch.ones(5)
    first = transport.weighted_mean("a", value, 1.0).result().value
    first.fill_(-1.0 - node)
    # When this has arrived, every node has changed its first answer.
    second = transport.weighted_mean("b", value, 1.0).result().value
    assert torch.equal(value, torch.ones(5))
    assert torch.equal(first, torch.full((5,), -1.0 - node))
    return second


def many_keys_are_answered_out_of_order(transport, node, nodes):
    sizes = [1, 300, 7, 1, 64, 5000, 2, 33]
    asked = [transport.weighted_mean(f"k{i}", numbers(node, s) + i, 1.0) for i, s in enumerate(sizes)]
    rows = transport.gather("rows", torch.tensor([float(node)]))
    assert rows.result().rows.flatten().tolist() == list(range(nodes))
    answers = {i: asked[i].result().value for i in (5, 0, 7, 1, 6, 2, 4, 3)}
    for i, size in enumerate(sizes):
        expected = mean_of([1.0] * nodes, size) + i
        torch.testing.assert_close(answers[i].double(), expected, rtol=0, atol=2e-6)
    return torch.cat([answers[i] for i in range(len(sizes))])


def every_element_is_reduced(transport, node, nodes, sizes):
    """Check tensors of many sizes; torchft lost the tensors that did not fit the first bucket."""
    asked = [
        transport.weighted_mean(f"k{i}", torch.full((s,), 1.0 + node + i), 1.0) for i, s in enumerate(sizes)
    ]
    for i, (size, pending) in enumerate(zip(sizes, asked, strict=True)):
        assert torch.equal(pending.result().value, torch.full((size,), i + (nodes + 1) / 2))
    return torch.cat([pending.result().value for pending in asked])


def a_shape_survives(transport, node, nodes):
    value = numbers(node, 24).view(2, 3, 4)
    mean = transport.weighted_mean("k", value.transpose(0, 2), 1.0).result().value
    expected = mean_of([1.0] * nodes, 24).view(2, 3, 4).transpose(0, 2)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    return mean.contiguous()


def rows_come_in_one_order_and_one_is_mine(transport, node, nodes):
    row = torch.tensor([float(node), math.pi * node, math.inf, math.nan, 2.0**53 - 1], dtype=torch.float64)
    rows = transport.gather("k", row).result()
    assert rows.rows.shape == (nodes, 5)
    assert rows.rows.dtype == torch.float64
    assert rows.mine is not None
    torch.testing.assert_close(rows.rows[rows.mine], row, rtol=0, atol=0, equal_nan=True)
    assert sorted(rows.rows[:, 0].tolist()) == list(range(nodes))
    return rows.rows


def done_tells_and_never_waits(transport, node, nodes):
    """Let the last node send its part only after the others have seen that nothing is done."""
    last = node == nodes - 1
    if last:
        until(lambda: all(transport.read(f"looked/{n}") for n in range(nodes - 1)), "the others' look")
    mean = transport.weighted_mean("k", numbers(node), 1.0)
    rows = transport.gather("rows", torch.zeros(1))
    if not last:
        assert not mean.done()
        assert not rows.done()
        transport.post(f"looked/{node}", "yes")
    until(lambda: mean.done() and rows.done(), "the answer")
    return mean.result().value


def a_result_may_be_asked_for_again(transport, node, nodes):
    mean, rows = transport.weighted_mean("k", numbers(node), 1.0), transport.gather("r", numbers(node))
    value, gathered = mean.result().value.clone(), rows.result().rows.clone()
    assert mean.done()
    assert torch.equal(mean.result().value, value)
    assert torch.equal(rows.result().rows, gathered)
    return mean.result().value


def a_key_may_come_again(transport, node, nodes):
    """Use a key twice: rounds count up, but a retried resume asks for the same keys."""
    first = transport.weighted_mean("k", torch.full((2,), 1.0 + node), 1.0).result().value
    second = transport.weighted_mean("k", torch.full((2,), 10.0 + node), 1.0).result().value
    assert torch.equal(second, first + 9)
    return second


def notes_reach_everybody_and_the_first_stays(transport, node, nodes):
    assert transport.read("a") is None
    transport.gather("before", torch.zeros(1)).result()  # every node has called `done`
    if node == 0:
        transport.post("a", "one\ntwo")
        transport.post("a", "late")
        transport.post("b", "")
    until(lambda: transport.read("b") is not None, "the note")
    transport.post("a", f"later still, from {node}")
    transport.gather("between", torch.zeros(1)).result()
    transport.post(f"end/{node}", "x")
    until(lambda: all(transport.read(f"end/{n}") for n in range(nodes)), "the last notes")
    transport.gather("end", torch.zeros(1)).result()  # whoever keeps the notes stays until all have read
    assert transport.read("a") == "one\ntwo"
    assert transport.read("c") is None
    return torch.zeros(1)


def the_bytes_sent_are_counted(transport, node, nodes):
    before = transport.bytes_sent
    transport.weighted_mean("k", torch.zeros(1000), 1.0).result()
    mean_bytes = transport.bytes_sent - before
    transport.gather("r", torch.zeros(10)).result()
    assert 4000 <= mean_bytes <= 4008  # a weight may ride along
    assert transport.bytes_sent - before - mean_bytes == 80
    return torch.zeros(1)


def channels_are_apart(transport, node, nodes):
    """Use the same keys in two channels, in an order of each node's own, as models that land on arrival."""
    channels = [transport.channel(), transport.channel("named")]
    asked = {}
    for i in (0, 1) if node % 2 else (1, 0):
        value = torch.full((5,), 10.0 * i + node)
        asked[i] = [channels[i].weighted_mean("k", value, 1.0), channels[i].gather("r", value)]
    own = transport.gather("r", torch.tensor([-1.0]))
    middle = (nodes - 1) / 2
    for i, (mean, rows) in sorted(asked.items()):
        assert torch.equal(mean.result().value, torch.full((5,), 10 * i + middle))
        assert rows.result().rows[:, 0].tolist() == [10.0 * i + n for n in range(nodes)]
    assert own.result().rows.tolist() == [[-1.0]] * nodes
    for i, channel in enumerate(channels):
        channel.post(f"apart/{node}", str(i))
        until(lambda: all(channel.read(f"apart/{n}") == str(i) for n in range(nodes)), "the notes")  # noqa: B023
    assert transport.read("apart/0") is None
    assert channels[0].bytes_sent == channels[1].bytes_sent < transport.bytes_sent
    with pytest.raises(ValueError, match="must be another for each channel of a transport, got named"):
        transport.channel("named")
    return asked[1][0].result().value


PROMISES = [
    a_mean_is_weighted,
    a_weight_may_be_a_tensor,
    a_value_of_weight_zero_harms_nobody,
    all_weights_zero_give_zeros,
    one_value_of_weight_one_arrives_unchanged,
    what_was_sent_may_change_at_once,
    an_answer_belongs_to_the_caller,
    many_keys_are_answered_out_of_order,
    a_shape_survives,
    rows_come_in_one_order_and_one_is_mine,
    done_tells_and_never_waits,
    a_result_may_be_asked_for_again,
    a_key_may_come_again,
    notes_reach_everybody_and_the_first_stays,
    the_bytes_sent_are_counted,
    channels_are_apart,
]

BUCKETS = [(6, 6, 6), (12, 4), (3, 1 << 21, 1), (1,)]
"""Sizes at which torchft's buckets of 10 elements lose values, and one larger than any buffer."""
