"""Sources of views: a run directory or a hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from aedit.launch.config import RunConfig
from aedit.launch.records import BAD_LINE, HubRecords, HubSample, Run, RunFollower, SwarmSample, require_run
from aedit.proto.rpc import HubClient, HubRefused, HubUnreachable, StatusRequest, caller_keys
from aedit.types import UserError

ASK_S = 10.0
NO_LINES = 2**62
"""More lines than a hub has: it then sends none."""


class Source(Protocol):
    """Run that can be read repeatedly."""

    def poll(self) -> Run:
        """Return the state of the run now. Raises UserError if it cannot be read any more."""

    def history(self) -> Run:
        """Return the run with all past records of the source."""


class DirectorySource:
    """Source that reads a run directory."""

    def __init__(self, run_dir: Path) -> None:
        """Read `run_dir`. Raises UserError if it is not a run directory."""
        require_run(run_dir)
        self._follower = RunFollower(run_dir)

    def poll(self) -> Run:
        """Return all records of the run up to now."""
        return self._follower.poll()

    history = poll


@contextmanager
def open_source(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> Iterator[Source]:
    """Yield the source of the run at `place`, a directory or HOST:PORT. Raises UserError if there is none.

    Args:
        place: A run directory, or the address of a hub; a directory of that name has precedence.
        keys: Directory of this machine's certificate, for a hub with TLS.
        insecure: Connect to a hub on another machine without TLS.
    """
    if not is_hub(place):
        yield DirectorySource(Path(place))
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
    """Source that polls one hub."""

    def __init__(self, address: str, keys: Path | None = None, *, insecure: bool = False) -> None:
        """Connect to the hub at `address` when it is first asked."""
        self.address = address
        self._client = HubClient(address, caller_keys(address, keys, insecure), call_timeout_s=ASK_S)

    def poll(self) -> Run:
        """Return the state of the run. Raises UserError if the hub does not answer."""
        said = self._ask(NO_LINES)
        try:
            if "peers" in said:
                return self._of_swarm(said)
            return self._run(said, (HubSample.of(said),))
        except BAD_LINE as error:
            raise self._strange(error) from None

    def history(self) -> Run:
        """Return the hub's records since the start of its process, without records of the nodes."""
        said = self._ask(0)
        try:
            if "peers" in said:
                lines = next((part["lines"] for part in said["parts"] if part), ())
                return replace(self._run(said, tuple(map(HubSample.of, lines))), swarm=SwarmSample.of(said))
            return self._run(said, tuple(map(HubSample.of, said["lines"])))
        except BAD_LINE as error:
            raise self._strange(error) from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _of_swarm(self, said: dict[str, Any]) -> Run:
        """Return the nodes as the first owner that answers knows them, with all peers and parts."""
        swarm = SwarmSample.of(said)
        return replace(self._run(said, (swarm.hub,) if swarm.hub else ()), swarm=swarm)

    def _run(self, said: dict[str, Any], lines: tuple[HubSample, ...]) -> Run:
        name = str(said["run"])
        if Path(name).name != name or name == "..":
            raise UserError(
                f"the run at {self.address} is named {name!r}, which is not a valid directory name"
            )
        config = {"name": name, "hub": {"address": self.address}}
        return Run(Path(RunConfig().dir) / name, config, (), (HubRecords(lines, ()),) if lines else ())

    def _ask(self, metrics_after: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(
                self._client.status(StatusRequest(metrics_after=metrics_after)).json
            )
        except (HubUnreachable, HubRefused) as error:
            raise UserError(str(error)) from None
        return found

    def _strange(self, error: Exception) -> UserError:
        return UserError(
            f"{self.address}: cannot read the answer ({error!r}); use the hub's version of aedit"
        )
