"""A stranger's node of the table, without our checks: `python dht_stranger.py MADDR KEY`.

It reads a line of JSON, [[subkey or null, value, lifetime in seconds], ...], both in hexadecimal, stores each
of them under KEY at all nodes that it finds, and writes how many were taken.
"""

import asyncio
import json
import sys
import time


async def main(maddr, key):
    from hivemind.dht.node import DHTNode

    node = await DHTNode.create(initial_peers=[maddr], client_mode=True, no_listen=True, nat_port_map=False)
    taken = 0
    for subkey, value, lasts_s in json.loads(sys.stdin.readline()):
        options = {} if subkey is None else {"subkey": bytes.fromhex(subkey)}
        taken += await node.store(
            key, bytes.fromhex(value), time.time() + lasts_s, exclude_self=True, **options
        )
    print(taken, flush=True)
    await node.shutdown()


asyncio.run(main(*sys.argv[1:]))
