"""Units of a run that are trained apart from the model."""

from aedit.async_sgd.rules.unit_rules import DRAFTER, UnitRule, UnitRules
from aedit.launch.config.config import RunConfig


def unit_rules(config: RunConfig) -> UnitRules:
    """Return the rules of such units by name: of the drafter, if the run has one and shares it."""
    has_drafter = bool(config.prompts.source) and config.drafter.kind in ("layer", "auto")
    return {DRAFTER: UnitRule()} if has_drafter and config.drafter.share else {}
