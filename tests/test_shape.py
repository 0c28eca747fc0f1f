"""Tests that docstrings state something, and that nothing in the project depends on one machine."""

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
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


VAGUE = re.compile(
    r"\b(?:nobody|somebody|everybody|whoever|told|heard|for so long)\b|\b(?:for|as) people\b", re.IGNORECASE
)
UNCLEAR_NAMES = {"Crowded", "Expected", "Heirs", "Here", "Life", "Moment", "Quiet", "Short", "Silence"} | {
    "Standing",
    "Stranger",
    "Stretch",
    "Tally",
    "Told",
}


def prose(text):
    """Return the comments of a source and the strings that stand alone: its docstrings, by line."""
    found = []
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    skipped = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    before = tokenize.NEWLINE
    for token in tokens:
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and before == tokenize.NEWLINE):
            found.append((token.start[0], token.string))
        if token.type not in skipped:
            before = token.type
    return found


def test_comments_and_docstrings_use_the_terms_of_the_field():
    """Members, peers, nodes, callers: one word per concept, and it is the actor's."""
    parts = [file for file in sources() if file.relative_to(ROOT).parts[0] in PARTS]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {VAGUE.search(text).group()}"
        for file in parts
        for line, text in prose(file.read_text())
        if VAGUE.search(re.sub(r"`[^`]*`|^ *\w+: ", "", text, flags=re.MULTILINE))
    ]
    assert found == []


def test_classes_have_names_that_say_what_they_are():
    parts = [file for file in sources() if file.relative_to(ROOT).parts[0] in PARTS]
    classes = [
        (file, node.name)
        for file in parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [f"{file}: {name}" for file, name in classes if name.strip("_") in UNCLEAR_NAMES] == []


def test_a_public_name_stands_in_one_file():
    """One word per concept. `main` is the entry of a program."""
    places = defaultdict(set)
    for file in sources():
        if file.relative_to(ROOT).parts[0] in PARTS:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    places[node.name].add(str(file.relative_to(ROOT)))
    public = {name: files for name, files in places.items() if not name.startswith("_") and name != "main"}
    assert {name: files for name, files in public.items() if len(files) > 1} == {}


def test_vague_words_are_found_in_prose_alone():
    text = '"""Tell nobody."""\ntold = "heard"  # whoever asks\n'
    assert [line for line, part in prose(text) if VAGUE.search(part)] == [1, 2]


def test_nothing_names_a_place_that_only_one_machine_has():
    files = [
        file for file in tracked() if file.suffix not in (".png", ".svg", ".webp") and file != Path(__file__)
    ]
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
