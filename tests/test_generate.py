"""Tests `aedit generate`: the text is the model's, speculation does not change it, errors are one line."""

import contextlib
import io
import json
import re
import shutil

import pytest
import torch
from dist_jobs.export_jobs import train_and_save
from kit import served_models
from kit.rollouts import perturbed
from kit.serving import ask, served
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from aedit.launch.cli import generate as generating
from aedit.launch.cli import main
from aedit.launch.cli.generate import Detokenizer, TextStream, compare_tokens, score_gap
from aedit.launch.data import ByteTokenizer
from aedit.launch.node import Mark
from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.engine import Engine, Step
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LAST = re.compile(
    r"(\d+) tokens in ([\d.]+) s: (\d+) tokens/s, ([\d.]+) tokens per pass; arms: ((?:[\w:]+ \d+ %(?:, )?)+)"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a byte-level model that repeats itself."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=257, **SIZES, num_key_value_heads=1, max_position_embeddings=128, eos_token_id=256,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    ByteTokenizer().save(path)
    return path


def run(capsys, *words):
    code = main(["generate", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def text_of(model, prompt, num_tokens):
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return ByteTokenizer().decode(made[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    ("arm", "played"),
    [("off", "off"), ("suffix:4", "suffix:4"), ("suffix:8", "suffix:8"), ("bandit", "suffix:8")],
)
def test_greedy_text_is_what_transformers_says(capsys, saved, arm, played):
    code, out, err = run(
        capsys, saved, "--prompt", "Hello", "--temperature", 0, "--arm", arm, "--max-new-tokens", 40
    )
    assert (code, err) == (0, "")
    expected = text_of(AutoModelForCausalLM.from_pretrained(saved), "Hello", 40)
    text, last = out[: len(expected)], out[len(expected) :].strip()
    assert text == expected
    found = LAST.fullmatch(last)
    assert found, last
    assert int(found[1]) == 40
    assert float(found[4]) >= 1
    assert played in found[5]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(capsys, saved):
    def text(seed):
        return run(capsys, saved, "--prompt", "a", "--arm", "off", "--max-new-tokens", 20, "--seed", seed)[1][
            :15
        ]

    assert text(1) == text(1) != text(2)


def test_as_many_tokens_as_there_are_positions_are_made_when_none_is_asked_for(capsys, saved):
    _, out, _ = run(capsys, saved, "--prompt", "Hello", "--temperature", 0)
    expected = text_of(AutoModelForCausalLM.from_pretrained(saved), "Hello", 123)
    assert out.startswith(expected)
    assert LAST.search(out.splitlines()[-1])


@pytest.mark.parametrize("arm", ["off", "suffix:4"])
def test_a_repetition_penalty_is_that_of_transformers(capsys, saved, arm):
    model, ids = AutoModelForCausalLM.from_pretrained(saved), torch.tensor([list(b"Hello")])
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=40, do_sample=False, repetition_penalty=1.4)
    expected = ByteTokenizer().decode(made[0, 5:].tolist())
    assert expected != text_of(model, "Hello", 40)
    words = ("--temperature", 0, "--arm", arm, "--max-new-tokens", 40, "--repetition-penalty", 1.4)
    code, out, err = run(capsys, saved, "--prompt", "Hello", *words)
    assert (code, err) == (0, "")
    assert out.startswith(expected)


def test_penalties_and_min_p_change_the_text_and_not_by_the_arm(capsys, saved):
    words = ("--max-new-tokens", 40, "--seed", 3, "--temperature", 2, "--compare")
    texts = set()
    for more in ([], ["--min-p", 0.3], ["--frequency-penalty", 1.5], ["--presence-penalty", 2]):
        code, out, _ = run(capsys, saved, "--prompt", "Hello", "--arm", "suffix:4", *words, *more)
        assert code == 0
        assert "tokens equal: yes" in out
        texts.add(out.split(" tokens in ")[0])
    assert len(texts) == 4


def test_top_log_probabilities_are_printed_for_each_token(capsys, saved):
    words = ("--temperature", 0, "--max-new-tokens", 6, "--top-logprobs", 2, "--arm", "suffix:4")
    code, out, _ = run(capsys, saved, "--prompt", "Hello", *words)
    assert code == 0
    model, ids = AutoModelForCausalLM.from_pretrained(saved), torch.tensor([list(b"Hello")])
    with torch.no_grad():
        logp = model(ids).logits[0, -1].log_softmax(-1).topk(2)
    lines = re.findall(r"^prompt 1: (.+?) (-[\d.]+) \(best: (.+)\)$", out, re.MULTILINE)
    assert len(lines) == 6
    assert float(lines[0][1]) == pytest.approx(float(logp.values[0]), abs=1e-3)
    numbers = re.findall(r" (-?\d+\.\d{3})(?:,|$)", lines[0][2])
    assert [float(value) for value in numbers] == pytest.approx(logp.values.tolist(), abs=1e-3)


def test_compare_says_that_the_tokens_are_equal(capsys, saved):
    code, out, _ = run(
        capsys, saved, "--prompt", "ab", "--prompt", "cd", "--samples", 2, "--arm", "suffix:4", "--compare",
        "--max-new-tokens", 30, "--temperature", 0.7,
    )  # fmt: skip
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        f"--- prompt {i}, sample {j}" for i in (1, 2) for j in (1, 2)
    ]
    assert re.search(r"^plain: \d+ tokens/s; speed-up [\d.]+; tokens equal: yes$", out, re.MULTILINE)


def test_compare_says_where_tokens_differ_and_the_exit_code_is_1(capsys, saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    prompts = [Prompt(tokens=(1, 2), sample=i, sampling=Sampling(max_new_tokens=8)) for i in range(3)]
    engines = [Engine.of(model, rows=3, max_tokens=16) for _ in range(2)]
    made = [[engine.add(prompt) for prompt in prompts] for engine in engines]
    seconds = generating._run(engines)
    assert min(seconds) > 0
    assert generating._compare(engines[1].target, made, seconds) == 0
    made[0][1].tokens[4] ^= 1
    assert generating._compare(engines[1].target, made, seconds) == 1
    assert "tokens equal: no, number 2 differs from its token 5 on" in capsys.readouterr().out


class Turns:
    """An engine of twenty steps that notes its turns."""

    def __init__(self, name, log):
        self.name, self.log, self.running, self.waiting = name, log, [1] * 20, []

    def step(self):
        self.running.pop()
        self.log.append(self.name)
        return self.name


def test_compared_engines_take_turns_in_alternating_order_and_the_text_is_shown_between_turns():
    log, seen = [], []

    def follow(step):
        seen.append(step)
        log.append("text")

    generating._run([Turns("a", log), Turns("b", log)], follow)
    turns = [8 * ["a"], 8 * ["b"], 8 * ["text"], 8 * ["b"], 8 * ["a"], 8 * ["text"], 4 * ["a"], 4 * ["b"]]
    assert log == [entry for turn in [*turns, 4 * ["text"]] for entry in turn]
    assert seen == ["a"] * 20


def test_an_arm_without_the_suffix_drafter_has_none(saved):
    target = Engine.of(AutoModelForCausalLM.from_pretrained(saved), rows=1, max_tokens=16).target
    for arm, kinds in {"off": [], "suffix:4": ["suffix"], "auto": ["suffix"], "bandit": ["suffix"]}.items():
        assert list(generating._engine(target, arm, None, None).drafters) == kinds


@pytest.mark.parametrize("taps", [0, 3])
def test_a_drafter_of_this_policy_speculates(capsys, saved, tmp_path, taps):
    model = AutoModelForCausalLM.from_pretrained(saved)
    DraftLayer.of(model, taps=taps).save(tmp_path / "drafter.safetensors")
    words = ("--drafter", tmp_path / "drafter.safetensors", "--compare", "--max-new-tokens", 20)
    for arm in ("layer:3", "layer:2x2x4"):
        code, out, _ = run(capsys, saved, "--prompt", "xyz", "--arm", arm, *words)
        assert code == 0
        assert f"{arm} " in out
        assert "tokens equal: yes" in out


def test_a_run_is_asked_by_its_directory_or_by_its_name(capsys, tmp_path, monkeypatch):
    there = tmp_path / "runs" / "it"
    there.mkdir(parents=True)
    sizes = ", ".join(f"{key} = {value}" for key, value in SIZES.items())
    (there / "run.toml").write_text(f"[model]\nsizes = {{ {sizes} }}\n[data]\nseq_len = 64\n")
    train_and_save(there, node=0, mark=Mark(1))
    monkeypatch.chdir(tmp_path)
    words = ("--prompt", "def ", "--arm", "suffix:4", "--max-new-tokens", 8)
    by_name, by_path = run(capsys, "it", *words), run(capsys, there, *words)
    assert by_name[0] == by_path[0] == 0
    assert by_name[1].splitlines()[:-1] == by_path[1].splitlines()[:-1]


@pytest.mark.parametrize("special", ["tokenizer", "none", "as before the key"])
def test_a_run_its_export_its_server_and_transformers_read_a_prompt_alike(capsys, tmp_path, special):
    source, there, out = served_models.saved("gemma2", tmp_path / "m"), tmp_path / "run", tmp_path / "out"
    there.mkdir()
    key = f'special_tokens = "{special}"\n' if " " not in special else ""
    (there / "run.toml").write_text(
        f'[model]\npretrained = "{source}"\n[data]\nseq_len = 64\ntokenizer = "{source}"\n{key}'
    )
    train_and_save(there, node=0, mark=Mark(1))
    assert main(["export", str(there), str(out)]) == 0
    tokenizer, prompt, count = AutoTokenizer.from_pretrained(out), "The quick brown", 12
    ids = tokenizer(prompt, return_tensors="pt")
    has_bos = AutoTokenizer.from_pretrained(source)(prompt)["input_ids"] == ids["input_ids"][0].tolist()
    assert has_bos == (special == "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    made = model.generate(**ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[0].tolist()
    text = tokenizer.decode(made[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    words = ("--prompt", prompt, "--temperature", 0, "--arm", "off", "--max-new-tokens", count)
    capsys.readouterr()
    for place in (there, out):
        code, shown, _ = run(capsys, place, *words)
        assert (code, shown.rsplit("\n", 2)[0]) == (0, text), place
    with served(model, tokenizer) as (_, address):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": count, "return_token_ids": True}
        choice = ask(address, "/v1/completions", body)[2]["choices"][0]
        assert choice["prompt_token_ids"] + choice["token_ids"] == made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arm", "sideways"], "--arm: arm 'sideways': write off, layer:4"),
        (["--arm", "layer:4"], "needs --drafter"),
        (["--arm", "suffix:99"], "at most 32 drafted tokens"),
        (["--drafter", "nowhere"], "--drafter: "),
        (
            ["--max-new-tokens", "200"],
            "5 tokens and 200 new ones are more than the 128 of this model",
        ),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--top-p", "0"], "--top-p must be in [1e-30, 1], got 0"),
        (["--temperature", "inf"], "--temperature must be a finite number, got inf"),
        (["--temperature", "1e-38"], "--temperature must be 0 or more: 0 (greedy), or 1e-30 to"),
        (["--min-p", "2"], "--min-p must be in [0, 1], got 2"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be in [1e-06, "),
        (["--frequency-penalty", "nan"], "--frequency-penalty must be a finite number"),
        (["--presence-penalty=-1e9"], "--presence-penalty must be in [-1000000.0, "),
        (["--top-logprobs", "-1"], "--top-logprobs must be at least 0, got -1"),
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "a\udcffb"], "a prompt is not valid UTF-8"),
        (["--prompt", "x" * 128], "128 tokens and 1 new ones are more than the 128"),
        (["--samples", "0"], "--samples must be above 0"),
        (["--seed", "-1"], "--seed must be from 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, saved, words, message):
    code, out, err = run(capsys, saved, "--prompt", "Hello", *words)
    assert (code, out) == (2, "")
    assert err.startswith("aedit: ")
    assert err.count("\n") == 1
    assert message in err


def test_what_is_no_policy_is_said_to_be_none(capsys, saved, tmp_path):
    assert "no run and no model directory" in run(capsys, tmp_path, "--prompt", "a")[2]
    (tmp_path / "config.json").write_text("{}")
    assert "no usable model there" in run(capsys, tmp_path, "--prompt", "a")[2]
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **SIZES)).save_pretrained(tmp_path)
    assert "no tokenizer there" in run(capsys, tmp_path, "--prompt", "a")[2]


def cut_short(path):
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def cut_inside_the_header(path):
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:100])


def emptied(path):
    (path / "model.safetensors").write_bytes(b"")


def weights_taken_away(path):
    (path / "model.safetensors").unlink()


def a_tensor_left_out(path):
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def a_tensor_of_another_shape(path):
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def shard_missing(path):
    (path / "model.safetensors").unlink()
    LlamaForCausalLM.from_pretrained(path.parent / "whole").save_pretrained(path, max_shard_size="20KB")
    max(path.glob("model-*.safetensors")).unlink()


def configuration_is_no_json(path):
    (path / "config.json").write_text('{"model_type": "llama", ')


def configuration_is_a_list(path):
    (path / "config.json").write_text("[1, 2]")


def configuration_of_other_types(path):
    edited = json.loads((path / "config.json").read_text()) | {"hidden_size": "wide"}
    (path / "config.json").write_text(json.dumps(edited))


def configuration_of_other_sizes(path):
    edited = json.loads((path / "config.json").read_text()) | {"hidden_size": 64, "head_dim": 32}
    (path / "config.json").write_text(json.dumps(edited))


def huge(**sizes):
    """Return damage by sizes whose tensors would take terabytes, or years to make."""
    return lambda path: changed(path / "config.json", **sizes)


def weights_in_eight_bits(path):
    tensors = {
        name: each.to(torch.float8_e4m3fn) for name, each in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edited = json.loads((path / "config.json").read_text()) | {"dtype": "float8_e4m3fn"}
    (path / "config.json").write_text(json.dumps(edited))


def weights_with_nan(path):
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def tokenizer_cut_short(path):
    (path / "tokenizer.json").write_text('{"version": "1.0", "model": {')


def changed(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def an_activation_that_is_none(path):
    changed(path / "config.json", hidden_act="x")


def weights_elsewhere(path):
    names = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    whole = dict.fromkeys(names, "../whole/model.safetensors")
    changed(path / "model.safetensors.index.json", metadata={}, weight_map=whole)


def adapter_of_another_model(path):
    changed(
        path / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(path.parent / "whole")
    )


def tokenizer_elsewhere(path):
    shutil.copy(path / "tokenizer.json", path.parent / "whole" / "tokenizer.4.0.json")
    names = ["tokenizer.json", "../whole/tokenizer.4.0.json"]
    changed(path / "tokenizer_config.json", fast_tokenizer_files=names)


def vocabulary_elsewhere(path):
    (path / "tokenizer.json").unlink()
    changed(path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", vocab_file="/etc/hostname")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            weights_elsewhere,
            "weight_map names '../whole/model.safetensors': must be the relative name of a file",
        ),
        (adapter_of_another_model, "adapter_config.json: base_model_name_or_path names"),
        (tokenizer_elsewhere, "fast_tokenizer_files names '../whole/tokenizer.4.0.json'"),
        (vocabulary_elsewhere, "vocab_file names '/etc/hostname': remove the key"),
        (cut_short, "no usable model there"),
        (cut_inside_the_header, "no usable model there"),
        (emptied, "no usable model there"),
        (weights_taken_away, "no usable model there"),
        (a_tensor_left_out, "no weights for model.layers.1.mlp.up_proj.weight"),
        (a_tensor_of_another_shape, "have model.norm.weight with shape (31,), expected (32,)"),
        (shard_missing, "no usable model there"),
        (configuration_is_no_json, "no usable model there"),
        (configuration_is_a_list, "no usable model there"),
        (configuration_of_other_types, "for field 'hidden_size': TypeError: Field 'hidden_size' expected"),
        (an_activation_that_is_none, "no usable model there (KeyError: 'x')"),
        (configuration_of_other_sizes, "no usable model there"),
        (huge(intermediate_size=2**40), "mlp.gate_proj.weight with shape (48, 32), expected (1099511627776"),
        (huge(vocab_size=2**40), "model.embed_tokens.weight with shape (257, 32), expected (1099511627776"),
        (huge(head_dim=2**38), "self_attn.q_proj.weight with shape (32, 32), expected ("),
        (huge(num_hidden_layers=10**9), "has num_hidden_layers = 1000000000, and its files have 20 tensors"),
        (huge(num_hidden_layers=-3), "has num_hidden_layers = -3, and its files have 20 tensors"),
        (weights_in_eight_bits, ""),
        (weights_with_nan, "its logits are NaN"),
        (tokenizer_cut_short, "no tokenizer there"),
    ],
)
def test_a_damaged_model_directory_is_one_line_and_exit_code_2(tmp_path, saved, damage, says):
    path = tmp_path / "model"
    for folder in (path, tmp_path / "whole"):
        shutil.copytree(saved, folder)
    damage(path)
    words = ["generate", str(path), "--prompt", "a", "--max-new-tokens", "4", "--temperature", "0"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert code == 2
    (line,) = err.getvalue().splitlines()
    assert line.startswith(f"aedit: {'' if 'NaN' in says else path}")
    assert says in line
    assert "Traceback" not in err.getvalue()
    assert "tokens/s" not in out.getvalue()


def test_a_model_of_another_family_is_generated_from_by_its_own_forward(capsys, tmp_path):
    config = OPTConfig(
        vocab_size=257, **SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=40, init_std=0.3,
        eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    words = ["--prompt", "Hello", "--temperature", "0", "--arm", "suffix:8", "--compare"]
    code, out, err = run(capsys, tmp_path, *words)  # up to the last position of the model
    assert code == 0
    assert text_of(model, "Hello", 35) in out
    assert "tokens equal: yes" in out
    assert "OPTForCausalLM takes the generic (one pass for all rows) path, not the fast one" in err


def test_an_end_token_beyond_the_vocabulary_ends_nothing(capsys, tmp_path):
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, initializer_range=0.3)
    assert config.eos_token_id > 257
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    code, out, err = run(capsys, tmp_path, "--prompt", "Hello", "--temperature", "0", "--max-new-tokens", 9)
    assert code == 0
    assert text_of(model, "Hello", 9) in out
    assert "path" not in err  # the fast one


def test_a_model_that_is_not_causal_is_named(capsys, tmp_path):
    config = BertConfig(**SIZES, vocab_size=257)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    code, _, err = run(capsys, tmp_path, "--prompt", "a", "--max-new-tokens", 4)
    assert code == 2
    assert "BertLMHeadModel is not causal: logits of a token depend on the tokens after it" in err


# --- text as it comes


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (3,), (7,)])
def test_characters_appear_when_they_are_whole(sizes):
    text = "a\u00e9\u4e2d\U0001f600 z"
    tokens, shown, words = list(text.encode()), [], Detokenizer(ByteTokenizer().decode)
    while tokens:
        for size in sizes:
            new, tokens = tokens[:size], tokens[size:]
            shown.append(words.add(new))
    assert "".join(shown) == text


def test_bytes_that_make_no_character_are_shown_in_the_end():
    words = Detokenizer(ByteTokenizer().decode)
    assert words.add([0x61, 0xE4]) == ""
    assert words.add([], last=True) == "a\ufffd"


def test_samples_are_written_one_after_the_other_however_they_end():
    out = io.StringIO()
    first, second = (Rollout(Prompt(tokens=(1,), sample=i)) for i in range(2))
    stream = TextStream([(first, "one"), (second, "two")], ByteTokenizer().decode, out)

    def step(**texts):
        for rollout, text in ((first, texts.get("a", "")), (second, texts.get("b", ""))):
            rollout.tokens += text.encode()
        stream.follow(Step(rollouts=(first, second), counts=(1, 1)))
        return out.getvalue()

    assert step(a="He", b="Wo") == "--- one\nHe"
    second.finish_reason = "stop"
    assert step(a="l", b="rld") == "--- one\nHel"
    first.finish_reason = "length"
    assert step(a="lo") == "--- one\nHello\n--- two\nWorld\n"


def engine_that_has_said(saved, dtype, **sampling):
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    asked = Prompt(tokens=(1, 2), sampling=Sampling(max_new_tokens=8, **sampling))
    engine = Engine.of(model, rows=1, max_tokens=16)
    return engine.target, list(engine.generate([asked]))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_tokens_that_only_rounding_decides_are_told_apart_from_others(saved, sampling):
    target, plain = engine_that_has_said(saved, torch.float32, **sampling)
    tokens = plain[0].tokens
    other = Rollout(plain[0].prompt, [*tokens[:5], (tokens[5] + 1) % 256, *tokens[6:]])
    same, how = compare_tokens(target, [other], plain)
    assert (same, how) == (False, "no, number 1 differs from its token 6 on")
    with torch.no_grad():  # two words that the policy cannot tell apart
        target.head[other.tokens[5]] = target.head[tokens[5]]
    if not sampling["temperature"]:
        same, how = compare_tokens(target, [other], plain)
        assert same
        assert how == (
            "yes, up to ties that rounding to float32 decides: number 1 differs from its token 6 on"
        )


def test_a_sample_that_ends_early_differs_from_where_it_ends(saved):
    target, plain = engine_that_has_said(saved, torch.float32)
    short = Rollout(plain[0].prompt, plain[0].tokens[:3])
    assert compare_tokens(target, [short], plain) == (False, "no, number 1 differs from its token 4 on")


def test_scores_of_two_tokens_have_the_noise_of_their_place(saved):
    target, (said,) = engine_that_has_said(saved, torch.float32, temperature=0.7)
    other = Rollout(said.prompt, [*said.tokens[:5], (said.tokens[5] + 1) % 256])
    with torch.no_grad():
        logits = target.model(torch.tensor([[1, 2, *said.tokens[:5]]])).logits[0, -1]
    scores = perturbed(logits, said.prompt, position=7)
    expected = scores[said.tokens[5]] - scores[other.tokens[5]]
    assert score_gap(target, said, other, 5) == pytest.approx(float(expected), abs=1e-4)
