"""Version of the code that makes a run."""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aedit

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def provenance() -> str:
    """Return versions, digest of the package's sources, and git commit if there is one, as `key.

    Value` lines.
    """
    facts = {"aedit": aedit.__version__, "sources": source_digest(), "commit": _commit()}
    facts |= {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES}
    return "".join(f"{name}: {value}\n" for name, value in facts.items() if value)


def source_digest() -> str:
    """Return SHA-256 over the names and contents of the package's `.py` and `.proto` files, 16 hex digits."""
    root = _root()
    digest = hashlib.sha256()
    # os.walk, as rglob does not follow the links of a checkout before Python 3.13.
    folders = os.walk(root, followlinks=True)
    paths = [Path(folder) / name for folder, _, names in folders for name in names]
    for path in sorted(path for path in paths if path.suffix in (".py", ".proto")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _root() -> Path:
    return Path(aedit.__file__).parent


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the git commit if the package is a checkout; "" also for a `.venv` inside another repository."""
    if not _git("ls-files", "__init__.py"):
        return ""
    return _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _git(*words: str) -> str:
    command = ["git", "-C", str(_root()), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
