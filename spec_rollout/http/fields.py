"""Typed access to the fields of a JSON object. A field that nobody has read is an error, not ignored."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from aedit.spec_rollout.http.errors import ApiError, bad_request

T = TypeVar("T")
MISSING: Final = object()


class Fields:
    """Fields of a request. A field with the value null counts as absent."""

    def __init__(self, body: Any, where: str = "") -> None:
        """Wrap a JSON value; `where` is the name of the field that has it."""
        if not isinstance(body, dict):
            what = where or "the body"
            raise bad_request(where or None, f"must be an object, got {_name(body)}" if where else
                              f"{what} must be a JSON object, got {_name(body)}")  # fmt: skip
        self._body: Mapping[str, Any] = body
        self._where = f"{where}." if where else ""
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """Return the name of a field in messages."""
        return self._where + name

    def bad(self, name: str, rule: str) -> ApiError:
        """Return the error of a field."""
        return bad_request(self.path(name), rule)

    def any(self, name: str) -> Any:
        """Return a field as it is, or None."""
        self._read.add(name)
        return self._body.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, f"must be true or false, got {_name(value)}")
        return value

    def integer(self, name: str, default: T, low: int, high: int) -> int | T:
        """Return an integer from low to high."""
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(name, f"must be an integer, got {_name(value)}")
        if not low <= value <= high:
            raise self.bad(name, f"must be {low} to {high}, got {_short(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(name, f"must be a number, got {_name(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(name, "must be a finite number")
        return number

    def text(self, name: str, default: T) -> str | T:
        """Return a string of valid Unicode."""
        value = self.any(name)
        return default if value is None else self.check_text(name, value)

    def check_text(self, name: str, value: Any) -> str:
        """Return a value if it is a string of valid Unicode."""
        if not isinstance(value, str):
            raise self.bad(name, f"must be a string, got {_name(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.bad(name, "is not valid Unicode: it has half of a surrogate pair") from None
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of strings of valid Unicode, None if the field is absent."""
        value = self.any(name)
        if value is not None and not isinstance(value, list):
            raise self.bad(name, f"must be a list of strings, got {_name(value)}")
        return None if value is None else [self.check_text(name, each) for each in value]

    def tokens(self, name: str, value: Any) -> tuple[int, ...]:
        """Return a value if it is a list of token ids."""
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise self.bad(name, f"must be a list of token ids, got {_name(value)}")
        return tuple(value)

    def allow(self, name: str, *values: Any) -> None:
        """Check that a field that has no effect here is absent or has one of these values."""
        value = self.any(name)
        if value is not None and value not in values:
            found = _short(value)
            rule = f"must be {' or '.join(map(_short, values))}" if values else "is not supported"
            raise self.bad(name, f"{rule}: this server has nothing else, got {found}")

    def ignore(self, *names: str) -> None:
        """Read fields that say nothing about the answer."""
        self._read.update(names)

    def finish(self) -> None:
        """Check that no field is unknown."""
        unknown = sorted(set(self._body) - self._read)
        if unknown:
            name = unknown[0][:64]
            raise self.bad(name, "is not a parameter of this route: remove it, or correct its name")


def _name(value: Any) -> str:
    """Return the JSON type of a value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 64 else text[:61] + "..."
