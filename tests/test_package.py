"""Tests that every build holds one package with everything in it, and that all versions are pinned."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("edit", "async_sgd", "spec_rollout", "proto", "launch")
DATA = (".proto", ".pyi", ".sh", ".sbatch", ".js", ".css", ".LICENSE")


def command(*words, cwd=ROOT, stderr=subprocess.PIPE):
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + (done.stderr or "")
    return done.stdout


def tracked():
    """Return the names of the files in git, without deleted ones.

    Safe.directory, as CI may be another user.
    """
    names = command("git", "-c", "safe.directory=*", "ls-files", "-z").split("\0")[:-1]
    return [name for name in names if os.path.lexists(ROOT / name)]


def packaged(names):
    """Return the place in the wheel of each tracked module and data file."""
    for name in names:
        path = PurePosixPath(name)
        wanted = path.suffix == ".py" or path.suffix in DATA
        if wanted and path.parts[0] in PARTS:
            yield f"aedit/{name}"
        elif path.suffix == ".toml" and path.parts[0] == "configs":
            yield f"aedit/launch/presets/{path.name}"
        elif path.suffix == ".py" and path.parts[:2] == ("src", "aedit"):
            yield name.removeprefix("src/")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the tracked files with links kept: a build needs nothing else."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """Return the checkout's wheel, the sdist, the wheel built from it, and the output of the first build."""
    direct, by_sdist = tmp_path_factory.mktemp("direct"), tmp_path_factory.mktemp("by_sdist")
    build = (sys.executable, "-m", "build", "--no-isolation")
    # Without --wheel, the wheel is made from the sdist; first, as the other one leaves a build folder.
    command(*build, "--outdir", str(by_sdist), cwd=checkout)
    said = command(*build, "--wheel", "--outdir", str(direct), cwd=checkout, stderr=subprocess.STDOUT)
    (wheel,), (sdist,), (again,) = direct.glob("*.whl"), by_sdist.glob("*.tar.gz"), by_sdist.glob("*.whl")
    return wheel, sdist, again, said


def lose_links(checkout, names):
    """Replace links by files that hold their target, as git does on Windows."""
    for name in names:
        link = checkout / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)


def test_building_says_nothing_about_packages_or_data_files(built):
    said = [line for line in built[3].splitlines() if "byte-compiling" not in line]
    assert any("Successfully built" in line for line in said)
    assert [line for line in said if "warning" in line.lower() or "deprecat" in line.lower()] == []


@pytest.mark.parametrize(
    ("kind", "names"),
    [("--wheel", [f"src/aedit/{part}" for part in PARTS]), ("--sdist", ["launch/presets"])],
)
def test_a_checkout_that_lost_its_links_is_not_built(checkout, tmp_path, kind, names):
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    lose_links(copy, names)
    words = (sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(tmp_path / "out"))
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True, timeout=110)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    named = said.partition("no directory at ")[2].partition(".")[0].split(", ")
    assert {name if name.startswith("src") else f"src/aedit/{name}" for name in names} <= set(named)
    assert "core.symlinks" in said
    assert list((tmp_path / "out").glob("*")) == []


def contents(wheel):
    """Return bytes by name, without the list of hashes, whose order is free."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: archive.read(name) for name in names}


def test_the_wheel_holds_one_package_with_every_module(built):
    names = set(contents(built[0]))
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"aedit"}
    assert {*packaged(tracked()), "aedit/py.typed"} <= names


def test_the_wheel_holds_nothing_else(built):
    ours = {name for name in contents(built[0]) if ".dist-info/" not in name}
    assert ours - set(packaged(tracked())) == {"aedit/py.typed"}
    assert not [name for name in ours if "test" in name]


def test_the_wheel_names_its_command_and_carries_the_licence(built):
    files = {name.split(".dist-info/")[-1]: text for name, text in contents(built[0]).items()}
    assert b"aedit = aedit.launch.cli:main" in files["entry_points.txt"]
    assert files["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_makes_the_same_wheel(built):
    wheel, _, again, _ = built
    assert contents(wheel) == contents(again)


def test_the_sdist_holds_the_presets_and_no_tests(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked() if name.startswith("configs/")} <= names
    assert {"LICENSE", "constraints.txt", "pyproject.toml"} <= names
    assert not [name for name in names if name.split("/")[0] == "tests"]


def test_an_installed_wheel_needs_no_checkout(built, tmp_path):
    site = tmp_path / "site"
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    command(*install, "--target", str(site), str(built[0]), cwd=tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import aedit.launch.config.config as config\n"
        "config.RunConfig()\n"
        "from importlib.resources import files\n"
        "tiny = files('aedit.launch').joinpath('presets', 'tiny.toml')\n"
        "print(config.__file__, 'torch' in sys.modules, tiny.read_text().startswith('#'))"
    )
    said = command(sys.executable, "-c", program, cwd=tmp_path)
    assert said.split() == [str(site / "aedit" / "launch" / "config" / "config.py"), "False", "True"]
    assert (ROOT / "launch" / "presets" / "tiny.toml").samefile(ROOT / "configs" / "tiny.toml")


def test_links_to_the_parts_are_relative():
    links = {part: os.readlink(ROOT / "src" / "aedit" / part) for part in PARTS}
    assert links == {part: f"../../{part}" for part in PARTS}
    assert os.readlink(ROOT / "launch" / "presets") == "../configs"


def pins():
    """Return the pins without the reasons of those that are held back; see kit/outdated.py."""
    lines = [line.partition("  #")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_every_constraint_is_one_plain_version():
    assert [line for line in pins() if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    names = [line.partition("==")[0] for line in pins()]
    assert names == list(dict.fromkeys(names))


def test_what_we_ask_for_allows_what_we_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["build-system"]["requires"]
    extras = project["project"]["optional-dependencies"]
    # Trackio wants an older pillow than the one pinned: it is installed without the constraints.
    asked += [line for name, extra in extras.items() if name != "trackio" for line in extra]
    versions = dict(line.split("==") for line in pins())
    refused = [
        line for line in asked if not Requirement(line).specifier.contains(versions[Requirement(line).name])
    ]
    assert refused == []


def requirements(name, extras):
    """Return the requirements of an installed distribution on this machine."""
    for line in importlib.metadata.requires(name) or []:
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield wanted


def exact(wanted):
    return [spec.operator for spec in wanted.specifier] == ["=="]


def test_everything_we_install_is_pinned():
    pinned = {line.partition("==")[0] for line in pins()} | {"aedit"}
    todo = [Requirement("aedit[datasets,docs,tensorboard,test,wandb]"), Requirement("pip")]
    seen = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        # An exact requirement, as torch's of its accelerator packages, pins the version already.
        pinned |= {name} if exact(wanted) else set()
        if (name, frozenset(wanted.extras)) not in seen:
            seen.add((name, frozenset(wanted.extras)))
            todo += requirements(name, wanted.extras)
    assert len(seen) > 50
    assert {name for name, _ in seen} - pinned == set()
