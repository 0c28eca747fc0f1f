"""Units of a run that are trained apart from the model."""

from aedit.async_sgd.rules import DRAFTER, UnitRule, UnitRules
from aedit.launch.config.config import RunConfig


def unit_rules(config: RunConfig) -> UnitRules:
    """Return the rules of such units by name: of the drafter, if the run has one and shares it.

    Nodes with training loops of their own bring one only if the configuration of their hub names it.
    """
    kinds = ("layer", "auto") if config.prompts.source else ("layer",) if config.hub.endless else ()
    has_drafter = config.drafter.kind in kinds
    return {DRAFTER: UnitRule()} if has_drafter and config.drafter.share else {}
