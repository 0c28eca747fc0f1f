"""Tests that what the pages name exists (files, links, commands, keys, functions), and of their size."""

import ast
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from aedit.launch.cli.main import parser
from aedit.launch.config import RunConfig, hints, load, values
from aedit.proto.rpc import hub_pb2

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text() for page in PAGES}
KEYS = {name for name, _ in values(RunConfig())} | set(hints())
GROUPS = {name[:end] for name in KEYS for end in [i for i, c in enumerate(name) if c == "."]}


def each(pattern, page=None):
    """Return all matches in one page, or in all."""
    texts = [TEXT[page]] if page else TEXT.values()
    return sorted({found for text in texts for found in re.findall(pattern, text)})


@pytest.mark.parametrize(
    "path", each(r"`((?:tests|benchmarks|configs|docs|launch/templates)/[\w./-]+\.\w+)`")
)
def test_files_that_a_page_names_are_there(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", each(r"python -m (benchmarks\.\w+)"))
def test_benchmarks_that_a_page_names_are_there(name):
    assert (ROOT / f"{name.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_somewhere(page):
    folder = next(path.parent for path in PAGES if path.name == page)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[\w-]*)?\)", TEXT[page]):
        assert target.startswith("http") or (folder / target).exists(), target


def test_every_command_in_a_block_is_one_that_the_program_takes():
    for page, text in TEXT.items():
        for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                words = re.sub(r"\s+#.*", "", line).replace("[", "").replace("]", "").split()
                if not words or Path(words[0]).name != "aedit" or len(words) < 2:
                    continue
                command = parser().parse_known_args([word.strip("'") for word in words[1:]])[0]
                assert command.task, f"{page}: {line}"


TABLES = "edit|hub|outer|train|data|model|local|prompts|reward|rl|drafter"


@pytest.mark.parametrize("key", each(rf"`(?!\w+\.(?:py|proto)`)((?:{TABLES})\.[a-z_.]+?)(?:\*| =[^`]*)?`"))
def test_keys_that_a_page_names_are_in_the_configuration(key):
    assert key in KEYS or key.rstrip(".") in GROUPS or any(name.startswith(key) for name in KEYS)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_preset_has_its_row(path):
    load(path, [])
    if not path.stem.startswith("tiny"):
        assert f"`{path.stem}`" in TEXT["methods.md"]
        assert f"`{path.stem}`" in TEXT["README.md"]


def test_the_protocol_page_names_every_call_of_a_node_and_every_record():
    page = TEXT["protocol.md"]
    for service in ("Membership", "Exchange", "State"):
        for method in hub_pb2.DESCRIPTOR.services_by_name[service].methods:
            assert method.name in page, method.name
    from aedit.async_sgd.rules import Record

    for record in Record.__args__:
        assert re.search(rf"\b{record.__name__}\b", page), record.__name__


def test_the_readme_is_short():
    assert len(TEXT["README.md"].splitlines()) <= 150


def test_the_configuration_of_the_quickstart_can_be_read(tmp_path):
    for block in re.findall(r"```toml\n(.*?)```", TEXT["quickstart.md"], re.DOTALL):
        tomllib.loads(block)
        (tmp_path / "run.toml").write_text(block)
        load(tmp_path / "run.toml", [])


# --- size and style of the pages

WORDS = 42_000
SENTENCE_WORDS = 25
ALL_PAGES = [*PAGES, *sorted((ROOT / "docs" / "results").glob("*.md"))]


def prose(text):
    """Return the paragraphs of a page without code blocks, tables, headings and images; code spans are X."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = ["" if line.lstrip().startswith(("|", "#", "![")) else line for line in text.splitlines()]
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", "\n".join(lines), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", text))
    return [block for block in re.split(r"\n\s*\n", text) if block.strip()]


def sentence_lengths(text):
    """Return the numbers of words of the sentences of a page, in ascending order."""
    sentences = [each for block in prose(text) for each in re.split(r"(?<=[.!?])\s+", block.strip())]
    return sorted(len(sentence.split()) for sentence in sentences if sentence)


def test_sentences_are_counted_outside_of_code_and_tables():
    page = "# A b c\n\nOne `two three` four. Five: six\nseven.\n\n```\nno no no\n```\n| no |\n- [a b](c.md)\n"
    assert sentence_lengths(page) == [2, 3, 3]


def test_the_pages_are_short_together():
    assert sum(len(page.read_text().split()) for page in ALL_PAGES) <= WORDS


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page):
    lengths = sentence_lengths(page.read_text())
    assert lengths[int(0.9 * len(lengths))] <= SENTENCE_WORDS


FORBIDDEN = ("nobody", "whoever", "told", "heard")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_technical_terms(page):
    words = set(re.findall(r"[a-z]+", " ".join(prose(page.read_text())).lower()))
    assert words.isdisjoint(FORBIDDEN)


# --- links to headings


def anchors(path):
    """Return the anchors of the headings of a page, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*ALL_PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_to_headings_lead_to_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text):
        if not target.startswith("http"):
            path = (page.parent / target).resolve() if target else page
            assert anchor in anchors(path), f"{target}#{anchor}"


# --- folders, files and functions that developing.md names

PARTS = "edit|async_sgd|proto|spec_rollout|launch|benchmarks|examples|tests|src"
DEVELOPING = TEXT["developing.md"]
FOLDERS = set(re.findall(rf"`((?:{PARTS})(?:/[\w*]+)*)/`", DEVELOPING))
FUNCTIONS = re.findall(rf"`((?:{PARTS})/[\w/]+\.py)::([\w.]+)`", DEVELOPING)


def test_the_map_has_every_folder_with_python_files():
    files = [path for part in PARTS.split("|") for path in (ROOT / part).rglob("*.py")]
    folders = {str(path.parent.relative_to(ROOT)) for path in files if not path.is_symlink()}
    folders = {folder for folder in folders if "__pycache__" not in folder}
    missing = {folder for folder in folders if not any(fnmatchcase(folder, name) for name in FOLDERS)}
    assert missing == set(), "name them in docs/developing.md"


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_the_map_names_folders_that_are_there(folder):
    assert any(path.is_dir() for path in ROOT.glob(folder))


def defined(path):
    """Return the functions, classes and methods of a file by dotted name."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in inner}
    return names


@pytest.mark.parametrize(("file", "name"), FUNCTIONS)
def test_the_ways_of_a_push_and_a_prompt_name_functions_that_are_there(file, name):
    assert (ROOT / file).is_file(), f"{file}: renamed? correct docs/developing.md"
    assert name in defined(ROOT / file), f"{file}: no {name}; correct docs/developing.md"


def test_the_ways_have_steps():
    for title in ("How a push travels", "How a prompt travels"):
        section = DEVELOPING.split(f"## {title}\n")[1].split("\n## ")[0]
        assert len(re.findall(r"^\d+\. .*::", section, re.MULTILINE)) >= 9
