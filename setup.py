"""Refuse to build a package whose parts are missing; everything else stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).resolve().parent / "src" / "aedit"
LINKS = ("edit", "async_sgd", "spec_rollout", "proto", "launch", "launch/presets")
"""Directories of the package that are symbolic links in git; an sdist holds copies of them instead."""

if missing := [name for name in LINKS if not (PACKAGE / name).is_dir()]:
    raise SystemExit(
        f"aedit cannot be built: no directory at {', '.join(f'src/aedit/{name}' for name in missing)}. "
        "These are symbolic links, which a zip file or a checkout on Windows turns into text files. "
        "Enable links (developer mode, then `git config --global core.symlinks true`) and clone again, "
        "or install from a wheel or an sdist."
    )

setup()
