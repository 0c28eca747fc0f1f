"""Names that a package offers and imports on first use (PEP 562): importing the package costs nothing."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the `__init__` file of `package`.

    Args:
        package: Name of the package.
        modules: For each public name the module that defines it; a sub-package stands for itself.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it offers {', '.join(modules)}"
            )
        module = importlib.import_module(modules[name])
        value = module if modules[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # from now on it is found without this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, names
