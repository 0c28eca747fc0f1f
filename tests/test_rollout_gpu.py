"""Tests the GPU benchmark of rollouts, as far as it runs without a GPU."""

from dataclasses import replace

import pytest
import torch
from benchmarks import rollout_gpu
from benchmarks.kit.policy_drafter import Recipe
from benchmarks.policies import Policy
from benchmarks.rollout import Size

CPU = torch.device("cpu")
TINY = rollout_gpu.QWEN3_600M | {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SHORT = rollout_gpu.Length(prompt=8, new=6, repeats=2, copied_bytes=1 << 20)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rollout_gpu.main(["--quick"])
    assert capsys.readouterr().out == "rollout_gpu: needs a CUDA device: not run\n"


@pytest.fixture(scope="module")
def decoded():
    return rollout_gpu.decode(rollout_gpu.random_model(TINY, CPU), SHORT)


def test_every_contestant_decodes_and_the_bound_is_all_bytes_over_the_copy_speed(decoded):
    width, vocabulary, head = 32, 257, 16
    attention = width * 4 * head + 2 * head * width + 2 * head  # q and o of two heads, k and v of one, norms
    layer = attention + 3 * width * 48 + 2 * width
    assert decoded.parameters == vocabulary * width + 2 * layer + width, "a tied head is read once"
    kv_bytes = (8 + 6 / 2) * 2 * 2 * head * 2
    assert decoded.token_bytes == pytest.approx(2 * decoded.parameters + kv_bytes)
    assert decoded.most == decoded.copy_bytes_per_s / decoded.token_bytes
    assert {name: len(rates) for name, rates in decoded.rates.items()} == dict.fromkeys(
        ["graphs", "graphs again", "no graphs", "graphs, T = 1", "the pass alone"], 2
    )
    assert all(rate > 0 for rates in decoded.rates.values() for rate in rates)


@pytest.mark.parametrize(("share", "passed"), [(0.61, True), (0.59, False)])
def test_the_bar_is_three_fifths_of_the_bound(decoded, share, passed):
    rates = dict.fromkeys(decoded.rates, (share * decoded.most,) * 3)
    bar, steady = rollout_gpu.report(replace(decoded, rates=rates), quick=False).bars
    assert (bar.passed, steady.passed) == (passed, True)
    assert bar.text == f"captured graphs: {100 * share:.1f} % of the bandwidth bound, bar 60 %"


@pytest.mark.slow
def test_all_of_it_runs_to_its_end_on_a_cpu(tmp_path):
    policy = Policy(size="quick", minutes=0.1)
    size = Size(repeats=1, turn_tokens=8, their_tokens=8, their_repeats=1, drains=1, drain_rows=4)
    plan = rollout_gpu.Plan(
        recipe=Recipe(policy=policy, num_tokens=40_000, minutes=0.1),
        device="cpu",
        root=tmp_path,
        batches=(1, 3),
        temperatures=(1.0,),
        size=size,
        length=SHORT,
    )
    reports = {report.name: report for report in rollout_gpu.measure(plan, TINY, True)}
    assert [cell["rows"] for cell in reports["bars"].figures["cells"]] == [1, 3]
    pools = reports["memory of recorded graphs"].figures["pools"]
    assert [(one["rows"], one["graph_bytes"]) for one in pools] == [(1, 0), (3, 0)]
    assert {"decoding one sample, bf16", "tokens per second"} <= set(reports)
