"""Names that a package exports and imports on first use (PEP 562): importing the package costs nothing."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the `__init__` file of `package`.

    The names and the modules that define them are those which the file imports under `if TYPE_CHECKING:`,
    where type checkers read them too.
    """
    modules = dict(_imported_for_type_checkers(package))

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it offers {', '.join(modules)}"
            )
        if modules[name] == package:
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # from now on it is found without this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, names


def _imported_for_type_checkers(package: str) -> Iterator[tuple[str, str]]:
    """Yield each name that the `__init__` file of `package` imports for type checkers, and from where."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    for block in ast.parse(loader.get_source(package)).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                    yield from ((alias.name, statement.module) for alias in statement.names)
