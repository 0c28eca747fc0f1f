"""Rules of asynchronous local SGD as pure functions and frozen values. Imports no torch.

- `config`: `[outer]`, `[hub]` and what a hub must know of a run. `records`: everything that happens to a hub.
- `outer`: outer optimizers. `merge_rules`: many pseudo-gradients into one.
- `push_weights`: weights by claims, EDiT's penalty and staleness. `push_shares`: the share of a round.
- `push_filter`, `push_times`: which pushes are trusted, by size, direction, steps and time.

`hub` decides with them; `edit` uses the outer optimizers and the penalty. Begin with `records`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.rules import merge_rules, records
    from aedit.async_sgd.rules.config import (
        DRAFTER,
        Codec,
        HubConfig,
        HubPlan,
        LimitConfig,
        OuterConfig,
        PenaltyConfig,
        PushFilterConfig,
        StalenessConfig,
        UnitRule,
        UnitRules,
    )
    from aedit.async_sgd.rules.merge_rules import THIRD, merge, norm, try_merge, unit_slices
    from aedit.async_sgd.rules.outer import (
        Average,
        DelayedNesterov,
        Nesterov,
        OuterOptimizer,
        OuterState,
        make_outer,
        try_outer,
        zeros_like,
    )
    from aedit.async_sgd.rules.push_filter import SizeHistory, directions, judge_push, outliers, shortening
    from aedit.async_sgd.rules.push_shares import Contribution, counted, round_shares
    from aedit.async_sgd.rules.push_times import (
        SLACK,
        TOP_STEPS_PER_S,
        PushTimes,
        is_early,
        least_gap,
        made_until,
        possible_at_once,
        possible_speed,
        possible_steps,
    )
    from aedit.async_sgd.rules.push_weights import (
        MOST_CLAIM,
        effective_nodes,
        limited,
        merge_weights,
        penalty_weights,
        push_norm,
        raw_weights,
        staleness_factor,
    )
    from aedit.async_sgd.rules.records import (
        Accepted,
        Agreed,
        Array,
        ArrayValues,
        Banned,
        Configured,
        Founded,
        Garbled,
        Joined,
        Leased,
        Led,
        Left,
        Merged,
        MergePart,
        Mixed,
        Push,
        Record,
        Refused,
        RoundOpened,
        SentUp,
        Ticked,
        Used,
        Values,
        Vector,
        configured,
    )

__all__ = [
    "DRAFTER",
    "MOST_CLAIM",
    "SLACK",
    "THIRD",
    "TOP_STEPS_PER_S",
    "Accepted",
    "Agreed",
    "Array",
    "ArrayValues",
    "Average",
    "Banned",
    "Codec",
    "Configured",
    "Contribution",
    "DelayedNesterov",
    "Founded",
    "Garbled",
    "HubConfig",
    "HubPlan",
    "Joined",
    "Leased",
    "Led",
    "Left",
    "LimitConfig",
    "MergePart",
    "Merged",
    "Mixed",
    "Nesterov",
    "OuterConfig",
    "OuterOptimizer",
    "OuterState",
    "PenaltyConfig",
    "Push",
    "PushFilterConfig",
    "PushTimes",
    "Record",
    "Refused",
    "RoundOpened",
    "SentUp",
    "SizeHistory",
    "StalenessConfig",
    "Ticked",
    "UnitRule",
    "UnitRules",
    "Used",
    "Values",
    "Vector",
    "configured",
    "counted",
    "directions",
    "effective_nodes",
    "is_early",
    "judge_push",
    "least_gap",
    "limited",
    "made_until",
    "make_outer",
    "merge",
    "merge_rules",
    "merge_weights",
    "norm",
    "outliers",
    "penalty_weights",
    "possible_at_once",
    "possible_speed",
    "possible_steps",
    "push_norm",
    "raw_weights",
    "records",
    "round_shares",
    "shortening",
    "staleness_factor",
    "try_merge",
    "try_outer",
    "unit_slices",
    "zeros_like",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
