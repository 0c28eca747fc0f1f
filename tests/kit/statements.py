"""Statements of owners, with values that a number stands for."""

import hashlib
from dataclasses import replace

from aedit.proto.rpc import Statement, signed
from kit.swarm import RUN, key_of

OWNER = key_of(77)


def statement_of(value=0, *, key=OWNER, **changes):
    """Return a statement that is in bounds unless `changes` say otherwise."""
    made = Statement(
        run=RUN,
        part=1,
        public_key=key.public,
        lineage="0123456789abcdef",
        term=3,
        unit=5,
        version=7,
        sha256=hashlib.sha256(bytes([value])).digest(),
    )
    return replace(made, **changes)


def statement(value=0, *, key=OWNER, **changes):
    """Return a signed statement as it is on the wire."""
    return signed(statement_of(value, key=key, **changes), key)
