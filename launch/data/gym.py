"""Problems of the generators of reasoning-gym (extra `gym`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aedit.launch.config.rl import PromptConfig
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
    """Yield `config.size` problems, of each generator as many as its weight says, in turn."""
    from aedit.launch.data.prompt_rows import needs

    gym = needs("reasoning_gym", "gym")
    parts = shares(config.source)
    counts = [0] * len(parts)
    sources = [_dataset(gym, part.name, seed, config) for part in parts]
    for _ in range(config.size):
        # The generator that is furthest behind its share, the first of several: an even mixture.
        turn = min(range(len(parts)), key=lambda i: ((counts[i] + 1) / parts[i].weight, i))
        yield _row(parts[turn].name, sources[turn], counts[turn], seed, config)
        counts[turn] += 1


def _dataset(gym: Any, name: str, seed: int, config: PromptConfig) -> Any:
    try:
        return gym.create_dataset(name, seed=seed, size=config.size, **config.options)
    except Exception as error:  # each generator checks its options in its own way
        raise UserError(f"prompts.source: generator {name!r} of reasoning-gym: {error}") from error


def _row(name: str, source: Any, index: int, seed: int, config: PromptConfig) -> dict[str, Any]:
    entry = source[index]
    origin = {
        "name": name,
        "seed": seed,
        "size": config.size,
        "index": index,
        "options": dict(config.options),
    }
    return {config.prompt_key: entry["question"], config.answer_key: entry["answer"], "gym": origin}
