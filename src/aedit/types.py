"""Types that every package shares. Standard library only, so that configuration and `--help` stay fast."""

import builtins
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from math import inf, prod
from numbers import Integral, Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from urllib.parse import urlsplit

_LONGEST_HOST = 253
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_SCHEMES = frozenset(
    ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds", "passthrough", "google-c2p")
)
"""Names that gRPC takes as the kind of an address: `unix:80` would be a file."""
_ANYWHERE = frozenset(("0.0.0.0", "[::]"))


class ImportPath(str):
    """The name of an object to import, as `package.module:Name`."""

    __slots__ = ()


def is_import_path(text: str) -> bool:
    """Return whether `text` names an object by import path, as `package.module:Name` does."""
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number in an annotation: `Annotated[float, Range(least=0, below=1)]`."""

    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf

    def holds(self, value: float) -> bool:
        """Return whether `value` is within the bounds."""
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        low, high = max(self.least, self.above), min(self.most, self.below)
        if high < inf:
            return f"in {'[' if low == self.least else '('}{low}, {high}{']' if high == self.most else ')'}"
        return f"above {low}" if low == self.above else f"at least {low}"


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]

C = TypeVar("C", bound=type)


class _Names(dict[str, Any]):
    """Names of a module in annotations. One that it imports only for type checkers stands for any type."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def checked(key: str | None = None) -> Callable[[C], C]:
    """Return a class decorator whose constructor first checks its arguments against their annotations.

    Raises ValueError with argument, value, type and range expected, and the choice that was probably meant.
    A whole number is anything `numbers.Integral` but a bool, so NumPy's integers are taken and 2.0 is not; a
    number is finite; a path may be text. Of an interface, the value must be an object with one of its
    methods, as some are optional. Values that are equal to one of the annotated type, such as
    `numpy.int64(3)`, are converted to it. Types that this cannot check, such as `Any`, and what is inside a
    list or dict are not checked; rules that concern several arguments belong in the constructor.

    Args:
        key: TOML table of a configuration, for error messages; None: they name the class.
    """

    def decorate(cls: C) -> C:
        construct: Any = vars(cls)["__init__"]
        names = tuple(inspect.signature(construct).parameters)[1:]

        @functools.cache
        def hints(*, bounds: bool = True) -> dict[str, Any]:  # late, as an annotation may name a later class
            return get_type_hints(construct, None, _Names(construct.__globals__), include_extras=bounds)

        @functools.cache
        def exact() -> dict[str, frozenset[type] | None]:
            return {name: None if _is_open(hint) else _exact_types(hint) for name, hint in hints().items()}

        def accept(made: type, name: str, value: object) -> Any:
            kinds = exact().get(name, frozenset())
            if kinds is None or type(value) in kinds:
                return value  # quickly: engines make checked objects in each step
            hint = hints().get(name, Any)
            taken = accepted(value, hint)
            if taken is WRONG:
                where = f"{made.__name__}: {name}" if key is None else f"{key}.{name}".lstrip(".")
                fits = accepted(value, hints(bounds=False)[name]) is not WRONG
                rule = _bounds(hint) if fits else describe(hint)
                near = suggest(value.lower(), choices(hint)) if isinstance(value, str) else ""
                raise ValueError(f"{where} must be {rule}, got {shown(value)}{near}")
            return taken

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) <= len(names):  # otherwise the constructor itself raises
                args = tuple(
                    accept(type(self), name, value) for name, value in zip(names, args, strict=False)
                )
            taken = {name: accept(type(self), name, value) for name, value in kwargs.items()}
            construct(self, *args, **taken)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


WRONG = object()
"""Result of `accepted` for a value that an annotation does not allow."""


def _is_open(hint: Any) -> bool:
    """Return whether `accepted` returns every value unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        return _is_open(get_args(hint)[0])
    return hint is Any or isinstance(hint, TypeVar)


def _exact_types(hint: Any) -> frozenset[type]:
    """Return classes whose own objects, not those of subclasses, `accepted` returns unchanged; or none."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_exact_types(arg) for arg in get_args(hint)]
        # An earlier choice may convert what a later one would take: `Path | str` makes a path of a text.
        is_safe = all(parts) and frozenset.union(*parts).isdisjoint((int, bool, str))
        return frozenset.union(*parts) if is_safe else frozenset()
    if hint is None or hint is type(None):
        return frozenset((type(None),))
    if not isinstance(hint, type) or get_origin(hint) is not None or hint in (float, ImportPath, Path):
        return frozenset()
    is_open = getattr(hint, "_is_protocol", False) or is_typeddict(hint)
    return frozenset() if is_open else frozenset((hint,))


def accepted(value: Any, hint: Any) -> Any:
    """Return `value` as what the annotation `hint` allows, or `WRONG`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next((taken for arg in args if (taken := accepted(value, arg)) is not WRONG), WRONG)
    if origin is Annotated:
        taken = accepted(value, args[0])
        return taken if taken is WRONG or all(r.holds(taken) for r in args[1:] if type(r) is Range) else WRONG
    if origin is Literal:
        return next((arg for arg in args if isinstance(value, type(arg)) and value == arg), WRONG)
    if origin is not None:
        return _accepted_container(value, origin, args)
    return _accepted_scalar(value, hint)


def _accepted_scalar(value: Any, hint: Any) -> Any:
    if hint is None or hint is type(None):
        return None if value is None else WRONG
    if hint is int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return int(value) if whole else WRONG
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, Real)):
            return WRONG
        number = value if isinstance(value, int) else float(value)
        return number if abs(number) <= sys.float_info.max else WRONG  # NaN is not, nor are the longest ints
    if hint is bool:  # NumPy's too, which this module does not import
        return bool(value) if type(value).__name__ in ("bool", "bool_") else WRONG
    if hint is ImportPath:
        return value if isinstance(value, str) and is_import_path(value) else WRONG
    if hint is Path:
        return Path(value) if isinstance(value, (str, os.PathLike)) else WRONG
    if hint is Any or not isinstance(hint, type) or is_typeddict(hint):
        return value
    if not getattr(hint, "_is_protocol", False):
        return value if isinstance(value, hint) else WRONG
    if isinstance(value, (type, str, bytes, Real, list, tuple, dict)):
        return WRONG
    names = protocol_methods(hint)
    return value if any(hasattr(type(value), name) or hasattr(value, name) for name in names) else WRONG


def _accepted_container(value: Any, origin: Any, args: tuple[Any, ...]) -> Any:
    if origin is Callable:
        return value if callable(value) else WRONG
    if not issubclass(origin, Iterable) or origin in (list, dict) or not args:  # these may change
        return _accepted_scalar(value, origin)
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return WRONG
        entries = (taken for pair in value.items() for taken in map(accepted, pair, args))
        return WRONG if any(entry is WRONG for entry in entries) else value
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return WRONG
    if origin is not tuple:
        return value
    value = tuple(value)
    if args[0] in (int, str) and args[1:] == (...,) and set(map(type, value)) <= {args[0]}:
        return value  # quickly, as the tokens of a text may be many
    wanted = args[:1] * len(value) if args[1:] == (...,) else args
    if len(wanted) != len(value):
        return WRONG
    taken = tuple(map(accepted, value, wanted))
    return WRONG if any(part is WRONG for part in taken) else taken


def protocol_methods(protocol: type) -> list[str]:
    """Return the names of the methods and properties of an interface."""
    return [
        name
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False)
        for name, part in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(part) or isinstance(part, property))
    ]


def _bounds(hint: Any) -> str:
    """Return the bounds in an annotation as text."""
    own = (str(arg) if isinstance(arg, Range) else _bounds(arg) for arg in get_args(hint))
    return next(filter(None, own), "")


def choices(hint: Any) -> list[str]:
    """Return the texts that an annotation lists."""
    args = get_args(hint)
    return [*args] if get_origin(hint) is Literal else [text for arg in args for text in choices(arg)]


def suggest(name: str, known: Collection[str]) -> str:
    """Return `; did you mean X?`, or "" if no known name is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    same_leaf = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    best = (close or same_leaf)[:1]
    return f"; did you mean {best[0]}?" if best else ""


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    ImportPath: "package.module:Name",
    Path: "a path",
    type(None): "none",
}


def describe(hint: Any) -> str:
    """Return a type as text."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{describe(args[0])} {' '.join(map(str, args[1:]))}"
    if origin is Literal:
        return " or ".join(f'"{a}"' for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is tuple:
        return f"a list of {describe(args[0])}" if args[1:] == (...,) else f"a list of {len(args)} values"
    if origin is dict:
        return "a table"
    if len(args) == 2 and isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping from {describe(args[0])} to {describe(args[1])}"
    return _WORDS.get(hint) or str(getattr(hint, "__name__", hint))


def shown(value: object) -> str:
    """Return a value for an error message, on one line of at most 60 characters."""
    text = f'"{value}"' if isinstance(value, str) else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


@checked()
@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of pseudo-gradients."""

    id: PositiveInt
    """Number of the round, from 1; equal on all nodes that take part."""

    steps: NonNegativeInt
    """Inner steps of this node since its previous round."""


@checked()
@dataclass(frozen=True)
class TensorLayout:
    """Name and whole (unsharded) shape of one parameter of a sync unit."""

    name: str
    shape: tuple[NonNegativeInt, ...]

    @functools.cached_property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@checked()
@dataclass(frozen=True)
class UnitLayout:
    """Canonical form of a sync unit: its parameters in registration order, whole, row-major, as fp32."""

    name: str
    tensors: tuple[TensorLayout, ...]

    @functools.cached_property
    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors)


@checked()
@dataclass(frozen=True, slots=True)
class Layout:
    """The sync units of a model, in order. Equal on all nodes of a run."""

    units: tuple[UnitLayout, ...]

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits of a SHA-256 over names and shapes."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def model_sha256(layout: Layout, facts: tuple[tuple[str, str], ...], num_samples: int) -> str:
    """Return the digest of everything that must be equal for nodes to train one model."""
    units = [[unit.name, [[t.name, list(t.shape)] for t in unit.tensors]] for unit in layout.units]
    text = json.dumps([units, [list(fact) for fact in sorted(facts)], num_samples], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Verdict(IntEnum):
    """Decision of a hub about a push. The values are those of hub.proto."""

    NONE = 0
    """Not decided yet."""
    MERGED = 1
    REFUSED = 2
    """Not merged; the node keeps its progress and sends it again with the next push."""
    DISTRUSTED = 3
    """Not believed; the node takes the anchor as it is."""


@dataclass(frozen=True, slots=True)
class News:
    """State of the run as the hub last reported it."""

    age_s: float = float("inf")
    """Seconds since the report."""
    round: int = 0
    pace_steps: int = 0
    """Inner steps that the hub asks of this node before its next push; 0: the node decides."""
    nodes: int = 1
    """Live nodes."""
    total_steps: int = 0
    """Inner steps of all nodes."""
    total_tokens: int = 0
    elapsed_s: float = 0.0
    """Time that the run has lasted, in seconds."""
    progress: float = 0.0
    """Share of the run's budget that is used up, 0 to 1; `finished` comes with 1."""
    finished: bool = False
    evaluates: bool = False
    """Whether this node measures the held-out loss."""


RL_REPORT = (
    "reward",
    "solved",
    "staleness",
    "staleness_max",
    "mismatch_kl",
    "length",
    "groups",
    "rollouts",
    "no_signal",
    "rollout_tokens",
    "rollout_s",
    "compared_s",
    "as_plain_s",
    "passes",
    "arms/off",
    "arms/suffix",
    "arms/layer",
    "arms/other",
    "idle_s/round",
    "idle_s/hub",
    "idle_s/rollouts",
    "idle_s/longest sample",
    "idle_s/rank",
    "idle_s/rewards",
    "idle_used_s",
)
"""Names of the numbers that a node reports to its hub about reinforcement learning.

As in `rl` of its metrics, but steps of the engine are counted by drafter.
"""


class IdleWork(Protocol):
    """Interruptible work that a node does while it waits."""

    @property
    def used_s(self) -> float:
        """Return the processor time that the work has used so far, in seconds.

        Never decreases and never blocks. It may lag behind by the piece of work in progress.
        """

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Return a context manager that the node enters when a wait begins; its exit never blocks.

        cause: why the node waits, such as "round".
        """


class UserError(Exception):
    """Error that only the user can correct. The command line shows it as one line and exits with code 2."""


class RunFailed(Exception):
    """A run cannot go on. The command line shows the reason as one line and exits with code 1."""


def printable(text: str, most: int | None = None) -> str:
    """Return foreign text for a terminal: `?` for control characters, at most `most` characters."""
    text = text[:most]
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class.

    With the next line where the first one ends with a colon, as in transformers' validation of fields, and
    with the class of a KeyError, whose message is the key alone.
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [kind]
    line = f"{kind}: {lines[0]}" if isinstance(error, KeyError) else lines[0].rstrip()
    return f"{line} {lines[1].strip()}" if line.endswith(":") and len(lines) > 1 else line


LONGEST_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def name_fault(name: str, most: int = LONGEST_NAME) -> str:
    """Return why `name` is not one of a run, node, hub, peer, server or line; "" if it is one.

    Names become parts of paths, and a person tells members apart by them: letters of other scripts look like
    these. most: characters that it may have.
    """
    if len(name) <= most and _NAME.fullmatch(name) and name not in (".", ".."):
        return ""
    shown = repr(printable(name, most))
    return f"{shown} is not 1 to {most} letters (a to z, A to Z), digits, dots, dashes or underscores"


def address_fault(address: str) -> str:
    """Return why `address` is not a HOST:PORT at which others reach a server; "" if it is one."""
    host, _, port = address.rpartition(":")
    fine = len(host) <= _LONGEST_HOST and _HOST.fullmatch(host) and host.lower() not in _SCHEMES
    if not fine or not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16):
        return f"address {address[:64]!r} is not HOST:PORT, as in 10.0.0.1:7001"
    if host in _ANYWHERE:
        return f"address {address} is where a server listens; name the host that others reach"
    return ""


def check(ok: bool, name: str, rule: str, value: object) -> None:
    """Raise ValueError for a configuration value: `check(n > 0, "train.steps", "must be above 0", n)`."""
    if not ok:
        raise ValueError(f"{name} {rule}, got {value}")


def check_url(name: str, url: str) -> None:
    """Raise ValueError unless the value of a key is empty or the URL of a web server."""
    try:
        parts = urlsplit(url)
        fits = not url or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        fits = False
    check(fits, name, "must be an http:// or https:// URL", "a text that is not shown, as it may be secret")


def imported(path: str, key: str, methods: tuple[str, ...] = ()) -> Any:
    """Return the object that the configuration value `key` names as `package.module:Name`.

    Raises ValueError if it cannot be imported, cannot be called, or is a class without one of `methods`.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}: {path} cannot be imported: {error}") from None
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing or not callable(found):
        what = f"has no method {missing[0]}" if missing else "cannot be called"
        raise ValueError(f"{key}: {path} {what}")
    return found
