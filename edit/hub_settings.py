"""Settings of a run as the hub sends them: all that a node needs, so that it has none of its own."""

import tomllib
from dataclasses import dataclass, is_dataclass, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from aedit.async_sgd.rules import HubConfig
from aedit.edit.config import EditConfig
from aedit.edit.pace import make_pace
from aedit.edit.schedule import RoundSchedule
from aedit.proto.agent import Link
from aedit.proto.rpc import HelloReply

T = TypeVar("T")

_NONE = "none"
"""The text that stands for None in a configuration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Settings of a run, as its hub reports them."""

    run: str
    """Name of the run."""
    edit: EditConfig
    """Units, fragments, interval and deadline, with `landing` set to "arrival"."""
    hub: HubConfig
    """Codecs and timings; `address` and `standby` say where this node reaches the hub."""
    shares_drafter: bool = False
    """The run has a sync unit for a drafter that is trained apart from the model."""

    @classmethod
    def of(cls, reply: HelloReply, addresses: str) -> "HubSettings":
        """Return the settings in a hub's reply to Hello.

        Keys that this version does not know are ignored, so that a newer hub can be joined.

        Args:
            reply: The hub's answer.
            addresses: HOST:PORT under which this node has reached the hub, or several that split the units.
                One address of a run with several hubs is enough: the reply lists the others.

        Raises:
            ValueError: The reply holds no configuration, or values of the wrong type.
        """
        try:
            tables = tomllib.loads(reply.config)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{addresses}: its configuration is not valid TOML: {error}") from None
        hub = _made(HubConfig, tables.get("hub", {}))
        given = addresses.split(",")
        known = given if len(given) >= len(reply.addresses) else list(reply.addresses)
        return cls(
            run=reply.run,
            edit=replace(_made(EditConfig, tables.get("edit", {})), landing="arrival"),
            hub=replace(hub, address=",".join(known), standby=reply.standby or hub.standby),
            shares_drafter=_shares_drafter(tables),
        )

    def schedule(self, link: Link) -> RoundSchedule:
        """Return a new schedule that follows the hub's pace."""
        return make_pace(self.edit, link.news)


def _shares_drafter(tables: dict[str, Any]) -> bool:
    """Return whether a hub with this configuration, of which defaults are left out, expects a drafter."""
    drafter = tables.get("drafter", {})
    kinds = ("layer", "auto") if tables.get("prompts", {}).get("source") else ("layer",)
    return drafter.get("kind", "auto") in kinds and bool(drafter.get("share", True))


def _made(kind: type[T], table: dict[str, Any]) -> T:
    """Return the dataclass `kind` with the values of a TOML table."""
    types = get_type_hints(kind)
    known = {name: _value(types[name], value) for name, value in table.items() if name in types}
    return kind(**known)


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return _made(hint, value)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if value == _NONE and type(None) in options:
        return None
    return tuple(value) if isinstance(value, list) else value
