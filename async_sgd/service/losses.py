"""Description of what a hub has lost, for its operator."""

from aedit.async_sgd.journal import Ledger
from aedit.proto.rpc import hub_pb2 as pb

_MOST_SHOWN = 8


def described(ledger: Ledger, claim: pb.Claim, node: int | None) -> str:
    """Return what is missing and what to do about it; the lock is held.

    Args:
        ledger: Of the hub that has lost something.
        claim: With a receipt that proves the loss. The numbers by unit are as its node says.
        node: Index of the node here; None if it is not known here.
    """
    receipt, (segment, offset) = claim.receipt, ledger.journal.position
    missing = "; ".join(_missing(ledger, claim, node)[:_MOST_SHOWN]) or "records of other nodes"
    return (
        f"the journal {receipt.epoch} has lost what was acknowledged: a node has a receipt up to byte"
        f" {receipt.offset} of segment {receipt.segment}; here the end is byte {offset} of segment {segment},"
        f" or other records are before it. Missing: {missing}. Copy the journal back, or promote the standby;"
        " `aedit hub --force-lead` goes on with what is left, and nodes must be started again"
    )


def _missing(ledger: Ledger, claim: pb.Claim, node: int | None) -> list[str]:
    """Return the pushes and versions that the node has seen and this hub does not have, by unit."""
    state = ledger.hub.state
    is_known = node is not None and node < len(state.members)
    received = state.members[node].received if node is not None and is_known else {}
    units, found = state.layout.units if state.layout else (), []
    for unit, (seq, version) in enumerate(zip(claim.seqs, claim.versions, strict=False)):
        name = units[unit].name if unit < len(units) else f"unit {unit}"
        here = state.units[unit].version if unit in state.units else 0
        if seq > received.get(unit, 0):
            found.append(f"{name}: pushes {received.get(unit, 0) + 1} to {seq} of the node")
        if version > here:
            found.append(f"{name}: versions {here + 1} to {version}")
    return found
