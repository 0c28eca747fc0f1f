"""Tests that docstrings state something, and that nothing in the project depends on one machine."""

import ast
import re
import subprocess
from pathlib import Path

from kit.tests_of import importers

ROOT = Path(__file__).resolve().parent.parent

PARTS = ("edit", "async_sgd", "proto", "spec_rollout", "launch", "src")

# Folders of a single machine or user.
OWN_PLACE = re.compile(r"(?<![\w.~*])/(?:root|home|Users|work|opt|mnt|srv)/\w")


def tracked(*patterns):
    """Return the files in git that match, without deleted ones; safe.directory, as CI may be another user."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return [ROOT / name for name in names.split("\0")[:-1] if (ROOT / name).is_file()]


def sources():
    """Return the handwritten files that users run."""
    names = tracked("*.py", ":!*_pb2*.py")
    found = [file for file in names if ROOT / "tests" not in file.parents]
    assert len(found) > 50
    return found


RIDDLE = re.compile(r"(?:What|Who|Whose|Whether|Which|Where|By|Of|How) ")


def test_docstrings_of_the_library_state_something():
    """Ruff checks form and mood; this finds noun clauses, such as "What a unit's next anchor is."."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = [file for file in sources() if file.relative_to(ROOT).parts[0] in PARTS]
    found = [
        f"{file.relative_to(ROOT)}: {ast.get_docstring(node).splitlines()[0]}"
        for file in parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds) and RIDDLE.match(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_nothing_names_a_place_that_only_one_machine_has():
    files = [file for file in tracked() if file.suffix not in (".png", ".svg") and file != Path(__file__)]
    found = {str(f.relative_to(ROOT)): OWN_PLACE.findall(f.read_text()) for f in files}
    assert {file: places for file, places in found.items() if places} == {}


def test_a_place_that_only_one_machine_has_is_recognised():
    for text in ('"/home/me/data"', "cd /root/x"):
        assert OWN_PLACE.search(text)
    for text in ("https://host/home/x", "run_dir/work/x", "/tmp/x"):
        assert not OWN_PLACE.search(text)


def test_sources_are_ascii():
    assert [str(file.relative_to(ROOT)) for file in tracked("*.py") if not file.read_bytes().isascii()] == []


def test_make_check_finds_the_tests_that_import_a_module_or_its_names_from_the_package():
    schedule = {file.name for file in importers(ROOT / "edit" / "schedule.py", ROOT)}
    assert "test_schedule.py" in schedule
    assert "test_codecs.py" not in schedule
