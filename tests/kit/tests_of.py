"""Print the test files that import a name of one module: `python -m kit.tests_of edit/schedule.py`."""

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def importers(module: Path, root: Path) -> list[Path]:
    """Return the tests that import `module`, a file below `root`, or a name of it from its package."""
    relative = module.relative_to(root).with_suffix("").as_posix().removeprefix("src/").removeprefix("aedit/")
    name = "aedit." + relative.replace("/", ".")
    package, _, short = name.rpartition(".")
    defined = {short}
    for statement in ast.parse(module.read_text()).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            defined.add(statement.name)
    return [file for file in sorted(TESTS.rglob("test_*.py")) if _imports(file, name, package, defined)]


def _imports(file: Path, name: str, package: str, defined: set[str]) -> bool:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            among_it = node.module == package and defined & {alias.name for alias in node.names}
            if node.module == name or among_it:
                return True
        if isinstance(node, ast.Import) and name in [alias.name for alias in node.names]:
            return True
    return False


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(
            f"FILE: expected a module such as edit/schedule.py, got {' '.join(sys.argv[1:]) or 'nothing'}"
        )
    found = importers(Path(sys.argv[1]), Path())
    print(*found) if found else sys.exit(f"no test imports {sys.argv[1]} or a name that it defines")
