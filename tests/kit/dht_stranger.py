"""A stranger's node of the table, without our checks: `python dht_stranger.py MADDR KEY`.

It reads a line of JSON, [[subkey or null, value, lifetime in seconds], ...], both in hexadecimal, stores each
of them under KEY at all nodes that it finds, and writes how many were taken. A record that no node has taken
is sent again where others were taken: hivemind does not tell a refusal from nodes that were slow to answer.
"""

import asyncio
import json
import sys
import time

TRIES = 4
PAUSE_S = 1.0


async def main(maddr, key):
    from hivemind.dht.node import DHTNode

    node = await DHTNode.create(initial_peers=[maddr], client_mode=True, no_listen=True, nat_port_map=False)
    records = json.loads(sys.stdin.readline())
    left = records
    for number in range(TRIES):
        if number:
            if not 0 < len(left) < len(records):
                break
            node.blacklist.clear()  # else a node that was slow once is not asked
            await asyncio.sleep(PAUSE_S)
        tried, left = left, []
        for subkey, value, lasts_s in tried:
            options = {} if subkey is None else {"subkey": bytes.fromhex(subkey)}
            expires = time.time() + lasts_s
            if not await node.store(key, bytes.fromhex(value), expires, exclude_self=True, **options):
                left.append([subkey, value, lasts_s])
    print(len(records) - len(left), flush=True)
    await node.shutdown()


asyncio.run(main(*sys.argv[1:]))
