"""Jobs of tests/test_contract.py.

The transport contract (tests/kit/transport_contract.py) on `TorchTransport`.
"""

import threading
import time

import torch
from kit import transport_contract
from kit.waiting import until

from aedit.proto.transports.c10d import TorchTransport
from aedit.proto.transports.transport import PeersMissing


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


def open_and_close(rank, size):
    """Open and close a transport; return the names of the threads that are left."""
    before = set(threading.enumerate())
    transport = TorchTransport(timeout_s=transport_contract.LIMIT_S)
    transport.gather("k", torch.zeros(1)).result()
    transport.close()
    return [t.name for t in set(threading.enumerate()) - before if "board" in t.name]
