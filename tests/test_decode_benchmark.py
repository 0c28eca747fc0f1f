"""Tests what `benchmarks.decode` measures: turns, rivals in other processes, bars. No timing decides."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import decode
from benchmarks.decode import (
    TAIL_SHAPE,
    Batch,
    Decoded,
    Found,
    Generate,
    Noise,
    Ours,
    Race,
    Shape,
    Turns,
    Update,
    long_tail,
    race_systems,
    rivals,
)
from benchmarks.kit.random_policy import PolicyShape, random_policy, saved_policy, vocabulary
from benchmarks.programs.hand_over import hand_over
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def model():
    return random_policy(decode.TINY, "fp32")


class Clockwork:
    """System that takes a second for prompts and a quarter for each plain step, and repeats a token."""

    def __init__(self, token=1, pace=1.0):
        self.token, self.pace, self.seen = token, pace, []

    def decode(self, prompts, new):
        self.seen.append((tuple(map(tuple, prompts)), new))
        seconds = self.pace * (1 + (new - 1) / 4)
        return Decoded(seconds, [[1] + [self.token] * (new - 1) for _ in prompts])


def test_a_turn_tells_prompts_from_steps_and_all_see_the_same_prompts():
    ours, theirs = Clockwork(), Clockwork(token=2, pace=2.0)
    turns = Turns(repeats=4, vocabulary=50)
    found = race_systems({"ours": ours, "generate": theirs}, "fp32", Shape(3, 5, 8), turns)
    assert found.first_s == {"ours": [1.0] * 4, "generate": [2.0] * 4}
    assert found.rates == {"ours": [12.0] * 4, "generate": [6.0] * 4}, "3 rows, 4 steps a second"
    assert ours.seen == theirs.seen
    texts = [text for prompts, _ in ours.seen for text in prompts]
    assert len(set(texts)) == len(texts) == 5 * 2 * 3, "no cache of a prefix helps"
    assert {len(text) for text in texts} == {5}
    assert found.equal == {"ours": 1.0, "generate": pytest.approx((3 + 3) / (3 + 6))}
    assert found.speedup("ours", "generate").middle == 2.0
    assert found.speedup("ours", "generate", prompts=True).middle == 2.0


def test_steps_that_take_less_than_the_prompts_vary_by_have_no_speed():
    class Unsteady(Clockwork):
        def decode(self, prompts, new):
            found = super().decode(prompts, new)
            return replace(found, seconds=found.seconds + 5 * (len(self.seen) % 4 == 1))

    turns = Turns(repeats=4, vocabulary=50)
    found = race_systems({"ours": Clockwork(), "generate": Unsteady()}, "bf16", Shape(3, 5, 8), turns)
    assert found.rates == {"ours": [12.0] * 4, "generate": []}
    report = decode._decodes([found])
    assert report.rows[0][1:3] == ("12.0", "-")
    assert report.bars == ()


def test_a_race_of_prompts_alone_takes_no_steps():
    ours = Clockwork()
    found = race_systems({"ours": ours}, "fp32", Shape(2, 7), Turns(repeats=3, vocabulary=50))
    assert found.rates == {"ours": []}
    assert [new for _, new in ours.seen] == [1] * 4


def test_a_system_that_makes_fewer_tokens_is_an_error():
    class Short(Clockwork):
        def decode(self, prompts, new):
            return Decoded(1.0, super().decode(prompts, new).tokens[:-1])

    with pytest.raises(RuntimeError, match="another number of tokens"):
        race_systems(
            {"ours": Clockwork(), "generate": Short()},
            "fp32",
            Shape(2, 3, 2),
            Turns(repeats=1, vocabulary=50),
        )


def test_a_slow_race_ends_early_but_not_before_the_second_repeat():
    turns = Turns(repeats=9, vocabulary=50, limit_s=0.0)
    assert race_systems({"ours": Clockwork()}, "fp32", Shape(2, 7), turns).first_s == {"ours": [1.0] * 2}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_saved_policy_is_the_same_one(tmp_path, dtype):
    model = random_policy(decode.TINY, dtype)
    saved_policy(model, tmp_path / "policy")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto")
    known = model.state_dict()
    assert all(torch.equal(value, known[name]) for name, value in again.state_dict().items())
    assert again.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").convert_ids_to_tokens([7]) == ["t7"]


def test_ours_and_generate_decode_the_same_greedy_tokens(model):
    prompts = [[5, 9, 2, 40], [1, 1, 3, 8]]
    ours, theirs = Ours(model).decode(prompts, 6), Generate(model).decode(prompts, 6)
    assert ours.tokens == theirs.tokens
    assert min(ours.seconds, theirs.seconds) > 0


ECHO = """
def get_supported_compute_types(device):
    return {"float32"}
class converters:
    class TransformersConverter:
        def __init__(self, directory): print("a word on stdout")
        def convert(self, where, quantization, force): pass
class Done:
    def __init__(self, ids): self.sequences_ids = [ids]
class Generator:
    def __init__(self, where, device, compute_type, inter_threads, intra_threads): pass
    def generate_batch(self, words, beam_size, sampling_topk, max_length, min_length, **how):
        return [Done([int(text[-1][1:])] * max_length) for text in words]
"""


def test_a_rival_answers_from_its_own_process_and_another_is_skipped_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ctranslate2.py").write_text(ECHO)
    (tmp_path / "modules" / "vllm.py").write_text("raise ImportError('built for another machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    here = {"ctranslate2": Path(sys.executable), "vllm": Path(sys.executable)}
    with rivals(here, tmp_path / "policy", "fp32", 32, 4) as (found, reasons):
        assert list(found) == ["ctranslate2"]
        assert reasons == ["fp32: vllm: ImportError: built for another machine"]
        said = found["ctranslate2"].decode([[3, 4], [5, 6]], 3)
        assert said.tokens == [[4] * 3, [6] * 3]
        process = found["ctranslate2"].dialogue.process
    assert process.returncode is not None


def test_a_rival_without_the_dtype_or_without_a_python_is_skipped(tmp_path, monkeypatch):
    (tmp_path / "ctranslate2.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    here = {"ctranslate2": Path(sys.executable), "vllm": tmp_path / "none"}
    with rivals(here, tmp_path / "policy", "bf16", 32, 4) as (found, reasons):
        assert found == {}
    assert reasons[0] == "bf16: ctranslate2: RuntimeError: it has no bfloat16 on this CPU, only float32"
    assert "No such file" in reasons[1]


def raced(rows, ours, vllm):
    return Race(
        "bf16", Shape(rows, 4, 2), {"ours": [1.0], "generate": [1.0]}, {"ours": [ours], "vllm": [vllm]}, {}
    )


@pytest.mark.parametrize(("rows", "share", "passed"), [(1, 1.01, True), (1, 0.99, False), (16, 0.96, True)])
def test_decoding_has_a_bar_beside_vllm(rows, share, passed):
    (bar, _) = (
        bar for report in Found(decodes=[raced(rows, share, 1.0)]).reports(False) for bar in report.bars
    )
    assert bar.passed is passed
    assert bar.text.startswith(f"bf16, batch {rows}: {share:.2f} [")


def test_a_family_that_gains_less_than_a_tenth_misses_its_bar():
    gains = dict.fromkeys(decode.FAMILIES, 1.2) | {"Phi3ForCausalLM": 1.09}
    for least, passed in ((1.09, False), (1.11, True)):
        gains["Phi3ForCausalLM"] = least
        families = [
            decode.FamilyGain(name, rows, [gain * by] * 3, [1.0] * 3)
            for name, gain in gains.items()
            for rows, by in ((1, 1.0), (16, 0.5))
        ]
        ((bar,),) = (report.bars for report in Found(families=families).reports(False))
        assert bar.passed is passed, "a gain at either number of rows counts"
        assert bar.text.startswith(f"least gain of a family: Phi3ForCausalLM {least}")


def test_a_family_is_measured_by_both_ways():
    gain = decode.measure_family("GPT2LMHeadModel", 2, turn_steps=1, repeats=2)
    assert (len(gain.generic_s), len(gain.fast_s)) == (2, 2)


def test_noise_and_updates_are_ratios_within_a_turn():
    noise = Noise("fp32", 16, [1.0, 2.0, 4.0], [1.1, 2.2, 4.4])
    update = Update("fp32", 16, 260, [2.0, 4.0], [1.0, 2.0])
    assert noise.extra.middle == pytest.approx(0.1)
    assert update.in_steps.middle == 2.0
    (report,) = Found(noises=[noise], updates=[update]).reports(False)
    assert [bar.passed for bar in report.bars] == [False]
    assert [row[1] for row in report.rows] == [
        "2.00 [2.00, 2.00] plain steps",
        "+10.0 [10.0, 10.0] % of a step",
    ]


def test_operations_are_timed_by_group_and_python_is_the_rest(model):
    found = decode.measure_operations(model, "fp32", 2, turn_steps=2, repeats=3)
    assert {len(seconds) for seconds in (found.step_s, *found.by_group_s.values())} == {3}
    assert all(min(seconds) > 0 for seconds in found.by_group_s.values()), "each group occurs in each step"
    made_up = {group: [0.01 * i] * 3 for i, group in enumerate(decode.OPERATIONS)}
    (report,) = Found(operations=[decode.StepTimes("fp32", 2, [0.2] * 3, made_up)]).reports(False)
    assert report.rows == (
        ("fp32, 2", "200.00", "0.00", "10.00", "20.00", "30.00", "40.00", "50.00", "50.00"),
    )


def test_memory_is_that_of_the_tokens_in_use():
    batch = Batch(rows=3, max_tokens=64, samples=7, prompt=4, median=9.0)
    found = long_tail(
        batch, replace(TAIL_SHAPE, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    )
    assert found.token_bytes == 4 * 2 * 64 * 4
    lengths = batch.lengths()
    assert len(lengths) == 7
    assert max(lengths) > 2 * sorted(lengths)[3], "the tail is long"
    # Three rows take the next samples as they are free, before or after a step.
    rows, waiting, most_tokens = [], list(lengths), 0
    while rows or waiting:
        while waiting and len(rows) < 3:
            rows.append([0, waiting.pop(0)])
        rows = [[made + 1, most] for made, most in rows if made + 1 < most]
        most_tokens = max(most_tokens, sum(4 + made - 1 for made, _ in rows))
    assert most_tokens <= found.peak.tokens <= most_tokens + 3 * 3
    assert found.end.tokens == 0
    assert max(moment.kv_bytes for moment in found.moments) <= found.reserved_bytes


def test_the_core_is_given_back():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with decode.one_core(min(cores)):
        assert os.sched_getaffinity(0) == {min(cores)}
        assert torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)
    with pytest.raises(SystemExit, match="--core 4096: this process may use"), decode.one_core(4096):
        pass


def test_what_is_no_rival_or_dtype_is_refused(capsys):
    for words in (["--rival-python", "llama=x"], ["--dtypes", "fp64"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            decode.main(words)
        assert "invalid" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sharded_trainer_hands_its_weights_over_with_less_memory_than_the_model():
    shape = PolicyShape(vocab_size=2048, hidden_size=512, num_hidden_layers=6, num_attention_heads=8)
    found = hand_over(replace(shape, num_key_value_heads=8))
    assert found.equal
    assert found.largest_bytes <= max(found.peak_bytes) < found.model_bytes


def test_a_quick_run_measures_every_part_but_processes_and_says_which_rivals_are_missing(tmp_path, capsys):
    file = tmp_path / "found.json"
    parts = [word for part in decode.PARTS if part != "hand-over" for word in ("--only", part)]
    decode.main(["--quick", *parts, "--json", str(file), "--core", str(min(os.sched_getaffinity(0)))])
    text = capsys.readouterr()
    reports = json.loads(file.read_text())["reports"]
    assert [report["name"] for report in reports] == [
        "plain decoding, tokens/s",
        "prefill, seconds to the first tokens",
        "our steps",
        "processor time of a step by operation, T = 1",
        "families, processor time of a step",
        "memory of keys and values",
    ]
    races = [one for report in reports[:2] for one in report["figures"]["races"]]
    assert {share for one in races for share in one["equal"].values()} == {1.0}
    assert "skipped vllm: not asked for" in text.err
    assert "too short to tell" in text.out
    assert "PASS" not in text.out
    assert "MISS" not in text.out
    assert vocabulary(random_policy(decode.TINY, "fp32")) == 96
