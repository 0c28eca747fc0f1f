"""Tests an engine whose policy and drafter are on a GPU; tests that need no GPU run on the CPU too."""

import copy

import pytest
import torch
from kit.rollouts import KINDS, perturbed, prompts_of, samples, tiny_policy, tokens_of
from test_draft_layer import layer_for
from test_graphs import Replayed

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.engine import verification as verdict
from aedit.spec_rollout.model import GraphCache, Target

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
ARMS = ["off", "suffix:4", "layer:4", "layer:3x2x6"]
TIE = 0.1
"""Difference of logits of about 10, which bfloat16 rounds to multiples of 1/16."""


def engine_on(device, arm, *, dtype=torch.float64, graphs=True, rows=7):
    """Return an engine with more slots than most graphs use, and rows that do not fill a bucket."""
    policy = copy.deepcopy(tiny_policy(dtype=dtype)).to(device)
    target = Target.of(policy, rows=rows, max_tokens=400, nodes=8)
    drafter = LayerDrafter.of(layer_for(policy), target)
    if not graphs:
        target.graphs = drafter.graphs = None
    drafters = {"layer": drafter, "suffix": SuffixDrafter(device=device)}
    return Engine(target, drafters=drafters, chooser=Fixed.of(arm))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("arm", ARMS)
def test_graphs_change_no_token(device, arm):
    asked = samples(KINDS)
    assert tokens_of(engine_on(device, arm), asked) == tokens_of(engine_on(device, arm, graphs=False), asked)


@pytest.mark.parametrize("device", [GPU])
def test_a_gpu_says_what_a_cpu_says(device):
    asked = samples(KINDS)
    assert tokens_of(engine_on(device, "layer:4"), asked) == tokens_of(engine_on("cpu", "off"), asked)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("arm", ARMS[1:])
def test_in_bfloat16_tokens_are_equal_up_to_the_first_tie(device, arm):
    asked = prompts_of(12, max_new_tokens=24, temperature=1.0)
    plain = tokens_of(engine_on(device, "off", dtype=torch.bfloat16), asked)
    drafted = tokens_of(engine_on(device, arm, dtype=torch.bfloat16), asked)
    model = tiny_policy(dtype=torch.bfloat16).to(device)
    compared = equal = 0
    for prompt, ours, theirs in zip(asked, drafted, plain, strict=True):
        num_tokens = before_the_first_tie(model, prompt, theirs)
        compared += num_tokens
        equal += next((i for i in range(num_tokens) if ours[i] != theirs[i]), num_tokens)
    assert compared > 60
    assert equal >= 0.99 * compared


@torch.no_grad()
def before_the_first_tie(model, prompt, tokens):
    """Return how many tokens precede the first position with a tie."""
    text = torch.tensor([[*prompt.tokens, *tokens]], device=model.device)
    logits = model(input_ids=text, use_cache=False).logits[0].float().cpu()
    for i in range(len(tokens)):
        position = len(prompt.tokens) + i
        best = perturbed(logits[position - 1], prompt, position).topk(2).values
        if best[0] - best[1] < TIE:
            return i
    return len(tokens)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_recordings_are_few_however_long_it_goes_on(device):
    engine = engine_on(device, "off")
    drafter = engine.drafters["layer"]
    if device == "cpu":
        engine.target.graphs, drafter.graphs = (
            GraphCache(torch.device("cpu"), record=Replayed) for _ in "ab"
        )
    for turn, arm in enumerate(["layer:4", "off", "layer:3x2x6", "layer:1", "suffix:4", "layer:4"]):
        engine.chooser = Fixed.of(arm)
        tokens_of(engine, prompts_of(9, seed=turn, max_new_tokens=12))
    # 1, 2, 3, 4, 6 or 7 rows; 1 to 5 tokens in a line, trees of 2 to 7.
    assert 6 < len(engine.target.graphs) <= 6 * 11
    assert 6 < len(drafter.graphs) <= 6 * 7


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("arm", ARMS)
def test_a_step_waits_for_the_device_once_when_it_asks_what_stands(device, arm, monkeypatch):
    engine = engine_on(device, arm)
    for prompt in prompts_of(5, max_new_tokens=200, temperature=0.7):
        engine.add(prompt)
    for _ in range(4):
        engine.step()
    asked, real = [], verdict._to_host

    def on_host(*args, **more):
        asked.append(1)
        let_wait(device, "default")
        made = real(*args, **more)
        let_wait(device, "error")
        return made

    monkeypatch.setattr(verdict, "_to_host", on_host)
    try:
        for _ in range(20):
            let_wait(device, "error")
            engine.step()
    finally:
        let_wait(device, "default")
    assert len(asked) == 20


def let_wait(device, what):
    """Set the CUDA sync debug mode: "error" raises on a wait for the GPU, "default" permits it."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(what)
