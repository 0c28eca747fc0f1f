"""Process with a node of hivemind's DHT: `python -m aedit.proto.dht.dht_process PARENT`.

It reads JSON lines from standard input: first the settings, then the card to announce whenever it changes. It
writes JSON lines to standard output: `p2pd`, then `found` in every round, or `error`. It ends with its
parent, when p2pd has ended, and when the table answers nothing any more. What it finds, others have written:
the parent takes it as hints.
"""

import asyncio
import base64
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from aedit.proto.dht.child import Say, run_child
from aedit.proto.swarm import decoded_card

MOST_RECORDS = 512
"""Records that are kept of one run, and reported in a round."""
START_S = 40.0
CALL_S = 8.0
_PING_S = 3.0
_MOST_FAILURES = 3
_SKEW_EVERY_S = 10.0
_MOST_ASKED = 5
_MOST_NEIGHBOURS = 16
_MOST_LEASE_S = 300.0
_CLOCKS_S = 60.0
"""A record may expire so much later than its lease, as clocks differ."""

ANY_RUN = ""
"""In place of a run's name: the cards of all runs of a table, for those who know nothing but an address."""


def record_key(run: str) -> str:
    """Return the key under which the cards of a run are stored, each under its public key."""
    return f"aedit peers 1/{run}"


class CardsOnly:
    """Validator of a DHT node: it stores signed cards under the keys of their run and of all runs only.

    Without it any peer could store anything under any key, of any size, for ten years.
    """

    def __init__(
        self, key_of: Callable[[str], bytes], loads: Callable[[bytes], Any], allow: list[str]
    ) -> None:
        """Create a validator.

        Args:
            key_of: Returns the identifier in the table of a run's key.
            loads: Reads a value of the table.
            allow: Public keys in hexadecimal of the peers whose cards are stored; empty: those of all.
        """
        self._key_of, self._loads, self._allow = key_of, loads, frozenset(allow)
        self._places: Callable[[bytes], list[tuple[bytes, bytes]]] = lru_cache(4 * MOST_RECORDS)(self._read)

    def validate(self, record: Any) -> bool:
        """Return whether a record may be stored or believed to be one."""
        if record.expiration_time > time.time() + _MOST_LEASE_S + _CLOCKS_S:
            return False
        try:
            return (record.key, self._loads(record.subkey)) in self._places(record.value)
        except Exception:  # of the reader of untrusted bytes
            return False

    def sign_value(self, record: Any) -> bytes:
        """Return the value as it is: a card is signed already."""
        return record.value  # type: ignore[no-any-return]

    def strip_value(self, record: Any) -> bytes:
        """Return the value as it is."""
        return record.value  # type: ignore[no-any-return]

    def _read(self, value: bytes) -> list[tuple[bytes, bytes]]:
        """Return the keys and subkeys where this value may be; none if it is no card."""
        try:
            card = decoded_card(self._loads(value))
        except Exception:
            return []
        if self._allow and card.public_key.hex() not in self._allow:
            return []
        return [(self._key_of(run), card.public_key) for run in (card.run, ANY_RUN)]


async def start_node(settings: dict[str, Any]) -> Any:
    """Return a started node. Raises whatever hivemind raises."""
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    key_of = lambda run: DHTID.generate(record_key(run)).to_bytes()  # noqa: E731
    return await DHTNode.create(
        initial_peers=settings["initial_peers"] or None,
        host_maddrs=settings["listen"],
        announce_maddrs=settings["announce"] or None,
        identity_path=settings["identity"],
        client_mode=settings["client"],
        no_listen=settings["client"],
        use_relay=True,
        nat_port_map=False,
        # It would start a second daemon to ask. Two peers with one identity do not get far.
        check_if_identity_free=False,
        startup_timeout=START_S / 2,
        wait_timeout=_PING_S,
        # A wrong clock, here or there, is reported by `skew_s` instead of ending the start.
        strict=False,
        record_validator=CardsOnly(key_of, MSGPackSerializer.loads, settings["allow"]),
    )


async def skew_s(node: Any) -> float | None:
    """Return how far the clocks of other peers are ahead of ours (median); None if no peer answers."""
    from hivemind.proto import dht_pb2

    async def ask(peer: Any) -> float:
        began = time.time()
        request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
        reply = await node.protocol.get_stub(peer).rpc_ping(request, timeout=_PING_S)
        ended = time.time()
        ahead, unknown = float(reply.dht_time) - (began + ended) / 2, (ended - began) / 2
        return max(ahead - unknown, 0.0) + min(ahead + unknown, 0.0)

    peers = list(node.protocol.routing_table.peer_id_to_uid)
    asked = [ask(peer) for peer in random.sample(peers, min(_MOST_ASKED, len(peers)))]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found = [one for one in answers if isinstance(one, float) and one == one]
    return statistics.median(found) if found else None


def prune(node: Any) -> None:
    """Drop surplus records of each run: any peer may make keys, and hivemind keeps every record."""
    for storage in (node.protocol.storage, node.protocol.cache):
        for _, held in list(storage.items()):
            surplus = len(held.value) - MOST_RECORDS
            if surplus > 0 and not isinstance(held.value, bytes):
                for subkey in random.sample(list(held.value.data), surplus):
                    del held.value[subkey]


class Rounds:
    """Rounds of one node: announce our card, look for others, compare clocks."""

    def __init__(self, node: Any, settings: dict[str, Any], say: Say) -> None:
        self._node, self._say = node, say
        self._run, self._every_s = str(settings["run"]), float(settings["every_s"])
        self._known = [str(maddr) for maddr in settings["known"]]
        self._card: dict[str, Any] = {}
        self._stored_s = self._asked_s = float("-inf")
        self._skew_s: float | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Take a card to announce, with the next renewal: it is a hint, and need not be the newest."""
        self._card = message

    async def run(self) -> None:
        """Make rounds until p2pd has ended, or several rounds in a row have failed."""
        failures = 0
        while failures < _MOST_FAILURES:
            if self._node.p2p._child.returncode is not None:
                self._say(error="p2pd has ended")
                return
            try:
                await self._round()
                failures = 0
            except Exception as error:  # of hivemind, or a timeout
                failures += 1
                self._say(error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._every_s)

    async def _round(self) -> None:
        now = time.monotonic()
        if not self._node.protocol.routing_table.peer_id_to_uid:
            await self._join()
        if self._card and now - self._stored_s >= self._card["lease_s"] / 3:
            await self._store()
            self._stored_s = now
        held = await asyncio.wait_for(self._node.get(record_key(self._run), latest=True), CALL_S)
        records = list(held.value.values()) if held and isinstance(held.value, dict) else []
        cards = [one.value for one in records if isinstance(one.value, bytes)]
        if now - self._asked_s >= _SKEW_EVERY_S:
            self._skew_s, self._asked_s = await asyncio.wait_for(skew_s(self._node), CALL_S), now
        prune(self._node)
        chosen = random.sample(cards, min(MOST_RECORDS, len(cards)))
        maddrs: list[str] = []
        with suppress(ValueError):  # a client has none
            maddrs = [str(maddr) for maddr in await self._node.get_visible_maddrs(latest=True)]
        peers = await asyncio.wait_for(self._node.p2p.list_peers(), CALL_S)
        others = [f"{maddr}/p2p/{peer.peer_id.to_base58()}" for peer in peers for maddr in peer.addrs]
        self._say(
            found=[base64.b64encode(card).decode() for card in chosen],
            skew_s=self._skew_s,
            maddrs=maddrs,
            neighbours=random.sample(others, min(_MOST_NEIGHBOURS, len(others))),  # for the next start
        )

    async def _join(self) -> None:
        """Call nodes that are known while there is no other: each may have begun alone, or been cut off."""
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        async def call(maddr: str) -> None:
            address, _, name = maddr.rpartition("/p2p/")
            peer = PeerID.from_base58(name)
            if peer != self._node.peer_id:
                await self._node.p2p._client.connect(peer, [Multiaddr(address)])
                await self._node.protocol.call_ping(peer)

        calls = [call(maddr) for maddr in random.sample(self._known, min(_MOST_ASKED, len(self._known)))]
        with suppress(TimeoutError):  # errors are those of nodes that are not there
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CALL_S)

    async def _store(self) -> None:
        data, expires = base64.b64decode(self._card["card"]), time.time() + self._card["lease_s"]
        keys = [record_key(self._run), record_key(ANY_RUN)]
        subkeys = [decoded_card(data).public_key] * 2
        stored = self._node.store_many(keys, [data] * 2, expires, subkeys=subkeys)
        if not all((await asyncio.wait_for(stored, CALL_S)).values()):
            raise RuntimeError("no node of the table has stored our card")


async def _lines() -> AsyncIterator[dict[str, Any]]:
    """Yield the messages on standard input until it is closed."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield json.loads(line)


async def _serve(say: Say) -> None:
    messages = _lines()
    settings = await anext(messages)
    node = await asyncio.wait_for(start_node(settings), START_S)
    rounds = Rounds(node, settings, say)

    async def listen() -> None:
        async for message in messages:
            rounds.take(message)

    tasks = [asyncio.create_task(listen()), asyncio.create_task(rounds.run())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    with suppress(TimeoutError):
        await asyncio.wait_for(node.shutdown(), 2.0)


if __name__ == "__main__":
    run_child(lambda say: asyncio.run(_serve(say)))
