"""Settings of a node whose caller leaves some out."""

from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange
from aedit.edit.schedule import RoundSchedule, make_schedule


def chosen(
    exchange: Exchange, schedule: RoundSchedule | None, config: EditConfig | None
) -> tuple[RoundSchedule, EditConfig]:
    """Return schedule and configuration of a node: its own, else the exchange's, else the default ones.

    Raises ValueError for settings in `config` that belong to the exchange.
    """
    if defaults := exchange.defaults():
        config, schedule = config or defaults[0], schedule or defaults[1]
    config = config or EditConfig()
    for name in ("penalty", "offload"):
        if getattr(config, name) not in (getattr(EditConfig(), name), getattr(exchange, name, None)):
            raise ValueError(f"config.{name} has no effect here: give it to the exchange")
    return schedule or make_schedule(config), config
