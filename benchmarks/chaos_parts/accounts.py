"""Compare what nodes saw acknowledged with the history of the hub that leads at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aedit.launch.hub import anchors_of
from benchmarks.chaos_parts.books import differ, expected, mean_s
from benchmarks.chaos_parts.history import Key, history_of, leaders, read
from benchmarks.kit.paced_node import PacedNode

Lines = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Accounts:
    """Result of the comparison. Without an error all from `lost` on are 0."""

    steps_per_s: float
    """Steps in pushes of the history, mean over units, of all nodes together."""
    acknowledged: int
    """Pushes that a node saw acknowledged."""
    terms: tuple[int, ...]
    """Terms of the history, in order."""
    lost: int
    """Pushes that a node saw acknowledged and that the history lacks, or has with other values."""
    twice: int
    """Pushes that the history has accepted twice, or merged more than once or, at the end, not at all."""
    invented: int
    """Pushes of the history that no node has sent."""
    uncounted: int
    """Steps in pushes of the history that the hub did not count, as if the nodes had claimed too many."""
    wrong: int
    """Elements of the anchors that are not the sum of the steps that the nodes themselves have noted."""
    damaged: int
    """Payloads in the history that are not what was sent."""
    two_leaders: int
    """Terms with more than one leader, by all journals."""
    two_hubs: int
    """Terms in which more than one hub has acknowledged, by the nodes' ledgers."""
    back: int
    """Nodes that saw a unit's version go back within one of their processes."""
    alone: int
    """Pushes of the history that only the leading hub had on disk, after there had been other replicas."""
    missing: int
    """Segments at the beginning of the history of which no copy was kept: nothing can be told of them."""


def errors(parts: Sequence[Accounts]) -> dict[str, int]:
    """Return the number of errors of each kind in the accounts of all parts of a run, by description."""
    names = {
        "lost": "acknowledged pushes that the surviving journal lacks",
        "twice": "pushes accepted twice, or not merged exactly once",
        "invented": "pushes in the journal that no node has sent",
        "damaged": "damaged payloads in the journal",
        "uncounted": "steps that the hub did not count",
        "wrong": "elements of anchors that are not the sum of the nodes' own steps",
        "two_leaders": "terms with two leaders, by the journals of all hubs",
        "two_hubs": "terms in which two hubs acknowledged, by the nodes' ledgers",
        "back": "nodes that saw a version go back",
        "missing": "segments of the journal that no copy has",
    }
    return {text: sum(getattr(part, name) for part in parts) for name, text in names.items()}


def account(
    plan: PacedNode,
    ledgers: Sequence[Lines],
    folder: Path,
    copies: Sequence[Path],
    ended_s: float,
    part: tuple[int, int] = (0, 1),
) -> Accounts:
    """Compare the accounts of a run that has ended, or of part k of n of it.

    folder: of the hub that leads at the end. copies: of all segments of all hubs of the part. ended_s: when
    the nodes were asked to end, by the monotonic clock.
    """
    units = range(part[0], plan.units, part[1])
    ledgers = [[line for line in lines if line.get("unit", units[0]) in units] for lines in ledgers]
    segments = [segment for path in copies if (segment := read(path))]
    history = history_of(folder, segments)
    offers = _noted(ledgers, "offered")
    seen = {(key, crc) for key, by_crc in _noted(ledgers, "acknowledged").items() for crc in by_crc}
    own = {key: offers.get(key, {}).get(crc) for key, crc in history.accepted.items()}
    sums: dict[tuple[int, int], float] = {}
    for key, steps in own.items():
        share = history.shares.get(key, 0.0)
        sums[key[:2]] = sums.get(key[:2], 0.0) + (steps or 0) * share
    anchors, wanted = anchors_of(folder), expected(plan, sums)
    hubs = _hubs(ledgers)
    return Accounts(
        steps_per_s=sum(steps or 0 for steps in own.values()) / len(units) / mean_s(ledgers, ended_s),
        acknowledged=len(seen),
        terms=tuple(history.terms),
        lost=sum(history.accepted.get(key) != crc for key, crc in seen),
        twice=history.repeated + sum(history.merged[key] != 1 for key in history.accepted),
        invented=sum(steps is None for steps in own.values()),
        uncounted=sum(steps or 0 for steps in own.values()) - history.steps,
        wrong=sum(differ(anchors[i], wanted[i]) for i in units),
        damaged=history.damaged,
        two_leaders=sum(len(who) > 1 for who in leaders(segments).values()),
        two_hubs=sum(len(who) > 1 for who in hubs.values()),
        back=sum(_went_back(lines) for lines in ledgers),
        alone=history.alone,
        missing=history.missing,
    )


def _noted(ledgers: Sequence[Lines], event: str) -> dict[Key, dict[int, int]]:
    """Return the steps of all pushes with this event, by push and CRC-32."""
    found: dict[Key, dict[int, int]] = {}
    for line in (line for lines in ledgers for line in lines if line["event"] == event):
        key = line["node"], line["unit"], line["number"]
        found.setdefault(key, {})[line["crc"]] = line["steps"]
    return found


def _hubs(ledgers: Sequence[Lines]) -> dict[int, set[str]]:
    """Return the addresses of the hubs that have acknowledged in each term."""
    found: dict[int, set[str]] = {}
    for line in (line for lines in ledgers for line in lines if line["event"] == "acknowledged"):
        found.setdefault(line["term"], set()).add(line["hub"])
    return found


def _went_back(lines: Lines) -> bool:
    newest: dict[int, int] = {}
    for line in lines:
        if line["event"] == "joined":
            newest = {}
        elif line["event"] == "answered":
            if line["version"] < newest.get(line["unit"], 0):
                return True
            newest[line["unit"]] = line["version"]
    return False
