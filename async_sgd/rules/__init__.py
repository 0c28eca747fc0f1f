"""Rules of the outer step as pure functions: outer optimizers, merging, penalty, staleness, filtering."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.rules import penalty, push_filter, records, staleness
    from aedit.async_sgd.rules.config import (
        Codec,
        HubConfig,
        LimitConfig,
        OuterConfig,
        PenaltyConfig,
        PushFilterConfig,
        StalenessConfig,
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
    from aedit.async_sgd.rules.penalty_weights import MOST, Array, limited, merge_weights, push_norm, weights
    from aedit.async_sgd.rules.push_filter import SizeHistory, directions
    from aedit.async_sgd.rules.push_shares import Contribution, counted, shares
    from aedit.async_sgd.rules.push_times import (
        PushTimes,
        always_possible,
        is_early,
        least_gap,
        possible_steps,
    )
    from aedit.async_sgd.rules.records import (
        Accepted,
        Agreed,
        Banned,
        Configured,
        Founded,
        Garbled,
        Joined,
        Leased,
        Led,
        Left,
        Merged,
        Mixed,
        Part,
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
    from aedit.async_sgd.rules.unit_rules import DRAFTER, UnitRule, UnitRules

__all__ = [
    "DRAFTER",
    "MOST",
    "THIRD",
    "Accepted",
    "Agreed",
    "Array",
    "Average",
    "Banned",
    "Codec",
    "Configured",
    "Contribution",
    "DelayedNesterov",
    "Founded",
    "Garbled",
    "HubConfig",
    "Joined",
    "Leased",
    "Led",
    "Left",
    "LimitConfig",
    "Merged",
    "Mixed",
    "Nesterov",
    "OuterConfig",
    "OuterOptimizer",
    "OuterState",
    "Part",
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
    "always_possible",
    "configured",
    "counted",
    "directions",
    "is_early",
    "least_gap",
    "limited",
    "make_outer",
    "merge",
    "merge_weights",
    "norm",
    "penalty",
    "possible_steps",
    "push_filter",
    "push_norm",
    "records",
    "shares",
    "staleness",
    "try_merge",
    "try_outer",
    "unit_slices",
    "weights",
    "zeros_like",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
