"""`aedit audit PROOF.json`: check a proof that the owner of a part has given nodes different anchors."""

from pathlib import Path

from aedit.proto.rpc import parsed
from aedit.proto.swarm import read_proof
from aedit.types import UserError, printable


def audit_proof(path: Path) -> int:
    """Print what the file proves, and return 1, as for a server that fails.

    Raises UserError if it proves nothing.
    """
    try:
        found = read_proof(path)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    place = found.statement
    if place is None:
        raise UserError(f"{path}: two cards of one peer, which two processes with one key cause as well")
    print(f"PROVEN: the peer with the key {found.public_key.hex()}")
    print(f"has signed two values of {place.described()} of run {printable(place.run)},")
    print(f"journal {place.lineage}:")
    for data in (found.one, found.other):
        print(f"  SHA-256 {parsed(data).sha256.hex()}")
    return 1
