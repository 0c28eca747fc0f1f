"""Print the pins that are behind the newest release, and why: `python -m kit.outdated .venv=constraints.txt`.

Each argument names a virtual environment and the constraints that it is installed with. The reason of a pin
that is held back follows it as a comment: `name==1.2.3  # other-package 4.5 wants name<1.3`. Exit code 1: a
pin is behind without a reason, or has a reason and is not behind. Exit code 2: nothing could be compared.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[0-9][^\s#]*)(?:\s+#\s*(?P<reason>\S.*?))?\s*")
LIMIT_S = 900
NO_REASON = "NO REASON: raise the pin, or write the reason after it"
NO_NEED = "NOT BEHIND: remove the reason"


class PinError(Exception):
    """The pins cannot be compared; the text says why."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One line of a file of constraints."""

    name: str
    version: Version
    reason: str = ""


def read_pins(file):
    """Return the pins of a file of constraints. Raises PinError if a line is none."""
    found = []
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            pin = PIN.fullmatch(line)
            if pin is None:
                raise PinError(f"{file}:{number}: expected name==version and perhaps a comment, got {line!r}")
            name = canonicalize_name(pin["name"])
            found.append(Pin(name, Version(pin["version"]), pin["reason"] or ""))
    return found


def newest_releases(environment):
    """Return the newest release of each installed package, by name, as the index of pip has them.

    Raises PinError if the index does not answer: pip itself would list nothing then.
    """
    (site,) = Path(environment).glob("lib/python*/site-packages")
    found = {
        each.metadata["Name"]: each.version for each in importlib.metadata.distributions(path=[str(site)])
    }
    if not found:
        raise PinError(f"{environment}: no package is installed")
    behind = _pip("list", "--outdated", "--path", str(site), "--format", "json")
    if not behind:
        _pip("index", "versions", next(iter(found)), "--json")
    found |= {each["name"]: each["latest_version"] for each in behind}
    return {canonicalize_name(name): Version(Version(text).public) for name, text in found.items()}


def _pip(*words):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    # After its retries pip goes on without the package, as if no newer release existed.
    if done.returncode or "Retrying" in done.stderr:
        said = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise PinError(f"pip {' '.join(words)}: {said[-1]}; run it again when the index answers")
    return json.loads(done.stdout)


def compare(pins, newest):
    """Return rows (name, pin, newest release, reason) of pins behind, and the number of faults."""
    rows, faults = [], 0
    for pin in pins:
        latest = newest.get(pin.name)
        if latest is None:
            continue
        is_behind = latest > pin.version
        if is_behind != bool(pin.reason):
            faults += 1
        if is_behind or pin.reason:
            why = (pin.reason or NO_REASON) if is_behind else f"{NO_NEED}: {pin.reason}"
            rows.append((pin.name, str(pin.version), str(latest), why))
    return rows, faults


def show(environment, file):
    """Print one environment's rows; return the number of faults."""
    pins = read_pins(file)
    if not (Path(environment) / "bin" / "python").exists():
        print(f"{file}: not compared, as {environment} is missing")
        return 0
    newest = newest_releases(environment)
    rows, faults = compare(pins, newest)
    known = [pin for pin in pins if pin.name in newest]
    print(f"{file}: {len(known)} pins, {len([row for row in rows if row[1] != row[2]])} behind")
    widths = [max(len(row[i]) for row in rows) if rows else 0 for i in range(3)]
    for row in rows:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)))
    if absent := [pin.name for pin in pins if pin.name not in newest]:
        print(f"  not installed in {environment}, not compared: {', '.join(absent)}")
    return faults


def main(words):
    """Run the command line; return its exit code."""
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(environment and file for environment, _, file in pairs):
        print(f"expected ENVIRONMENT=CONSTRAINTS ..., got {' '.join(words) or 'nothing'}", file=sys.stderr)
        return 2
    try:
        return int(sum([show(environment, file) for environment, _, file in pairs]) > 0)
    except (PinError, OSError, subprocess.TimeoutExpired) as error:
        print(f"make outdated: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
