"""Problems: `arithmetic` needs no download; here are the data sets of reasoning-gym (extra `gym`)."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

MAX_LEVELS = 5
"""Levels of a generator that are used at most; the higher ones are far apart."""


@dataclass(frozen=True, slots=True)
class ProblemOrigin:
    """A problem's place in a data set: all that is needed to generate it again."""

    name: str
    seed: int
    size: int
    index: int = 0
    level: int = -1
    """Level of the generator's curriculum, from 0; -1: the generator's defaults."""
    options: Mapping[str, Any] = field(default_factory=dict)


def entry_and_source(origin: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the entry of an origin, as plain data, and the data set that scores answers to it."""
    source = _source(json.dumps({**origin, "index": 0}, sort_keys=True))
    return source[origin["index"]], source


def source_of(origin: ProblemOrigin) -> Any:
    """Return the data set of an origin. Raises what the generator raises for its options."""
    return _source(json.dumps({**asdict(origin), "index": 0}, sort_keys=True))


def num_levels(name: str) -> int:
    """Return the number of levels of a generator, at most MAX_LEVELS; 0 if it has no curriculum."""
    factory = _factory()
    if not factory.has_curriculum(name):
        return 0
    attributes = factory.create_curriculum(name).attributes.values()
    return min(MAX_LEVELS, max((len(each.levels) for each in attributes), default=0))


@lru_cache(maxsize=256)
def _source(described: str) -> Any:
    origin = ProblemOrigin(**json.loads(described))
    factory, given = _factory(), {"seed": origin.seed, "size": origin.size, **origin.options}
    if origin.level >= 0:
        curriculum = factory.create_curriculum(origin.name)
        curriculum.set_global_level(origin.level)
        config = curriculum.generate_configuration(given)
        given = {each.name: getattr(config, each.name) for each in fields(config)}
    return factory.create_dataset(origin.name, **given)


def _factory() -> Any:
    return importlib.import_module("reasoning_gym.factory")
