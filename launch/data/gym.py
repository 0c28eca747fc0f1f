"""Problems of the generators of reasoning-gym (extra `gym`)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from aedit.launch.config import PromptConfig
from aedit.spec_rollout.rl import Origin, num_levels, source_of
from aedit.types import UserError


@dataclass(frozen=True, slots=True)
class Share:
    """A generator and its weight among the others."""

    name: str
    weight: float


def shares(source: str) -> list[Share]:
    """Return the generators that `gym:A*2+B` names, weights 2 and 1. Raises UserError for others."""
    found = []
    for part in source.removeprefix("gym:").split("+"):
        name, star, weight = part.strip().partition("*")
        try:
            found.append(Share(name.strip(), float(weight) if star else 1.0))
        except ValueError:
            raise UserError(
                f"prompts.source: {part!r} has no number as weight, expected NAME or NAME*2"
            ) from None
    names = [share.name for share in found]
    if "" in names or len(set(names)) < len(names) or not all(0 < s.weight < float("inf") for s in found):
        raise UserError(
            f"prompts.source = {source!r}: expected gym:NAME, or gym:A*2+B with different names, weights > 0"
        )
    return found


def gym_rows(config: PromptConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `config.size` problems, of each generator as many as its weight says, in turn.

    With `config.curriculum` each generator's levels take turns as well; the column `level` counts from 1.
    """
    parts = shares(config.source)
    counts = [0] * len(parts)
    levels = [_levels(part.name) if config.curriculum else 0 for part in parts]
    for _ in range(config.size):
        # The generator that is furthest behind its share, the first of several: an even mixture.
        turn = min(range(len(parts)), key=lambda i: ((counts[i] + 1) / parts[i].weight, i))
        origin = Origin(parts[turn].name, seed, config.size, counts[turn], -1, dict(config.options))
        if levels[turn]:
            index, level = divmod(counts[turn], levels[turn])
            origin = replace(origin, index=index, level=level)
        yield _row(origin, config)
        counts[turn] += 1


def _levels(name: str) -> int:
    levels = num_levels(name)
    if levels < 2:
        raise UserError(
            f"prompts.curriculum = true: the generator {name!r} of reasoning-gym has no levels; leave it out"
        )
    return levels


def _row(origin: Origin, config: PromptConfig) -> dict[str, Any]:
    try:
        entry = source_of(origin)[origin.index]
    except Exception as error:  # each generator checks its options in its own way
        where = f", level {origin.level + 1}" if origin.level >= 0 else ""
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"prompts.source: generator {origin.name!r} of reasoning-gym{where}: {message}"
        ) from error
    row = {config.prompt_key: entry["question"], config.answer_key: entry["answer"], "gym": asdict(origin)}
    return row | ({"level": origin.level + 1} if origin.level >= 0 else {})
