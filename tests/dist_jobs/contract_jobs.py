"""Jobs of tests/test_contract.py.

The transport contract (tests/kit/transport_contract.py) on `TorchTransport`.
"""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from kit import transport_contract
from kit.waiting import until

from aedit.proto.transports import PeersMissing, TorchTransport


def keep_all(rank, size):
    """Return the result of every contract function on this node, by name.

    One transport serves all of them, because starting one is slow.
    """
    transport = TorchTransport(timeout_s=transport_contract.LIMIT_S)
    try:
        kept = {promise.__name__: promise(transport, rank, size) for promise in transport_contract.PROMISES}
        for sizes in transport_contract.BUCKETS:
            kept[f"sizes {sizes}"] = transport_contract.every_element_is_reduced(transport, rank, size, sizes)
        return kept
    finally:
        transport.close()


def wait_for_a_node_that_never_comes(rank, size, kind):
    """Return the error that the other nodes get and how long they waited for it; None on the missing node."""
    transport = TorchTransport(timeout_s=transport_contract.LIMIT_S)
    transport.timeout_s = 0.5
    try:
        if rank == 0:  # it keeps the notes, so it must be the last to go
            until(lambda: all(transport.read(f"gave up/{n}") for n in range(1, size)), "the end")
            return None
        told = _wait_in_vain(transport, kind)
        transport.post(f"gave up/{rank}", "x")
        return told
    finally:
        transport.close()


def _wait_in_vain(transport, kind):
    value = torch.ones(4)
    mean = kind == "mean"
    began = time.monotonic()
    pending = transport.weighted_mean("7/block.3", value, 1.0) if mean else transport.gather("7/open", value)
    assert not pending.done()
    try:
        pending.result()
    except PeersMissing as error:
        return str(error), time.monotonic() - began


def beside_own_collectives(rank, size, numel, swaps):
    """Return the loop's own sums over the default group, and the transport's mean and rows beside them.

    All nodes have one order of their own collectives, and one of the transport's, but those of the transport
    begin later on the nodes in `swaps`, as those of a round do.
    """
    transport = TorchTransport(timeout_s=transport_contract.LIMIT_S)
    own, other = torch.full((numel,), 1.0 + rank), torch.full((numel,), 10.0 + rank)
    of_round = [
        lambda: transport.weighted_mean("k", torch.full((4,), 100.0 + rank), 1.0),
        lambda: transport.gather("r", torch.full((4,), 7.0 + rank)),
    ]
    of_loop = [partial(dist.all_reduce, value, async_op=True) for value in (own, other)]
    begun = [begin() for begin in ([*of_loop, *of_round] if rank in swaps else [*of_round, *of_loop])]
    (mean, rows), works = (begun[2:], begun[:2]) if rank in swaps else (begun[:2], begun[2:])
    for work in works:
        work.wait()
    found = [own.unique(), other.unique(), mean.result().value.unique(), rows.result().rows[:, 0]]
    transport.close()
    return [value.tolist() for value in found]


def survive_other_groups(rank, size):
    """Use a transport over a subgroup whose ranks have made other numbers of groups; outlive all groups."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member of the group"):
            TorchTransport(group)
        return None
    transport = TorchTransport(group, timeout_s=transport_contract.LIMIT_S)
    channel = transport.channel()
    dist.destroy_process_group(group)
    before = channel.weighted_mean("k", torch.tensor([1.0 + rank]), 1.0).result().value.item()
    dist.destroy_process_group()
    after = channel.weighted_mean("k", torch.tensor([10.0 + rank]), 1.0).result().value.item()
    rows = transport.channel("late").gather("k", torch.tensor([float(rank)])).result().rows.flatten().tolist()
    transport.close()
    with pytest.raises(ValueError, match="this TorchTransport is closed"):
        channel.gather("k", torch.zeros(1))
    return before, after, rows


def name_channels(rank, size, names):
    """Return the error on making a channel with the name of this rank; None: this rank makes none."""
    transport = TorchTransport(timeout_s=transport_contract.LIMIT_S)
    transport.timeout_s = 0.5 if None in names else transport_contract.LIMIT_S
    try:
        if names[rank] is None:
            until(lambda: transport.read("gave up") is not None, "the end")
            return None
        transport.channel(names[rank])
    except (ValueError, PeersMissing) as error:
        transport.post("gave up", "x")
        return str(error)
    finally:
        transport.close()


def open_and_close(rank, size):
    """Open and close a transport; return the names of the threads that are left."""
    before = set(threading.enumerate())
    transport = TorchTransport(timeout_s=transport_contract.LIMIT_S)
    transport.gather("k", torch.zeros(1)).result()
    transport.close()
    return [t.name for t in set(threading.enumerate()) - before if "board" in t.name]
