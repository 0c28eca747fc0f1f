"""What a hub's folder says, without a hub: its anchors, and every push it has accepted."""

import json
from collections.abc import Iterator
from pathlib import Path

from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.hub.plan import HubPlan
from aedit.async_sgd.journal.frames import File
from aedit.async_sgd.journal.journal import segment_path
from aedit.async_sgd.journal.store import Store, batches, check_gapless, check_payloads, segment_numbers
from aedit.async_sgd.rules.records import Accepted, Push, Record, Vector
from aedit.launch.config.config import RunConfig
from aedit.launch.config.load import load
from aedit.proto.codecs.codecs import codec


def make_hub(config: RunConfig, part: tuple[int, int]) -> Hub:
    """A hub that has seen nothing yet."""
    plan = HubPlan(
        hub=config.hub,
        outer=config.outer,
        penalty=config.edit.penalty,
        every=config.edit.every,
        pace=config.edit.schedule,
        steps=config.train.steps,
        seconds=config.train.seconds,
        part=part,
    )
    down = config.hub.codec_down
    return Hub(plan, None if down == "fp32" else codec(down))


def hub_of(directory: Path) -> Hub:
    """A hub with the configuration of the run whose folder this is."""
    k, n = json.loads((directory / "part.json").read_text())
    return make_hub(load(directory / "run.toml", []).config, (k, n))


def replayed(directory: Path, *, from_the_beginning: bool = False) -> Hub:
    """The hub as its folder has it, which is not changed. from_the_beginning: from the first segment on,
    which must still be there, and through no snapshot. UserError if the folder is damaged."""
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
    """What nodes hold of the newest version of every unit."""
    hub = replayed(directory, from_the_beginning=from_the_beginning)
    return {index: hub.anchor(index)[1] for index in hub.state.units}


def pushes_of(directory: Path) -> Iterator[Push]:
    """All accepted pushes of the segments that are still there, in the order of the journal."""
    yield from (record.push for record in records_of(directory) if isinstance(record, Accepted))


def records_of(directory: Path) -> Iterator[Record]:
    """All records of the segments that are still there, in the order of the journal."""
    first = min(segment_numbers(directory, "journal"), default=1)
    for batch in _journaled(directory, first):
        yield from batch


def _journaled(directory: Path, first: int) -> Iterator[list[Record]]:
    for number in segment_numbers(directory, "journal"):
        if number >= first:
            for batch, _ in batches(File(segment_path(directory, number))):
                check_payloads(batch)
                yield batch
