"""A paced node that also writes down which pushes it sends, and which a hub acknowledges, at the wire.

python -m benchmarks.chaos_parts.witness '{"hub": "127.0.0.1:7000", "name": "a", ...}'     fields of PacedNode
"""

import sys
import zlib
from pathlib import Path
from unittest.mock import patch

from aedit.proto.wire.client import HubClient
from aedit.proto.wire.hub_pb2 import PushHead, PushReply
from benchmarks.kit import paced_node
from benchmarks.kit.paced_node import Ledger


def main(words: list[str]) -> int:
    ledger, push = Ledger(Path(paced_node.of_json(words[0]).ledger)), HubClient.push

    def witnessed(client: HubClient, head: PushHead, data: memoryview) -> PushReply:
        facts = {
            "node": head.who.node,
            "unit": head.unit,
            "number": head.seq,
            "steps": head.steps,
            "crc": zlib.crc32(data),
            "term": head.who.term,
            "hub": client.address,
        }
        founds = head.base == 0
        if not founds:
            ledger.note("offered", **facts)
        reply = push(client, head, data)
        if reply.accepted and not founds:
            ledger.note("acknowledged", **facts)
        return reply

    with patch.object(HubClient, "push", witnessed):
        return paced_node.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
