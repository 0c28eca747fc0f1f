"""Tests `make outdated` on an environment and a folder of releases made here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parent.parent
INSTALLED = {"held": "1.0", "late": "1.0", "new": "2.0", "trial": "1.0", "eased": "3.0"}
INSTALLED["local"] = "2.13.0+cpu"
RELEASES = ["held-1.0", "held-1.4", "late-1.0", "late-1.10", "late-1.9", "new-2.0", "eased-3.0"]
RELEASES += ["trial-1.0", "trial-1.1rc1", "local-2.13.0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with an environment `env` of installed packages, and `releases`, the index of pip."""
    root = tmp_path_factory.mktemp("outdated")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "env"], check=True, timeout=500)
    (site,) = (root / "env").glob("lib/python*/site-packages")
    for name, version in INSTALLED.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (root / "releases").mkdir()
    for release in RELEASES:
        (root / "releases" / f"{release}-py3-none-any.whl").touch()
    return root


def outdated(place, text, *, releases="releases", environment="env"):
    """Return exit code, output and errors of the command for a file of constraints."""
    (place / "pins.txt").write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place / releases)}
    env |= {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "kit.outdated", f"{environment}=pins.txt"]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout, done.stderr


def test_a_pin_behind_with_its_reason_is_no_fault_and_pins_that_are_newest_are_not_shown(place):
    code, out, err = outdated(
        place,
        "# heading\nheld==1.0  # other 2.1 wants held<1.2\n\nnew==2.0\ntrial==1.0\nlocal==2.13.0\nnone==1\n",
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "pins.txt: 4 pins, 1 behind",
        "  held  1.0  1.4  other 2.1 wants held<1.2",
        "  not installed in env, not compared: none",
    ]


@pytest.mark.parametrize(
    ("pin", "row"),
    [
        ("late==1.0", "late  1.0  1.10  NO REASON: raise the pin, or write the reason after it"),
        ("late==1.9", "late  1.9  1.10  NO REASON: raise the pin, or write the reason after it"),
        ("eased==3.0  # a cap", "eased  3.0  3.0  NOT BEHIND: remove the reason: a cap"),
    ],
)
def test_a_reason_that_is_missing_or_not_needed_is_a_fault(place, pin, row):
    code, out, _ = outdated(place, f"{pin}\nnew==2.0\n")
    assert (code, out.splitlines()[1:]) == (1, [f"  {row}"])


def test_a_pin_is_compared_and_not_what_is_installed(place):
    assert outdated(place, "late==1.10\n")[:2] == (0, "pins.txt: 1 pins, 0 behind\n")


@pytest.mark.parametrize("line", ["held>=1.0", "held==1.0 other", "held"])
def test_a_line_that_is_no_pin_is_named(place, line):
    code, out, err = outdated(place, f"new==2.0\n{line}\n")
    assert (code, out) == (2, "")
    assert err == (f"make outdated: pins.txt:2: expected name==version and perhaps a comment, got '{line}'\n")


def test_an_index_that_does_not_answer_is_an_error_and_not_a_list_of_current_pins(place):
    (place / "empty").mkdir(exist_ok=True)
    code, out, err = outdated(place, "late==1.0\n", releases="empty")
    assert (code, out) == (2, "")
    assert "No matching distribution found" in err


def test_an_environment_that_is_not_there_is_named(place):
    code, out, _ = outdated(place, "late==1.0\n", environment="none")
    assert (code, out) == (0, "pins.txt: not compared, as none is missing\n")
