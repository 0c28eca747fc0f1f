"""Process with an averager of hivemind: `python -m aedit.proto.dht.averaging_process PARENT`.

It reads JSON lines from standard input: first the settings, then a request for each round. It writes JSON
lines to standard output: `maddrs` once it is up, `round` for each request, `compared` some time after it, or
`error`. The vectors are in memory that it shares with its parent. It ends with its parent, when its input is
closed, and after a round that has failed with a group: hivemind leaks memory then, and may never end.
"""

import base64
import hashlib
import json
import os
import secrets
import select
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.proto.dht.child import Say, run_child

WIDTH = 256
_SEED = 20160412


def sketch(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `WIDTH` sums of the elements with random signs, and the norm of the vector; float32.

    The distance of sketches estimates that of the vectors (CountSketch, Charikar et al. 2002). Averages that
    hivemind gives to two peers differ by rounding even if nothing went wrong, because each peer adds a
    difference to its own values: no hash of them is ever equal.
    """
    buckets, signs = _hashes(vector.size)
    sums = np.bincount(buckets, weights=vector * signs, minlength=WIDTH)
    return np.append(sums, np.linalg.norm(vector)).astype("<f4")


def distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the estimated distance of two vectors by their sketches, relative to the norm of the first.

    Infinite if a sketch is none.
    """
    if a.shape != b.shape or not np.isfinite(b).all():
        return float("inf")
    norm = max(float(a[-1]), 1e-30)
    return float(np.linalg.norm(a[:-1].astype(np.float64) - b[:-1]) / norm)


@lru_cache(maxsize=1)
def _hashes(size: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    random = np.random.Generator(np.random.Philox(_SEED))
    buckets = random.integers(0, WIDTH, size, dtype=np.int16)
    return buckets, (random.integers(0, 2, size, dtype=np.int8) * 2 - 1).astype(np.float32)


START_S = 40.0
_CALL_S = 5.0
_COMPARE_S = 8.0
"""Time in which the members of a round report what they have received."""
_LOOK_S = 0.3
_NOVICE = 1e-6
"""Factor of the weight of a peer that has not averaged before: it takes the average of the others."""
_LEAST_STEPS = 1e-3
_MOST_MADDRS = 4


class HivemindRounds:
    """One averager of hivemind with its node of a hash table, and the rounds that it makes."""

    def __init__(self, settings: dict[str, Any], vectors: NDArray[np.float32], say: Say) -> None:
        """Start hivemind's processes. Raises whatever hivemind raises."""
        import hivemind
        import torch

        self._say, self._vectors = say, vectors
        self._name = str(settings["name"])
        self._match_s, self._total_s = float(settings["match_s"]), float(settings["total_s"])
        client = bool(settings["client"])
        self._dht = hivemind.DHT(
            initial_peers=settings["initial_peers"],
            start=False,
            host_maddrs=settings["listen"],
            announce_maddrs=settings["announce"] or None,
            identity_path=settings["identity"],
            client_mode=client,
            no_listen=client,
            use_relay=True,
            nat_port_map=False,
            check_if_identity_free=False,
            startup_timeout=START_S / 2,
            wait_timeout=_CALL_S,
        )
        self._dht.run_in_background(await_ready=True, timeout=START_S)
        self._tensor = torch.zeros(vectors.shape[1])
        self._averager = hivemind.DecentralizedAverager(
            [self._tensor],
            self._dht,
            start=False,
            prefix=str(settings["prefix"]),
            min_matchmaking_time=self._match_s,
            request_timeout=float(settings["request_s"]),
            allreduce_timeout=self._total_s - 2 * self._match_s,
            next_chunk_timeout=float(settings["chunk_s"]),
            sender_timeout=float(settings["chunk_s"]),
            reducer_timeout=2 * float(settings["chunk_s"]),
            client_mode=client,
            allow_state_sharing=False,
        )
        self._averager.run_in_background(await_ready=True, timeout=START_S)
        self.maddrs: list[str] = []
        """Addresses by which others join."""
        if not client:
            found = self._dht.run_coroutine(_visible_maddrs, return_future=True).result(timeout=_CALL_S)
            self.maddrs = [str(maddr) for maddr in found]

    def round(self, request: dict[str, Any]) -> bool:
        """Make a round and report its outcome; return whether this process is as good as new afterwards."""
        began_s, number, rounds = time.monotonic(), int(request["round"]), int(request["rounds"])
        mine = {
            "name": self._name,
            "rounds": rounds,
            "began_s": float(request["began_s"]),
            "nonce": secrets.token_hex(8),
            "maddrs": self.maddrs[:_MOST_MADDRS],
        }
        with self._averager.get_tensors() as tensors:
            tensors[0].numpy()[:] = self._vectors[0]
        weight = max(float(request["steps"]), _LEAST_STEPS) * (1.0 if rounds else _NOVICE)
        control = None
        try:
            control = self._averager.step(
                gather=mine, weight=weight, timeout=2 * self._match_s, allow_retries=False, wait=False
            )
            group = control.result(timeout=self._total_s)
        except Exception as error:  # of hivemind, or a timeout
            # Before a group is found nothing has been sent and nothing can hang.
            alone = "could not find a group" in str(error)
            why = "no other peer" if alone else f"{type(error).__name__} {error}".strip()
            self._say(round=number, members=0, why=why, seconds=time.monotonic() - began_s)
            return alone
        members = [dict(one) for one in group.values()]
        with self._averager.get_tensors() as tensors:
            self._vectors[1] = tensors[0].numpy()
        self._say(
            round=number,
            members=len(members),
            why="",
            seconds=time.monotonic() - began_s,
            began_s=min(float(one["began_s"]) for one in members),
            late=not rounds and any(int(one["rounds"]) for one in members),
            neighbours=[
                str(maddr) for one in members for maddr in one["maddrs"] if one["name"] != self._name
            ],
        )
        self._compare(number, members, str(mine["nonce"]))
        return True

    def _compare(self, number: int, members: list[dict[str, Any]], nonce: str) -> None:
        """Store a sketch of what was received, and report how far those of the others are from it.

        Ends early if the next request is there.
        """
        own = sketch(self._vectors[1])
        nonces = sorted(str(one["nonce"]) for one in members)
        key = "round " + hashlib.sha256("".join(nonces).encode()).hexdigest()
        expires = time.time() + 60.0
        deadline_s = time.monotonic() + _COMPARE_S
        found: dict[str, float] = {}
        with suppress(Exception):  # the table is not needed for the next round
            stored = self._dht.store(
                key, base64.b64encode(own.tobytes()).decode(), expires, subkey=nonce, return_future=True
            )
            stored.result(timeout=_CALL_S)
            while len(found) < len(members) - 1 and time.monotonic() < deadline_s and not _more():
                got = self._dht.get(key, latest=True, return_future=True).result(timeout=_CALL_S)
                for other, entry in (got.value if got else {}).items():
                    if other in nonces and other != nonce:
                        found[other] = distance(own, np.frombuffer(base64.b64decode(entry.value), "<f4"))
                time.sleep(_LOOK_S)
        self._say(compared=number, members=len(members), distances=sorted(found.values()))


async def _visible_maddrs(dht: Any, node: Any) -> Any:
    return await node.get_visible_maddrs(latest=True)


def _more() -> bool:
    """Return whether a request waits on standard input, or it is closed."""
    return bool(select.select([0], [], [], 0)[0])


def _requests() -> Any:
    """Yield the messages on standard input until it is closed. Holds back nothing that `_more` would see."""
    held = b""
    while data := os.read(0, 2**16):
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _serve(say: Say) -> None:
    requests = _requests()
    settings = next(requests)
    shape = (2, int(settings["numel"]))
    vectors = np.memmap(settings["memory"], dtype=np.float32, mode="r+", shape=shape)
    averager = HivemindRounds(settings, vectors, say)
    say(maddrs=averager.maddrs)
    for request in requests:
        if not averager.round(request):
            return


if __name__ == "__main__":
    run_child(_serve)
