"""A paced node that also notes, at the wire, what it pushes, what is acknowledged, and what it receives.

python -m benchmarks.programs.chaos_witness '{"hub": ..., "name": "a", ...}'     fields of PacedNode
"""

import sys
import zlib
from pathlib import Path
from unittest.mock import patch

from aedit.proto.rpc import Download, HubClient, PullHead, PushHead, PushReply
from benchmarks.kit import paced_node
from benchmarks.kit.paced_node import Ledger


def main(words: list[str]) -> int:
    ledger = Ledger(Path(paced_node.of_json(words[0]).ledger))
    push, fetch = HubClient.push, HubClient.fetch

    def witnessed(
        client: HubClient, head: PushHead, data: memoryview, *, continues: bool = False
    ) -> PushReply:
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
        reply = push(client, head, data, continues=continues)
        if reply.accepted and not founds:
            ledger.note("acknowledged", **facts)
        return reply

    def received(client: HubClient, download: Download, *, again: bool = True) -> PullHead:
        head = fetch(client, download, again=again)
        facts = {"unit": download.request.unit, "version": head.version, "hub": client.address}
        ledger.note("received", **facts, sha256=head.sha256.hex())
        return head

    with patch.object(HubClient, "push", witnessed), patch.object(HubClient, "fetch", received):
        return paced_node.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
