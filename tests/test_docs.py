"""Tests that the files, links, commands, configuration keys and RPCs named in the pages exist."""

import re
import tomllib
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
