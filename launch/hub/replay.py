"""Read anchors, pushes and records from a hub's folder, without a running hub."""

import json
from collections.abc import Iterator
from pathlib import Path

from aedit.async_sgd.hub import Hub, HubPlan
from aedit.async_sgd.journal import (
    File,
    Store,
    batches,
    check_gapless,
    check_payloads,
    segment_numbers,
    segment_path,
)
from aedit.async_sgd.rules import Accepted, Push, Record, Vector
from aedit.launch.config import RunConfig, load, tokens_per_step, unit_rules
from aedit.proto.codecs import codec


def make_hub(config: RunConfig, part: tuple[int, int]) -> Hub:
    """Return a hub without any state."""
    plan = HubPlan(
        hub=config.hub,
        outer=config.outer,
        penalty=config.edit.penalty,
        every=config.edit.every,
        pace=config.edit.schedule,
        steps=config.train.steps,
        seconds=config.train.seconds,
        part=part,
        step_tokens=0 if config.hub.endless else tokens_per_step(config),
        leases=not config.hub.endless and not config.prompts.source,
        rules=unit_rules(config),
    )
    down = config.hub.codec_down
    return Hub(plan, None if down == "fp32" else codec(down))


def hub_of(directory: Path) -> Hub:
    """Return a hub without state, with the configuration in `directory`."""
    k, n = json.loads((directory / "part.json").read_text())
    return make_hub(load(directory / "run.toml", []).config, (k, n))


def replayed(directory: Path, *, from_the_beginning: bool = False) -> Hub:
    """Return the hub with the state of its folder, which is not changed.

    Raises UserError if the folder is damaged.

    from_the_beginning: replay all journal segments, which must still exist from the first one on, and read no
    snapshot.
    """
    hub = hub_of(directory)
    if from_the_beginning:
        check_gapless(directory, 1, segment_numbers(directory, "journal"))
        for batch in _journaled(directory, 1):
            for record in batch:
                hub.apply(record)
    else:
        Store(directory).read(hub)
    return hub


def anchors_of(directory: Path, *, from_the_beginning: bool = False) -> dict[int, Vector]:
    """Return the newest anchor of each unit as nodes receive it, by unit."""
    hub = replayed(directory, from_the_beginning=from_the_beginning)
    return {index: hub.anchor(index)[1] for index in hub.state.units}


def pushes_of(directory: Path) -> Iterator[Push]:
    """Yield all accepted pushes of the existing segments, in journal order."""
    yield from (record.push for record in records_of(directory) if isinstance(record, Accepted))


def records_of(directory: Path) -> Iterator[Record]:
    """Yield all records of the existing segments, in journal order."""
    first = min(segment_numbers(directory, "journal"), default=1)
    for batch in _journaled(directory, first):
        yield from batch


def _journaled(directory: Path, first: int) -> Iterator[list[Record]]:
    for number in segment_numbers(directory, "journal"):
        if number >= first:
            for batch, _ in batches(File(segment_path(directory, number))):
                check_payloads(batch)
                yield batch
