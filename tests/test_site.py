"""Tests that the documentation site builds without a warning and refers to nothing outside itself."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import aedit

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "aedit": "aedit",
    **{name: f"aedit.{name}" for name in ("edit", "async_sgd", "proto", "spec_rollout")},
}


def public(module):
    """Return the names that a package exports, without its sub-packages."""
    return [
        name for name in importlib.import_module(module).__all__ if f"aedit.{name}" not in PACKAGES.values()
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    words = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_shows_every_public_name(site):
    for page, module in PACKAGES.items():
        html = (site / "api" / page / "index.html").read_text()
        missing = [name for name in public(module) if f'id="{module}.{name}"' not in html]
        assert missing == []


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 14
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img)[^>]*?(?:src|href)=\"?(https?://[^\" >]+)", page.read_text()
        )
        assert loaded == [], page


def test_every_page_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    named = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(pages)


def test_the_citation_and_the_changelog_name_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == aedit.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", aedit.__version__]
