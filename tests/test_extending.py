"""Tests that the code of docs/extending.md runs, and that the tests named in docs/methods.md exist."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHODS = ROOT / "docs" / "methods.md"


def test_the_code_blocks_of_the_extending_page_run(world, tmp_path):
    (steps,) = world.run(
        "tests/dist_jobs/page_jobs.py", "run_page", size=1, args={"out": str(tmp_path)}, timeout_s=90
    )
    assert steps == {"landed": 2, "steps": 18, "trainer": 5}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`aedit\.([\w.]+)`", METHODS.read_text()))))
def test_the_methods_page_names_functions_that_exist(name):
    pkgutil.resolve_name(f"aedit.{name}")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.py::\w+)`", METHODS.read_text()))))
def test_the_methods_page_names_tests_that_exist(name):
    file, function = name.split("::")
    (path,) = (ROOT / "tests").rglob(file)
    assert f"def {function}(" in path.read_text()
