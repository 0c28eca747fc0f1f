"""Tests the command line: fast help, one-line errors, exit codes."""

import importlib.util
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import aedit
from aedit.launch.cli import main
from aedit.launch.cli.doctor import EXTRAS
from aedit.launch.config import load, preset_names
from aedit.types import UserError

COMMANDS = (
    *("run", "hub", "join", "keys", "status", "top", "plot", "export", "generate", "config", "doctor"),
    *("init", "completion", "serve", "audit"),
)


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["config", "show", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(words):
    """Help takes a fraction of a second because of what it leaves out: a time would depend on the machine."""
    code = (
        "import sys\n"
        "from aedit.launch.cli import main\n"
        "before = set(sys.modules)\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'matplotlib', 'transformers', 'numpy', 'rich', 'grpc'} & set(sys.modules)\n"
        "ours = [name for name in sys.modules if name.startswith('aedit.')]\n"
        "more = set(sys.modules) - before\n"
        "sys.exit(f'imported {heavy}' if heavy else f'{len(ours)} of ours, {len(more)} more'\n"
        "         if len(ours) > 40 or len(more) > 250 else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_lists_the_commands_there_are_and_no_others(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {command}" in shown for command in COMMANDS)
    assert not any(f"\n    {word} " in shown for word in ("simulate", "train"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "CONFIG"),
        (["walk"], "unknown command 'walk'"),
        (["rnu", "x.toml"], "unknown command 'rnu'; did you mean run?"),
        (["config", "shwo"], "unknown command 'shwo'; did you mean show?"),
        (["completion", "bsh"], "did you mean bash?"),
        (["run", "missing.toml", "--dry-rnu"], "--dry-rnu; did you mean --dry-run?"),
        (["hub", "missing.toml", "--dry-run"], "unrecognized arguments: --dry-run; see"),
        (["run", "missing.toml"], "missing.toml: no such file"),
        (["run", "configs/tiny.toml"], "configs/tiny.toml: no such file; did you mean preset:tiny"),
        (["run", "preset:asinc"], "no preset 'asinc'; did you mean async?"),
        (["run", "preset:tiny", "missing.toml"], "missing.toml: no such file"),
        (["init", "x", "--preset", "y"], "no preset 'y'; there are a-edit, "),
        (["init", "a b"], "NAME: 'a b' is not 1 to 128 letters"),
        (["init", "no/x"], "no/x.toml: cannot be written: No such file or directory"),
        (["run", "missing.toml", "--edit.evry", "3"], "did you mean --edit.every?"),
        (["run", "missing.toml", "--fast"], "--fast"),
        (["run", "missing.toml", "--local", "x"], "--local"),
        (["run", "missing.toml", "--local", "0"], "--local: must be at least 1, got 0"),
        (["run", "missing.toml", "--local", "2", "--node", "1"], "--local: starts all nodes here"),
        (["run", "missing.toml", "--nodes", "2"], "--master"),
        (["config"], "COMMAND"),
        (["export", "missing", "out"], "missing: not a run directory"),
        (["generate", "missing", "--prompt", "x"], "missing: no run and no model directory"),
        (["peer", "preset:swarm", "--as", "../x"], "--as: '../x' is not 1 to 128 letters"),
        (["join", "nowhere"], "nowhere: expected the hub's HOST:PORT"),
        (["config", "diff", "missing.toml", "missing.toml"], "missing.toml: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("aedit: ")
    assert err.count("\n") == 1
    assert message in err


def test_ctrl_c_is_exit_code_130(monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("aedit.launch.config.load", interrupted)
    assert main(["config", "show", str(tmp_path)]) == 130


def test_config_show_prints_every_value_with_its_origin(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text("[edit]\nevery = 64\n")
    assert main(["config", "show", str(path), "--seed", "3"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["edit.every"] == ["64.0", f"{path}:2"]
    assert rows["seed"] == ["3", "flag"]
    assert rows["train.steps"] == ["1000", "default"]


def test_init_writes_every_preset_with_its_comments_under_a_name_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(preset_names()) >= 11
    for preset in preset_names():
        assert main(["init", f"my-{preset}", "--preset", preset]) == 0
        mine, shipped = Path(f"my-{preset}.toml"), Path(f"preset:{preset}")
        assert load(mine, []).config == replace(load(shipped, []).config, name=f"my-{preset}")
        comments = [line.partition("#")[2] for line in mine.read_text().splitlines() if "#" in line]
        assert len(comments) >= 3
        assert not any("configs/" in comment for comment in comments)
    assert "aedit run my-tiny.toml --dry-run" in capsys.readouterr().out
    assert "aedit hub preset:halos-global\n" in Path("my-halos.toml").read_text()
    assert main(["init", "async"]) == 0
    assert load(Path("async.toml"), []).config == load(Path("preset:async"), []).config
    assert main(["init"]) == 0
    assert load(Path("run.toml"), []).config == replace(load(Path("preset:tiny"), []).config, name="run")


def test_init_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("seed = 7\n")
    assert main(["init"]) == 2
    assert "run.toml exists already" in capsys.readouterr().err
    assert Path("run.toml").read_text() == "seed = 7\n"


def test_config_diff_prints_what_differs_and_nothing_else(tmp_path, capsys):
    one, other = tmp_path / "a.toml", tmp_path / "b.toml"
    one.write_text("seed = 1\n[edit]\nevery = 64\n")
    other.write_text("seed = 1\n[edit]\nevery = 32\n")
    assert main(["config", "diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.split() == ["edit.every", "64.0", "32.0"]


def test_output_into_a_closed_pipe_is_no_error(tmp_path):
    (tmp_path / "a.toml").write_text("")
    command = f"{sys.executable} -m aedit.launch.cli config show {tmp_path}/a.toml | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_doctor_finds_a_configuration_that_cannot_work(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text('data.source = "nowhere/*.txt"\nmodel.family = "lama"\n')
    assert main(["doctor", str(path)]) == 2
    shown = capsys.readouterr().out
    assert "nowhere" in shown
    assert "fail" in shown


def test_the_doctor_is_content_with_this_machine():
    assert main(["doctor"]) == 0


def test_the_doctor_shows_the_names_of_extras_whole(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else object())
    main(["doctor"])
    assert "aedit[datasets]" in "".join(capsys.readouterr().out.split())


def test_the_doctor_names_the_extras_that_a_configuration_with_rewards_needs(tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    gone = ("reasoning_gym", "math_verify")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in gone else find(name))
    path = tmp_path / "a.toml"
    assert main(["init", str(path), "--preset", "tiny-rl"]) == 0
    assert main(["doctor", str(path)]) == 0
    path.write_text(path.read_text().replace('["numeric"]', '["numeric", "math"]'))
    path.write_text(path.read_text().replace('source = "aedit', 'source = "gym:chain_sum" # "aedit'))
    assert main(["doctor", str(path)]) == 2
    shown = "".join(capsys.readouterr().out.split())
    for extra, module in zip(("gym", "math"), gone, strict=True):
        assert f"needs{extra}fail" in shown
        assert f"no{module}" in shown


def test_the_doctor_knows_every_extra_that_a_user_may_install():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"lightning", "docs", "test"}


def completed(script, *words):
    """Return bash's completions of the last word."""
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_aedit; printf "%s\\n" '
        '"${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(script), *words], capture_output=True, text=True, timeout=30
    )
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_flags_their_choices_and_files(tmp_path, capsys, monkeypatch):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "aedit.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(script, "aedit", "do") == ["doctor"]
    assert completed(script, "aedit", "run", "--dry") == ["--dry-run"]
    assert completed(script, "aedit", "run", "--edit.sch") == ["--edit.schedule"]
    assert completed(script, "aedit", "run", "--edit.schedule", "s") == ["steps", "seconds"]
    assert completed(script, "aedit", "run", "mi") == ["mine.toml"]


def test_the_package_is_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "aedit", "--version"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"aedit {aedit.__version__}\n")


def test_the_views_and_export_are_reached(monkeypatch, tmp_path):
    called = []
    for name in ("status", "top", "plot"):

        def main_of(place, keys, *, insecure, name=name):
            called.append((name, Path(place)))
            return []

        monkeypatch.setattr(f"aedit.launch.views.{name}_command", main_of)
    for name in ("status", "top", "plot"):
        assert main([name, str(tmp_path)]) == 0
    assert called == [(name, tmp_path) for name in ("status", "top", "plot")]


def test_a_command_may_refuse(monkeypatch, tmp_path, capsys):
    def refuse(place, keys, *, insecure):
        raise UserError("no run here")

    monkeypatch.setattr("aedit.launch.views.status_command", refuse)
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "aedit: no run here\n"
