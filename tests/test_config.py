"""Tests defaults, file and flags: precedence, error messages, and values that survive being written."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aedit
from aedit.launch.cli.main import main
from aedit.launch.config import (
    ModelConfig,
    Placement,
    RunConfig,
    TrainConfig,
    hints,
    load,
    parse_config,
    preset_names,
    split_flags,
    to_toml,
    values,
    warnings,
    with_flags,
)
from aedit.launch.config.checks import without_effect
from aedit.launch.config.config import EditConfig, LocalConfig
from aedit.launch.records import differences
from aedit.types import UserError

PACKAGE = Path(aedit.__file__).parent


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_without_a_file_and_flags_everything_is_a_default():
    loaded = load(None, [])
    assert loaded.config == RunConfig()
    assert set(loaded.origin.values()) == {"default"}


def test_flags_win_over_the_file_and_the_file_over_defaults(written):
    path = written("seed = 1\n[edit]\nevery = 64\nprefetch = 3\n\n[train]\nlr = 1\n")
    loaded = load(path, ["--edit.every", "32", "--train.batch-size=4"])
    assert (loaded.config.edit.every, loaded.config.edit.prefetch, loaded.config.seed) == (32, 3, 1)
    assert loaded.config.train.batch_size == 4
    assert loaded.config.train.lr == 1.0
    assert isinstance(loaded.config.train.lr, float)
    origin = loaded.origin
    assert (origin["edit.every"], origin["train.batch_size"]) == ("flag", "flag")
    assert (origin["edit.prefetch"], origin["train.lr"]) == (f"{path}:4", f"{path}:7")
    assert (origin["seed"], origin["train.steps"]) == (f"{path}:1", "default")


def test_later_files_win_key_by_key_and_flags_over_all_of_them(tmp_path):
    base, more, last = (tmp_path / name for name in ("base.toml", "more.toml", "last.toml"))
    base.write_text("seed = 1\n[edit]\nevery = 64\nprefetch = 3\n[model]\nsizes = { a = 1, b = 2 }\n")
    more.write_text("[edit]\nevery = 32\n[model.sizes]\nb = 3\n")
    last.write_text("[edit]\nevery = 16\n")
    loaded = load([base, more, last], ["--seed", "5"])
    edit = loaded.config.edit
    assert (edit.every, edit.prefetch, loaded.config.seed) == (16, 3, 5)
    assert loaded.config.model.sizes == {"a": 1, "b": 3}
    assert loaded.origin["edit.every"] == f"{last}:2"
    assert loaded.origin["edit.prefetch"] == f"{base}:4"
    assert loaded.origin["model.sizes.b"] == f"{more}:4"
    assert loaded.origin["seed"] == "flag"
    assert load([last, base], []).config.edit.every == 64


def test_files_are_judged_together_and_mistakes_with_the_name_of_their_file(tmp_path):
    hub, quorum, wrong = (tmp_path / name for name in ("hub.toml", "quorum.toml", "wrong.toml"))
    hub.write_text('[hub]\naddress = "127.0.0.1:0"\n')
    quorum.write_text('[hub]\nquorum = "all"\n')
    assert load([quorum, hub], []).config.hub.quorum == "all"
    with pytest.raises(UserError, match=r"quorum.toml: hub.address"):
        load(quorum, [])
    wrong.write_text("[edit]\nevry = 3\n")
    with pytest.raises(UserError, match=r"wrong.toml: unknown key edit.evry; did you mean edit.every\?"):
        load([hub, wrong], [])
    wrong.write_text('[edit]\nevery = "x"\n')
    with pytest.raises(UserError, match=r"wrong.toml: edit.every: expected a finite number"):
        load([wrong, hub], [])


def test_a_preset_is_a_file_that_others_and_flags_may_change(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[train]\nsteps = 7\n")
    loaded = load([Path("preset:async"), mine], ["--name", "x"])
    assert (loaded.config.name, loaded.config.train.steps) == ("x", 7)
    assert loaded.config.outer.momentum == 0.7
    assert loaded.origin["outer.momentum"].startswith("preset:async:")


def test_a_file_may_hold_lists_tables_and_the_word_none(written):
    path = written(
        'edit.units = ["a.*", "b"]\nedit.penalty.clip = "none"\nedit.warmup_steps = "all"\n'
        "model.sizes = { hidden_size = 64, tie = true, theta = 1e4, act = 'silu' }\ntrain.betas = [0, 1]\n"
    )
    config = load(path, []).config
    assert config.edit.units == ("a.*", "b")
    assert config.edit.penalty.clip is None
    assert config.edit.warmup_steps == "all"
    assert config.model.sizes == {"hidden_size": 64, "tie": True, "theta": 1e4, "act": "silu"}
    assert [type(v) for v in config.model.sizes.values()] == [int, bool, float, str]
    assert config.train.betas == (0.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--edit.penalty.clip", "None"], {"edit.penalty.clip": None}),
        (["--edit.penalty.clip=none"], {"edit.penalty.clip": None}),
        (["--edit.penalty.clip", "none"], {"edit.penalty.clip": None}),
        (["--name", "none"], {"name": "none"}),
        (["--edit.units", "model"], {"edit.units": "model"}),
        (["--edit.units", "a.*", "b"], {"edit.units": ("a.*", "b")}),
        (["--local.slowdown", "1", "1", "3"], {"local.slowdown": (1.0, 1.0, 3.0)}),
        (["--edit.warmup-steps", "all"], {"edit.warmup_steps": "all"}),
        (["--edit.warmup_steps", "7"], {"edit.warmup_steps": 7}),
        (["--log", "wandb", "trackio"], {"log": ("wandb", "trackio")}),
        (["--rl.loss", "grpo", "--hub.merge", "mean"], {"rl.loss": "grpo", "hub.merge": "mean"}),
        (["--rl.loss", "mine:my_loss"], {"rl.loss": "mine:my_loss"}),
        (
            ["--prompts.options", "digits", "3", "work", "false"],
            {"prompts.options.digits": 3, "prompts.options.work": False},
        ),
        (["--checkpoint.keep", "3"], {"checkpoint.keep": 3}),
        (["--model.no-compile"], {"model.compile": False}),
        (["--model.compile", "false"], {"model.compile": False}),
        (["--model.compile=False"], {"model.compile": False}),
        (["--model.no-compile=false"], {"model.compile": True}),
        (["--log", "[]"], {"log": ()}),
        (["--log", '["wandb",', '"trackio"]'], {"log": ("wandb", "trackio")}),
        (["--train.betas=[0.5, 0.75]"], {"train.betas": (0.5, 0.75)}),
        (["--edit.units", '["a.*"]'], {"edit.units": ("a.*",)}),
        (["--name", "007", "--data.source", "[a]"], {"name": "007", "data.source": "[a]"}),
        (["--prompts.options.digits", "3"], {"prompts.options.digits": 3}),
        (["--prompts.options", "{ digits = 3 }"], {"prompts.options.digits": 3}),
        (["--model.sizes.hidden_size", "32"], {"model.sizes.hidden_size": 32}),
        (
            ["--model.sizes.new=0.5", "--model.sizes.tie", "true"],
            {"model.sizes.new": 0.5, "model.sizes.tie": True},
        ),
        (
            ["--edit.schedule", "seconds", "--train.seconds", "5"],
            {"edit.schedule": "seconds", "train.seconds": 5.0},
        ),
    ],
)
def test_flags_reach_every_kind_of_value(written, flags, expected):
    path = written("[model]\ncompile = true\nsizes = { hidden_size = 64 }\n")
    loaded = load(path, flags)
    found = dict(values(loaded.config))
    assert {name: found[name] for name in expected} == expected
    assert {name for name, origin in loaded.origin.items() if origin == "flag"} == set(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("edit.evry = 1", "unknown key edit.evry; did you mean edit.every?"),
        ("[edti]\nevery = 1", "unknown key edti; did you mean edit?"),
        ("[penalty]\nclip = 1", "unknown key penalty; did you mean edit.penalty?"),
        ("edit = 1", "edit: expected a table"),
        ('train.lr = "x"', 'train.lr: expected a finite number, got "x"'),
        ("train.lr = true", "train.lr: expected a finite number, got True"),
        ("train.steps = 1.5", "train.steps: expected a whole number, got 1.5"),
        ("train.steps = true", "train.steps: expected a whole number, got True"),
        ("train.betas = [1]", "train.betas: expected a list of 2 values, got [1]"),
        ("edit.units = 3", 'edit.units: expected "auto" or "model" or a list of text, got 3'),
        ("model.compile = 1", "model.compile: expected true or false, got 1"),
        ('log = ["tensorbord"]', 'log: expected a list of "tensorboard" or "wandb" or "trackio"'),
        ('log = ["wandb", "wandb"]', "log must name each tracker once, got ['wandb', 'wandb']"),
        ('edit.schedule = "hours"', 'edit.schedule: expected "steps" or "seconds" or "dylu", got "hours"'),
        ("edit.every = -1", "edit.every must be above 0, got -1"),
        ("train.seconds = 5", 'train.seconds needs edit.schedule = "seconds"'),
        ("a = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_file_and_key(written, text, message):
    path = written(text)
    with pytest.raises(UserError) as caught:
        load(path, [])
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--edit.every", "x"], '--edit.every: expected a finite number, got "x"'),
        (["--seed", "1.5"], "--seed: expected a whole number, got 1.5"),
        (["--edit.every", "-3"], "edit.every must be above 0, got -3.0"),
        (["--edit.every"], "--edit.every: needs a value"),
        (["--train.betas", "1"], "--train.betas: expected a list of 2 values, got 1"),
        (["--device", "tpu"], '--device: expected "auto" or "cpu" or "cuda", got "tpu"'),
        (["--model.compile", "perhaps"], '--model.compile: expected true or false, got "perhaps"'),
        (["--rl.stalled", "1"], "unknown flag --rl.stalled"),
        (["--train.seconds", "5"], 'train.seconds needs edit.schedule = "seconds"'),
        (["--model.sizes.hidden_size"], "--model.sizes.hidden_size: needs a value"),
        (["--edit.penalty.clip", "x"], '--edit.penalty.clip: expected a finite number or none, got "x"'),
        (["--outer.kind", "adam"], '--outer.kind: expected "average" or "nesterov" or "delayed-nesterov"'),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_that_names_it(flags, message, capfd):
    with pytest.raises(UserError) as caught:
        load(None, flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("preset", preset_names())
def test_each_value_that_config_show_prints_is_a_flag_for_that_value(preset, capsys):
    assert main(["config", "show", f"preset:{preset}"]) == 0
    shown = [re.fullmatch(r"(\S+) +(.*\S) {2,}\S.*", line) for line in capsys.readouterr().out.splitlines()]
    pairs = [(found[1], found[2]) for found in shown]
    wanted = load([Path(f"preset:{preset}")], []).config
    assert {key for key, _ in pairs} == {key for key, _ in values(wanted)}
    for key, value in pairs:
        assert with_flags(wanted, [f"--{key}", value]) == wanted, key
    for flags in (
        [f"--{key}={value}" for key, value in pairs],
        [word for key, value in pairs for word in (f"--{key}", value)],
        [
            word
            for key, value in pairs
            for word in (f"--{key}", *(value.split(" ") if value[0] == "[" else [value]))
        ],
    ):
        assert load(None, flags).config == wanted
        assert split_flags(["run", *flags]) == (["run"], flags)


@pytest.mark.parametrize("value", ["-1", "0.5", "1e12", "nan", '"x"', "[]", "[-1.0]"])
def test_an_error_names_a_key_that_a_file_can_have(value):
    for name in hints():
        table, _, leaf = name.rpartition(".")
        text = f"[{table}]\n{leaf} = {value}" if table else f"{leaf} = {value}"
        error = ""
        try:
            parse_config(text, "here")
        except UserError as refusal:
            error = str(refusal)
        said = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", error.removeprefix("here: "))
        assert not error or {*said} & hints().keys(), error


def test_each_check_of_a_configuration_class_names_a_field_or_a_key():
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.glob("*/**/*.py")}
    checking = {path: text for path, text in sources.items() if " check(" in text and "__post_init__" in text}
    assert len(checking) > 10
    for path, text in checking.items():
        for cls in ast.walk(ast.parse(text)):
            if isinstance(cls, ast.ClassDef) and any(
                getattr(n, "name", "") == "__post_init__" for n in cls.body
            ):
                known = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign)} | {*hints()}
                calls = [n for n in ast.walk(cls) if isinstance(n, ast.Call)]
                names = [n.args[1] for n in calls if getattr(n.func, "id", "") == "check"]
                texts = [name.value for name in names if isinstance(name, ast.Constant)]
                parts = {part for text in texts for part in text.removeprefix(f"{cls.name}: ").split(", ")}
                assert parts <= known, f"{path}: {cls.name}"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml: no such file"):
        load(tmp_path / "none.toml", [])
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(UserError, match=r"mine\.tml: no such file; did you mean .*mine\.toml\?"):
        load(tmp_path / "mine.tml", [])


def test_a_directory_in_place_of_a_file_is_answered_with_the_file_in_it(tmp_path):
    with pytest.raises(UserError, match=r"is a directory; name a TOML file or preset:NAME instead"):
        load(tmp_path, [])
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UserError, match=r"is a directory; name .*/run\.toml instead"):
        load(tmp_path, [])


def test_slow_downs_for_more_nodes_than_there_are_need_no_warning():
    config = RunConfig(local=LocalConfig(slowdown=(1, 1, 3)))
    assert warnings(config, Placement(nodes=2, local=True)) == []
    assert warnings(config, Placement()) == ["local.slowdown has no effect without --local"]


def test_a_command_line_is_parted_into_its_own_words_and_flags():
    line = "run a.toml --local 3 --edit.units x y --seed=4 --model.compile --dry-run --train.lr -1 --name n b"
    rest, flags = split_flags(line.split())
    assert rest == ["run", "a.toml", "--local", "3", "--dry-run", "b"]
    assert flags == [
        "--edit.units",
        "x",
        "y",
        "--seed=4",
        "--model.compile",
        "--train.lr",
        "-1",
        "--name",
        "n",
    ]


def test_an_unknown_dotted_flag_is_answered_with_the_nearest_one():
    with pytest.raises(UserError, match=r"unknown flag --edit\.evry; did you mean --edit\.every\?"):
        split_flags(["--edit.evry", "3"])
    with pytest.raises(UserError, match=r"unknown flag --zzz\.qqq; see aedit run --help"):
        split_flags(["--zzz.qqq", "3"])


texts = st.text(st.characters(codec="utf-8"), max_size=8)
sizes = st.dictionaries(
    texts.filter(bool), st.integers(-9, 9**20) | st.booleans() | texts | st.floats(allow_nan=False)
)
positive = st.floats(1e-300, 1e300)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=sizes,
    source=texts,
    lr=positive,
    clip=st.none() | positive,
    units=st.sampled_from(["auto", "model"]) | st.lists(texts, min_size=1).map(tuple),
    warmup=st.just("all") | st.integers(0, 10**9),
    slowdown=st.lists(st.floats(1, 1e9)).map(tuple),
)
def test_what_is_written_is_read_back_equal(tmp_path, sizes, source, lr, clip, units, warmup, slowdown):
    edit = EditConfig(units=units, warmup_steps=warmup)
    config = RunConfig(
        model=ModelConfig(sizes=sizes),
        train=TrainConfig(lr=lr),
        edit=replace(edit, penalty=replace(edit.penalty, clip=clip)),
        local=LocalConfig(slowdown=slowdown),
    )
    config = replace(config, data=replace(config.data, source=source))
    path = tmp_path / "out.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load(path, []).config == config


def test_every_value_that_has_an_effect_is_written_and_every_flag_is_offered():
    text = to_toml(RunConfig())
    shown = subprocess.run(
        [sys.executable, "-m", "aedit.launch.cli", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in hints():
        if name != "model.sizes":
            useless = any(without_effect(RunConfig(), name))
            assert useless or f"\n{name.rpartition('.')[2]} = " in f"\n{text}"
            assert f"--{name} " in shown or f"--{name}, " in shown


def test_differences_name_what_is_only_on_one_side():
    old = RunConfig(model=ModelConfig(sizes={"a": 1, "b": 2}))
    new = RunConfig(model=ModelConfig(sizes={"b": 2, "c": 3}), seed=1)
    assert differences(old, new) == {
        "seed": ("0", "1"),
        "model.sizes.a": ("1", "-"),
        "model.sizes.c": ("-", "3"),
    }


@pytest.mark.parametrize("merge", ["median", "trimmed"])
def test_rules_that_order_single_elements_are_refused_with_sparse_pushes(merge):
    sparse = ["--hub.address", "127.0.0.1:0", "--hub.quorum", "all", "--hub.codec", "topk"]
    assert load(None, sparse).config.hub.codec == "topk"
    with pytest.raises(UserError, match=f"hub.merge must not order .*topk.*'{merge}'"):
        load(None, [*sparse, "--hub.merge", merge])
