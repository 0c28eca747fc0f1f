"""Tests rules of a user, named by import path in the configuration: those of docs/extending.md."""

import json
import os
import re
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.hub_machine import World, config
from kit.hub_machine import plan as hub_plan
from kit.policy_losses import case
from kit.tiny_policies import policy
from kit.waiting import until
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.async_sgd.rules import OuterConfig, make_outer
from aedit.child import Restarts
from aedit.edit import EditConfig
from aedit.launch.cli import generate, main
from aedit.launch.config import RLConfig, RunConfig, SwarmConfig, check_imports, checks, load
from aedit.launch.data import ByteTokenizer
from aedit.proto.agent import AgentPlan
from aedit.proto.codecs import codec
from aedit.spec_rollout import (
    LossSettings,
    Prompt,
    Sampling,
    Servers,
    WorkerConfig,
    WorkerSource,
    find_loss,
)
from aedit.spec_rollout.drafters import OFF
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.server.worker_engine import Worker
from aedit.types import UserError

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
NAMES = ("HeavyBall", "median", "Half", "icepop", "Repeat", "EveryOther")


@pytest.fixture
def my_rules(monkeypatch):
    """Return the page's blocks that define the rules, as the module that it tells a user to save."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    module = types.ModuleType("my_rules")
    code = [
        block for block in blocks if any(re.search(rf"^(class|def) {name}\b", block, re.M) for name in NAMES)
    ]
    assert len(code) == len(NAMES)
    assert all(len(block.splitlines()) < 40 for block in code)
    exec("import torch\nimport numpy as np\n" + "\n".join(code), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rules", module)
    return module


def test_the_configuration_of_the_page_loads(my_rules, tmp_path):
    text = re.search(r"^```toml\n(\[outer\]\nkind = \"my_rules.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    path = tmp_path / "run.toml"
    path.write_text(text + 'address = "127.0.0.1:0"\n')
    found = load(path, [], strict=True).config
    assert (found.outer.kind, found.hub.merge) == ("my_rules:HeavyBall", "my_rules:median")


def test_an_outer_optimizer_gets_the_values_that_its_constructor_names(my_rules):
    made = make_outer(OuterConfig(kind="my_rules:HeavyBall", lr=0.5, momentum=0.3))
    assert (made.lr, made.mu) == (0.5, 0.9), "it has an lr and no momentum"
    state = made.init(torch.zeros(2))
    for _ in range(2):
        step, state = made.update(torch.tensor([1.0, -2.0]), state)
    assert torch.allclose(step, torch.tensor([0.95, -1.9])), "0.5 (g + 0.9 g)"


def test_a_merge_rule_of_ones_own_makes_the_hubs_next_anchor(my_rules):
    """Three pushes at a real state machine are compared with NumPy's median."""
    made = World(hub_plan(config(quorum="all", merge="my_rules:median")))
    nodes = [made.join(name) for name in "abc"]
    made.found(nodes[0])
    sizes = {unit: len(made.hub.anchor(unit)[1]) for unit in made.hub.state.units}
    rng = np.random.default_rng(0)
    pushed = {unit: rng.standard_normal((3, size)).astype(np.float32) for unit, size in sizes.items()}
    for unit, values in pushed.items():
        for node in nodes:
            made.push(node, values[node], unit)
    made.settle()
    for unit, values in pushed.items():
        assert np.allclose(made.hub.anchor(unit)[1], -np.median(values, axis=0), atol=1e-6)
        assert not np.allclose(made.hub.anchor(unit)[1], -values.mean(axis=0), atol=1e-2)


def test_a_merge_rule_that_returns_something_else_is_named(my_rules):
    my_rules.wrong = lambda parts, layout: np.zeros(layout.numel + 1, np.float32)
    made = World(hub_plan(config(quorum="all", merge="my_rules:wrong")))
    nodes = [made.join(name) for name in "ab"]
    made.found(nodes[0])
    for node in nodes:
        made.push(node, 1.0)
    with pytest.raises(ValueError, match=r"hub\.merge: my_rules:wrong returned"):
        made.settle()


def test_a_codec_of_ones_own_travels_under_its_import_path(my_rules):
    x = np.array([1.5, -2.0, 1e-3, np.inf], np.float32)
    made = codec("my_rules:Half")
    payload = made.encode(x)
    made.is_valid(payload, 4)
    assert (made.name, len(payload)) == ("my_rules:Half", 8)
    assert np.array_equal(made.decode(payload, 4, 0, 4), x.astype(np.float16).astype(np.float32))
    plan = AgentPlan(addresses=("h:1",), name="a", run="r", units=(), num_samples=1, codec="my_rules:Half")
    assert not plan.has_feedback
    my_rules.Half.feedback = True
    assert plan.has_feedback


def test_a_policy_loss_of_ones_own_is_found_by_its_import_path(my_rules):
    """Value and gradient are compared with a loop in float64."""
    c = case(0, apart=1.0)
    inputs = c.inputs()
    out = find_loss("my_rules:icepop")(inputs, LossSettings())
    out.loss.backward()
    r = np.exp(c.logp - c.behaviour)
    kept = c.mask & (r > 0.5) & (r < 5)
    wanted = np.where(kept, -r * c.advantages[:, None] / c.mask.sum(), 0.0)
    assert 0 < kept.sum() < c.mask.sum()
    assert np.array_equal(out.kept_BT.numpy(), kept)
    assert np.allclose(inputs.logp_BT.grad.numpy(), wanted)
    assert out.loss.item() == pytest.approx((wanted * c.logp).sum())


def test_a_policy_loss_that_is_not_there_is_refused_before_the_run():
    with pytest.raises(UserError, match=r"rl\.loss: my_losses:nobody cannot be imported"):
        check_imports(RunConfig(rl=RLConfig(loss="my_losses:nobody")), node=True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("outer.kind", "my_rules:Nobody", "outer.kind: my_rules:Nobody cannot be imported"),
        ("outer.kind", "no_such_module:X", "outer.kind: no_such_module:X cannot be imported"),
        ("outer.kind", "my_rules:median", "outer.kind: my_rules:median has no method init"),
        ("outer.kind", "heavy-ball", 'outer.kind: expected "average" or .* or package.module:Name'),
        ("hub.codec", "json:dumps", "hub.codec: json:dumps has no method num_bytes"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(my_rules, tmp_path, key, value, words):
    table, _, name = key.partition(".")
    path = tmp_path / "run.toml"
    more = 'address = "h:1"\n' if table == "hub" else ""
    path.write_text(f"[{table}]\n{more}{name} = {json.dumps(value)}\n")
    with pytest.raises(UserError, match=words):
        load(path, [], strict=True)


HUB = '[hub]\naddress = "h:1"\n'
WRONG = """
from aedit.async_sgd import OuterState
from aedit.spec_rollout import LossOutput
class Torch(HeavyBall):
    def init(self, anchor): return OuterState(torch.zeros_like(anchor))
class NumPy(HeavyBall):
    def update(self, gradient, state): return self.lr * np.asarray(gradient), state
class InPlace(HeavyBall):
    def update(self, gradient, state):
        state.momentum[...] = gradient + self.mu * state.momentum
        return self.lr * state.momentum, state
class Wide(HeavyBall):
    def update(self, gradient, state): return np.float64(self.lr) * gradient, state
class Long(HeavyBall):
    def init(self, anchor): return OuterState(np.zeros(len(anchor) + 1, np.float32))
class Nan(HeavyBall):
    def update(self, gradient, state): return gradient / (0 * gradient), state
class Bare(HeavyBall):
    def init(self, anchor): return anchor * 0
def infinite(parts, layout): return np.full(layout.numel, np.inf, np.float32)
def tensor(parts, layout): return torch.zeros(layout.numel)
def random(parts, layout): return np.random.default_rng().random(layout.numel, np.float32)
class Short(Half):
    def num_bytes(self, numel): return numel
class Clean(Half):
    def encode_slice(self, x, out, numel, start): super().encode_slice(np.nan_to_num(x), out, numel, start)
class Double(Half):
    def decode(self, data, numel, start, stop, out=None):
        return np.frombuffer(data, np.float16)[start:stop].astype(np.float64)
def detached(inputs, settings):
    return LossOutput(inputs.advantages_B.sum().requires_grad_(), inputs.mask_BT)
def floats(inputs, settings): return LossOutput(inputs.logp_BT.sum(), inputs.mask_BT.float())
def unsafe(inputs, settings): return LossOutput((inputs.logp_BT.exp() - 1).log().sum(), inputs.mask_BT)
"""


@pytest.mark.parametrize(
    ("table", "key", "name", "said"),
    [
        (
            HUB + "[outer]",
            "kind",
            "Torch",
            r"outer\.kind: .*Torch, called with NumPy .*: TypeError: zeros",
        ),
        (
            "[outer]",
            "kind",
            "NumPy",
            r"outer\.kind: .*NumPy, called with torch tensors.* returned a numpy",
        ),
        (HUB + "[outer]", "kind", "InPlace", "refused: update changed its arguments, expected new arrays"),
        (
            HUB + "[outer]",
            "kind",
            "Wide",
            r"numpy ndarray of float64 .*, expected a .* of float32",
        ),
        (HUB + "[outer]", "kind", "Long", r"init returned a .* shape \(6,\), expected a .* shape \(5,\)"),
        (HUB + "[outer]", "kind", "Nan", "update returned numbers that are not finite"),
        (HUB + "[outer]", "kind", "Bare", "init returned ndarray, expected OuterState"),
        (HUB, "merge", "infinite", r"hub\.merge: my_rules:infinite, .* numbers that are not finite"),
        (HUB, "merge", "tensor", r"hub\.merge: my_rules:tensor, .* expected a float32 array of 8 elements"),
        (HUB, "merge", "random", "returned other numbers for the same pushes"),
        (HUB, "codec", "Short", r"hub\.codec: my_rules:Short, called with NumPy arrays"),
        (HUB, "codec", "Clean", "a NaN was lost"),
        (HUB, "codec_down", "Double", r"hub\.codec_down: .* expected a float32 array of 8197"),
        ("[rl]", "loss", "detached", r"rl\.loss: .* a finite loss with a finite gradient"),
        ("[rl]", "loss", "floats", r"rl\.loss: .* kept_BT is of torch\.float32, expected bool"),
        ("[rl]", "loss", "unsafe", r"rl\.loss: .* a finite loss with a finite gradient"),
    ],
)
def test_what_fails_with_the_arrays_of_its_place_is_refused_in_one_line(
    my_rules, tmp_path, table, key, name, said
):
    exec(WRONG, my_rules.__dict__)
    path = tmp_path / "run.toml"
    path.write_text(f'{table}\n{key} = "my_rules:{name}"\n')
    with np.errstate(all="ignore"), pytest.raises(UserError, match=said) as refused:
        check_imports(load(path, []).config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["", HUB, '[swarm]\ndiscovery = "file"\n'])
@pytest.mark.parametrize("kind", ["HeavyBall", "ahead"])
def test_the_pages_outer_optimizer_serves_hub_swarm_and_node(my_rules, tmp_path, place, kind):
    my_rules.ahead = type(
        "ahead", (my_rules.HeavyBall,), {"look_ahead": lambda self, anchor, state: anchor - state.momentum}
    )
    path = tmp_path / "run.toml"
    path.write_text(f'{place}[outer]\nkind = "my_rules:{kind}"\n')
    assert load(path, [], strict=True).config.outer.kind == f"my_rules:{kind}"


def test_a_peer_that_leads_parts_of_a_swarm_checks_what_it_leads_with(my_rules):
    my_rules.Torch = type(
        "Torch", (my_rules.HeavyBall,), {"init": lambda self, anchor: torch.zeros_like(anchor)}
    )
    config = replace(
        RunConfig(), outer=OuterConfig(kind="my_rules:Torch"), edit=EditConfig(landing="arrival")
    )
    with pytest.raises(UserError, match=r"outer\.kind: my_rules:Torch"):
        check_imports(replace(config, swarm=SwarmConfig(discovery="file")), node=True)
    check_imports(replace(config, swarm=SwarmConfig(discovery="file", listen="")), node=True)


COMMANDS = """
import contextlib, io, json, sys
from aedit.launch.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    print(json.dumps([code, said.getvalue()]))
"""
"""Runs command lines in one process, which imports torch once; prints the code and the errors of each."""


def test_the_command_ends_with_2_before_anything_starts(tmp_path):
    """The fault as it was found: an outer optimizer for torch, and a hub with NumPy arrays."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom aedit.async_sgd import OuterState\n"
        "class Heavy:\n"
        "    def init(self, anchor): return OuterState(torch.zeros_like(anchor))\n"
        "    def update(self, gradient, state): return gradient, OuterState(gradient + state.momentum)\n"
    )
    (tmp_path / "run.toml").write_text(
        'dir = "out"\n[outer]\nkind = "mine:Heavy"\n[hub]\naddress = "127.0.0.1:0"\n'
    )
    commands = [["run", "run.toml", "--local", "2"], ["hub", "run.toml"], ["run", "run.toml"]]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in ended] == [2, 2, 2], ended
    for _, said in ended:
        (line,) = said.strip().splitlines()
        assert "outer.kind: mine:Heavy, called with NumPy arrays, which it gets in a hub: TypeError" in line
    assert not (tmp_path / "out").exists()


def test_generate_drafts_with_a_drafter_and_a_chooser_by_import_path(my_rules, tmp_path, capsys):
    """The text is that of plain decoding, and the drafter's arms were used."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=257, **sizes, max_position_embeddings=128, eos_token_id=256)
    ).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    common = ["generate", str(tmp_path), "--prompt", "abcab", "--temperature", "0", "--max-new-tokens", "24"]
    capsys.readouterr()
    assert main([*common, "--arm", "off"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main([*common, "--drafter", "my_rules:Repeat", "--arm", "my_rules:EveryOther"]) == 0
    drafted = capsys.readouterr().out.splitlines()
    assert drafted[:-1] == plain[:-1]
    assert re.search(r"custom:[248] \d+ %", drafted[-1])
    for arm in ("auto", "bandit", "custom:4"):
        assert main([*common, "--drafter", "my_rules:Repeat", "--arm", arm]) == 0
        assert capsys.readouterr().out.splitlines()[:-1] == plain[:-1]
    assert main([*common, "--arm", "custom:4"]) == 2
    assert "--arm custom:4: needs --drafter, package.module:Name" in capsys.readouterr().err


@pytest.fixture
def model_folder(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=257, **sizes, max_position_embeddings=128, eos_token_id=256)
    ).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    return tmp_path


WRONG_DRAFTERS = """
import time
from dataclasses import replace as changed
class Tuple(Repeat):
    def propose(self, *arguments): return super().propose(*arguments).tokens_BN.tolist()
class Int32(Repeat):
    def propose(self, *arguments):
        draft = super().propose(*arguments)
        return changed(draft, tokens_BN=draft.tokens_BN.int())
class OneRow(Repeat):
    def propose(self, *arguments):
        draft = super().propose(*arguments)
        return changed(draft, scores_BN=draft.scores_BN[0])
class Foreign(Repeat):
    def propose(self, *arguments):
        draft = super().propose(*arguments)
        return changed(draft, tokens_BN=draft.tokens_BN + 5000)
class Deep(Repeat):
    def propose(self, arm, rows, *others): return super().propose(Arm("custom", 9, 1, 9), rows, *others)
class Unmoved(Repeat):
    def move(self, source, target): raise KeyError(source)
class Slow(Repeat):
    def propose(self, *arguments): time.sleep(60)
class Exits(Repeat):
    def __init__(self, target): raise SystemExit(0)
class NoDrafter(Repeat):
    def __init__(self): pass
from aedit.spec_rollout.drafters.drafts import Arm
class Text(EveryOther):
    def choose(self, view): return "custom:4"
class Absent(EveryOther):
    def choose(self, view): return Arm("layer", 2, 1, 2)
class Fraction(EveryOther):
    def trim(self, view, arm, draft): return 0.5
class Rests(EveryOther):
    def rest(self, view):
        return 3


class Forgetful(EveryOther):
    def learn(self, observed): self.total += observed.emitted
class Endless(EveryOther):
    def choose(self, view): time.sleep(60)
"""


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("--drafter", "Tuple", "refused: propose returned list, expected Draft"),
        ("--drafter", "Int32", "refused: propose returned tokens_BN of .*int32.* expected .*int64"),
        ("--drafter", "OneRow", r"refused: propose returned scores_BN of .*\(2,\).* expected .*\(\d, 2\)"),
        ("--drafter", "Foreign", "refused: propose returned tokens outside of the vocabulary of 257"),
        ("--drafter", "Deep", "refused: propose returned 9 nodes, expected at most 2"),
        ("--drafter", "Unmoved", "KeyError: 1"),
        ("--drafter", "Slow", "TimeoutError: did not return within 1 s"),
        ("--drafter", "NoDrafter", "TypeError"),
        ("--drafter", "Exits", "SystemExit: 0"),
        ("--arm", "Text", "refused: choose returned str, expected Arm"),
        ("--arm", "Absent", "refused: choose returned layer:2, whose drafter is not there"),
        ("--arm", "Fraction", "refused: trim returned 0.5, expected an int"),
        ("--arm", "Rests", "refused: rest returned 3, expected an Arm and a number of steps"),
        ("--arm", "Forgetful", "AttributeError: .* has no attribute 'total'"),
        ("--arm", "Endless", "TimeoutError: did not return within 1 s"),
    ],
)
def test_a_drafter_or_chooser_that_fails_in_its_place_is_refused_before_the_model_generates(
    my_rules, model_folder, capsys, monkeypatch, flag, name, said
):
    exec(WRONG_DRAFTERS, my_rules.__dict__)
    if name in ("Slow", "Endless"):
        monkeypatch.setattr(generate, "LOAD_S" if flag == "--drafter" else "TRIAL_S", 1.0)
    command = "serve" if name in ("Unmoved", "Absent") else "generate"
    words = {"--drafter": "my_rules:Repeat", "--arm": "auto"} | {flag: f"my_rules:{name}"}
    more = ["--prompt", "abcab", "--samples", "2"] if command == "generate" else ["--port", "0"]
    flags = [word for pair in words.items() for word in pair]
    assert main([command, str(model_folder), *more, *flags]) == 2
    out, err = capsys.readouterr()
    (line,) = err.strip().splitlines()
    assert re.search(f"{flag}: my_rules:{name}, called with .*: {said}", line)
    assert not out


def test_a_chooser_has_observed_nothing_before_its_first_step(my_rules):
    """The trial has an object of its own; the engine's meters are those of its own steps."""
    seen = []
    my_rules.Noting = type(
        "Noting", (my_rules.EveryOther,), {"__init__": lambda self, arms: seen.append(self)}
    )
    my_rules.Noting.choose = lambda self, view: OFF
    my_rules.Noting.learn = lambda self, observed: vars(self).setdefault("learned", []).append(observed)
    target = make_target(policy(), rows=2, max_tokens=32)
    made = generate._chooser("my_rules:Noting", {}, target)
    assert [len(vars(each).get("learned", [])) for each in seen] == [2, 0]
    assert made is seen[1]


def test_an_import_and_a_first_call_have_a_deadline(my_rules, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(checks, "LOAD_S", 0.2)
    monkeypatch.setattr(checks, "TRIAL_S", 0.2)
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait(30)\n")
    with pytest.raises(UserError, match=r"rl\.loss: hangs:x cannot be imported: Timeout.* within 0\.2 s"):
        check_imports(RunConfig(rl=RLConfig(loss="hangs:x")), node=True)
    my_rules.slow = lambda inputs, settings: threading.Event().wait(30)
    with pytest.raises(UserError, match=r"rl\.loss: my_rules:slow, called with torch.* within 0\.2 s"):
        check_imports(RunConfig(rl=RLConfig(loss="my_rules:slow")), node=True)


def test_the_command_ends_though_the_extension_still_hangs(tmp_path):
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(300)\n")
    (tmp_path / "run.toml").write_text('[outer]\nkind = "mine:X"\n[hub]\naddress = "127.0.0.1:0"\n')
    code = (
        "import sys\nfrom aedit.launch.config import checks\nchecks.LOAD_S = 1.0\n"
        "from aedit.launch.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "hub", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    assert "outer.kind: mine:X cannot be imported: TimeoutError: did not return within 1 s" in done.stderr


MAKERS = """
def nothing(spec): return None
def small(spec):
    from dataclasses import replace
    from aedit.spec_rollout.server.worker_engine import make_engine
    return make_engine(replace(spec, rows=1))
class Unsure:
    def __init__(self, settings): pass
    def publish(self, version, read): pass
    def can_judge(self, held): return None
    def select(self, server, held, draining): return None
    def check(self, held): pass
    def accuse(self, server): pass
    def close(self): pass
"""


def test_a_worker_whose_function_returns_no_engine_says_so(tmp_path, monkeypatch):
    (tmp_path / "makers.py").write_text(MAKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    once = Restarts(limit=0, pause_s=0.0)
    config = WorkerConfig(rows=3, max_tokens=64, make="makers:nothing", restarts=once)
    source = WorkerSource(policy(), config)
    said = "WorkerConfig: make: makers:nothing, called with EngineSpec: returned NoneType"
    try:
        source.update_weights(policy().state_dict(keep_vars=True), 1)
        source.add([Prompt(tokens=(1, 2), rollout=0, sampling=Sampling(max_new_tokens=2))])
        with pytest.raises(RuntimeError, match=said):
            until(lambda: source.step(), "the refusal", limit_s=100)
    finally:
        source.close()


def test_an_engine_for_fewer_rows_than_those_of_its_worker_is_refused(tmp_path, monkeypatch):
    (tmp_path / "makers.py").write_text(MAKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"model": policy().config.to_dict(), "dtype": "float32", "device": "cpu", "arms": ["off"]}
    begin = {"make": "makers:small", "engine": {**spec, "rows": 3, "max_tokens": 64, "options": {}}}
    said = r"makers:small, .* an engine for \(1, 64\) rows and tokens, expected at least \(3, 64\)"
    with pytest.raises(ValueError, match=said):
        Worker(begin, channel=None)


def test_an_auditor_that_cannot_judge_ends_the_generation(tmp_path, monkeypatch):
    (tmp_path / "makers.py").write_text(MAKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    servers = Servers.at("127.0.0.1:9", auditor="makers:Unsure")
    source = WorkerSource(policy(), WorkerConfig(rows=1, max_tokens=64), servers=servers)
    try:
        source.update_weights(policy().state_dict(keep_vars=True), 1)
        said = "Servers: auditor: makers:Unsure, called with LinkSettings: can_judge returned None, expected"
        with pytest.raises(ValueError, match=said):
            until(lambda: source.step(), "the refusal", limit_s=100)
    finally:
        source.close()
