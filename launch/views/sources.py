"""Sources of views: a run directory or a hub. Both have `poll` for now and `history` for all past records."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aedit.launch.config import RunConfig
from aedit.launch.records import (
    BAD_LINE,
    HubRecords,
    HubSample,
    KeptRollout,
    Run,
    RunFollower,
    SwarmSample,
    require_run,
    text,
    thinned,
)
from aedit.proto.rpc import HubClient, HubRefused, HubUnreachable, StatusRequest, caller_keys
from aedit.types import UserError, name_fault

ASK_S = 10.0
NO_LINES = 2**62
"""More lines than a hub has: it then sends none."""
MOST_LINES = 1024
"""Lines of a hub that are kept, and the newest ones; see `thinned`."""


@contextmanager
def open_source(
    place: Path | str, keys: Path | None = None, *, insecure: bool = False, most_lines: int | None = None
) -> "Iterator[RunFollower | HubSource]":
    """Yield the source of the run at `place`, a directory or HOST:PORT. Raises UserError if there is none.

    Args:
        place: A run directory, or the address of a hub; a directory of that name has precedence.
        keys: Directory of this machine's certificate, for a hub with TLS.
        insecure: Connect to a hub on another machine without TLS.
        most_lines: Lines of a long file of a directory that are read, see `RunFollower`; None: all.
    """
    if not is_hub(place):
        require_run(Path(place))
        yield RunFollower(Path(place), most_lines)
        return
    source = HubSource(str(place), keys, insecure=insecure)
    try:
        yield source
    finally:
        source.close()


def is_hub(place: Path | str) -> bool:
    """Return whether `place` is HOST:PORT and no directory."""
    host, _, port = str(place).rpartition(":")
    return bool(host) and port.isdecimal() and not Path(place).exists()


class HubSource:
    """Source that polls one hub, or one peer of a swarm."""

    def __init__(self, address: str, keys: Path | None = None, *, insecure: bool = False) -> None:
        """Connect to the hub at `address` when it is first asked."""
        self.address = address
        self._client = HubClient(address, caller_keys(address, keys, insecure), call_timeout_s=ASK_S)
        self._lines: list[HubSample] = []
        self._num_lines = 0

    def poll(self) -> Run:
        """Return the state of the run. Raises UserError if the hub does not answer."""
        return self._read(NO_LINES)

    def history(self) -> Run:
        """Return the hub's records since the start of its process, without records of the nodes.

        A further call asks for new records only.
        """
        return self._read(self._num_lines)

    def rollouts(self, most: int) -> list[KeptRollout]:
        """Return no rollouts: a hub has none."""
        return []

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _read(self, metrics_after: int) -> Run:
        """Return the run with the records after so many lines; without any, with the state of its nodes.

        In a swarm they are those of the first part whose owner answers.
        """
        try:
            status: dict[str, Any] = json.loads(
                self._client.status(StatusRequest(metrics_after=metrics_after)).json
            )
        except (HubUnreachable, HubRefused) as error:
            raise UserError(str(error)) from None
        try:
            swarm = SwarmSample.of(status) if "peers" in status else None
            if metrics_after == NO_LINES:
                now = HubSample.of(status) if swarm is None else swarm.hub
                lines = [] if now is None else [now]
            else:
                parts = [status] if swarm is None else status["parts"]
                none: dict[str, Any] = {"lines": ()}
                found = next((part for part in parts if part), none)
                count = max(0, int(found.get("num_lines", 0)))
                if count < metrics_after:  # lines of another process, which counts anew
                    return self._read(0)
                if not metrics_after:
                    self._lines = []
                self._lines += map(HubSample.of, found["lines"])
                self._lines = lines = thinned(self._lines, MOST_LINES)
                self._num_lines = count
            parts = [status] if swarm is None else status["parts"]
            alerts = tuple(text(each) for part in parts if part for each in part.get("alerts") or ())
            name = str(status["run"])
        except BAD_LINE as error:
            raise UserError(
                f"{self.address}: cannot read the answer ({error!r}); use the hub's version of aedit"
            ) from None
        if fault := name_fault(name):
            raise UserError(f"name of the run at {self.address}: {fault}")
        config = {"name": name, "hub": {"address": self.address}}
        hubs = (HubRecords(tuple(lines), (), alerts=alerts),) if lines else ()
        return Run(Path(RunConfig().dir) / name, config, (), hubs, swarm)
