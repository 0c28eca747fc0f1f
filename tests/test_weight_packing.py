"""Tests that packed weights give the model's own results, are really used, and never outlive the weights."""

import copy
from pathlib import Path

import pytest
import torch
from kit.families import FAMILIES, family_model
from kit.rollouts import tiny_policy

from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.engine import engine as engine_module
from aedit.spec_rollout.engine.engine import PACK_AFTER
from aedit.spec_rollout.model import Segment, Target, layers
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.system import HUGE_PAGE_BYTES, use_huge_pages

pytestmark = pytest.mark.skipif(not layers._HAS_ONEDNN, reason="this PyTorch has no oneDNN")
ALL = 1 << 30


@pytest.fixture(autouse=True)
def _small_weights_count(monkeypatch):
    monkeypatch.setattr(layers, "SMALL_WEIGHTS", 1)


def packed(weights):
    return [each.is_packed for each in (*weights.projections, weights.to_logits)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_same_with_packed_weights(name):
    """The oracle is the model of `transformers` in float64."""
    model = family_model(name).float()
    exact = copy.deepcopy(model).double()
    text = torch.randint(64, (17,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = exact(text[None], use_cache=False).logits[0, 11:]
    target = Target.of(model, rows=1, max_tokens=40)
    target.prefill([Segment(0, 0, text[:11].tolist())])
    plain = target.step(text[None, 11:], [11])[0][0]
    target.pack(ALL)
    assert all(packed(target.weights))
    assert len(packed(target.weights)) > target.num_layers
    found = target.step(text[None, 11:], [11])[0][0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("narrow", "fewest"), [(1 << 20, 3), (0, 2)])
def test_the_packed_copy_is_what_is_multiplied_for_several_tokens_and_not_for_one(
    narrow, fewest, monkeypatch
):
    """Two tokens of narrow inputs are faster without it."""
    monkeypatch.setattr(layers, "NARROW_INPUTS", narrow)
    target = Target.of(tiny_policy().float(), rows=2, max_tokens=16)
    features = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(0))
    before = target.logits(features)
    target.pack(ALL)
    target.head.data.mul_(2)  # not counted by `Tensor._version`
    for rows in range(1, 5):
        found, factor = target.logits(features[:rows]), 1 if rows >= fewest else 2
        torch.testing.assert_close(found, factor * before[:rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("part", ["q_proj", "v_proj"])
def test_a_change_of_one_joined_weight_or_bias_is_seen_at_once(name, part):
    """The oracle is the model of `transformers`."""
    model = family_model(name).float()
    target = Target.of(model, rows=1, max_tokens=40)
    target.pack(ALL)
    module = getattr(model.model.layers[0].self_attn, part)
    text = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.mul_(-1.5)
            wanted = model(text, use_cache=False).logits[0]
        torch.testing.assert_close(target.step(text, [0])[0][0], wanted, rtol=1e-4, atol=1e-4)
        target.pack(ALL)


def test_weights_of_one_input_are_one_product_with_their_copy_and_several_without():
    target = Target.of(tiny_policy().float(), rows=2, max_tokens=16)
    joined = [each for each in target.weights.projections if isinstance(each, layers.JoinedLinear)]
    assert [len(each.parts) for each in joined] == [3, 2] * target.num_layers
    x = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert joined[0].joined(x) is None
        plain = joined[0](x)
        target.pack(ALL)
        found = joined[0].joined(x)
        torch.testing.assert_close(found, torch.cat(plain, -1))
        assert joined[0].joined(x[:2]) is None, "two rows in fp32 are faster with the weights as they are"
        torch.testing.assert_close(joined[0](x), plain)
        joined[0]._copy.zero_()
        torch.testing.assert_close(joined[0](x[:2]), tuple(part[:2] for part in plain))
    assert joined[0].joined(x) is None, "a copy has no gradient"


def test_biases_that_do_not_count_their_changes_are_not_copied():
    """Tensors made in inference mode do not. Found: an error after some passes of an engine."""
    model = family_model("qwen2").float()
    with torch.inference_mode():
        for module in model.modules():
            if getattr(module, "bias", None) is not None:
                module.bias = torch.nn.Parameter(module.bias.clone(), requires_grad=False)
    target = Target.of(model, rows=1, max_tokens=40)
    target.pack(ALL)
    assert target.weights.to_logits.is_packed
    text = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits[0]
    torch.testing.assert_close(target.step(text, [0])[0][0], wanted, rtol=1e-4, atol=1e-4)


def test_a_change_in_place_is_seen_at_once_and_new_weights_are_not_packed():
    target = Target.of(tiny_policy().float(), rows=2, max_tokens=16)
    features = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(0))
    before = target.logits(features)
    target.pack(ALL)
    with torch.no_grad():
        target.head.mul_(2)
    assert torch.allclose(target.logits(features), 2 * before, rtol=1e-4)
    target.update_weights(None, 1)
    assert not any(packed(target.weights))


def test_nothing_is_packed_that_takes_more_than_allowed():
    target = Target.of(tiny_policy().float(), rows=2, max_tokens=16)
    weights = target.weights
    size = sum(each.nbytes for each in (*weights.projections, weights.to_logits))
    target.pack(size - 1)
    assert not any(packed(weights))
    target.pack(size)
    assert all(packed(weights))


@pytest.mark.skipif(torch.bfloat16 not in layers._packed_dtypes(), reason="this CPU has no products in bf16")
@pytest.mark.parametrize("is_wide", [False, True])
def test_in_bf16_products_of_one_row_use_the_copy_unless_inputs_are_wide(is_wide, monkeypatch):
    monkeypatch.setattr(layers, "WIDE_INPUTS", 1 if is_wide else 1 << 20)
    target = Target.of(tiny_policy().bfloat16(), rows=2, max_tokens=16)
    features = torch.randn(2, target.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = target.logits(features)
    target.pack(ALL)
    assert all(packed(target.weights))
    target.head.data.mul_(2)  # not counted by `Tensor._version`: the copy is as it was
    torch.testing.assert_close(target.logits(features), before, rtol=0.02, atol=0.02)
    factor = 2 if is_wide else 1
    torch.testing.assert_close(target.logits(features[:1]), factor * before[:1], rtol=0.02, atol=0.02)


def test_only_large_weights_are_packed(monkeypatch):
    model = tiny_policy().float()
    other = Target.of(copy.deepcopy(model).double(), rows=2, max_tokens=16)
    other.pack(ALL)
    assert not any(packed(other.weights))
    sizes = [each.nbytes // 4 for each in Target.of(model, rows=1, max_tokens=8).weights.projections]
    monkeypatch.setattr(layers, "SMALL_WEIGHTS", max(sizes))
    target = Target.of(model, rows=2, max_tokens=16)
    target.pack(ALL)
    assert packed(target.weights)[:-1] == [size == max(sizes) for size in sizes]


def prompts(number, start=0):
    how = Sampling(max_new_tokens=60)
    return [Prompt(tokens=(1, 2 + i), rollout=start + i, sampling=how) for i in range(number)]


def test_an_engine_packs_weights_that_are_in_use_for_long_and_makes_the_same_tokens():
    model = tiny_policy().float()
    plain = Engine.of(copy.deepcopy(model), rows=4, max_tokens=64, limits=EngineLimits(packed_bytes=0))
    wanted = {each.prompt.rollout: each.tokens for each in plain.generate(prompts(8))}
    assert not any(packed(plain.target.weights))
    engine = Engine.of(model, rows=4, max_tokens=64)
    for prompt in prompts(8):
        engine.add(prompt)
    found, steps = {}, 0
    while engine.running or engine.waiting:
        assert all(packed(engine.target.weights)) == (steps >= PACK_AFTER)
        found |= {each.prompt.rollout: each.tokens for each in engine.step().finished}
        steps += 1
    assert found == wanted
    assert steps >= 4 * PACK_AFTER
    engine.update_weights(None, 1)
    assert not any(packed(engine.target.weights))
    engine.add(prompts(1, 100)[0])
    engine.step()
    engine.step()
    assert not any(packed(engine.target.weights)), "a pass over one token is not faster"
    engine.add(prompts(1, 101)[0])
    engine.step()
    assert all(packed(engine.target.weights)), "weights before were used for long"


def test_an_engine_moves_packed_weights_to_huge_pages_once_for_each_version(monkeypatch):
    moved = []
    monkeypatch.setattr(layers, "use_huge_pages", lambda address, num_bytes: moved.append(address))
    monkeypatch.setattr(engine_module, "HUGE_AFTER", 40)
    model = tiny_policy().float()
    engine = Engine.of(model, rows=4, max_tokens=64)
    for prompt in prompts(8):
        engine.add(prompt)
    steps = 0
    while engine.running or engine.waiting:
        copies = sum(packed(engine.target.weights))
        assert len(set(moved)) == len(moved) == min(copies, max(0, steps - 39)), "one with each step"
        engine.step()
        steps += 1
    assert steps > 2 * 40
    engine.update_weights(None, 1)
    assert len(list(engine.generate(prompts(8, 100)))) == 8
    assert len(moved) == 2 * copies > 0
    assert not list(Target.of(copy.deepcopy(model), rows=1, max_tokens=8).moves_to_huge_pages())
    assert len(moved) == 2 * copies, "nothing is packed"


def test_a_packed_copy_in_huge_pages_has_the_same_products(monkeypatch):
    """What the system has done is read from its own account of the process's memory."""
    moved = []

    def move(address, num_bytes):
        moved.append((address, address + num_bytes, use_huge_pages(address, num_bytes)))

    monkeypatch.setattr(layers, "use_huge_pages", move)
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(4096, 1024, generator=draw) for _ in range(2)]
    one, joined = layers.Linear(weights[0]), layers.JoinedLinear(tuple(map(layers.Linear, weights)))
    x_Ti = torch.randn(4, 1024, generator=draw)
    with torch.no_grad():
        for each in (one, joined):
            assert not list(each.moves_to_huge_pages()), "there is no copy"
            each.pack()
            before = product(each, x_Ti)
            in_huge_pages = huge_bytes()
            assert len(list(each.moves_to_huge_pages())) == len(moved)
            assert torch.equal(product(each, x_Ti), before)
            first, end = moved[0][0], moved[-1][1]
            assert end - first == each.nbytes >= 8 << 20
            if all(is_done for *_, is_done in moved):  # Linux from 6.1 on, if it has room for huge pages
                whole = end // HUGE_PAGE_BYTES - -(-first // HUGE_PAGE_BYTES)
                assert huge_bytes() >= in_huge_pages + whole * HUGE_PAGE_BYTES
            moved.clear()


def product(linear, x_Ti):
    found = linear(x_Ti)
    return torch.cat(found, -1) if isinstance(found, tuple) else found


def huge_bytes():
    """Return the bytes of this process in huge pages; 0 where the system does not say."""
    account = Path("/proc/self/smaps_rollup")
    lines = account.read_text().splitlines() if account.exists() else []
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.parametrize("length", [33, 20])
def test_an_engine_packs_weights_before_a_long_prompt(monkeypatch, length):
    """Each two tokens count as a pass here."""
    monkeypatch.setattr(engine_module, "PACK_TOKENS", 2)
    model, how = tiny_policy().float(), Sampling(max_new_tokens=8)
    prompt = Prompt(tokens=tuple(range(1, 1 + length)), rollout=1, sampling=how)
    plain = Engine.of(copy.deepcopy(model), rows=1, max_tokens=64, limits=EngineLimits(packed_bytes=0))
    (wanted,) = plain.generate([prompt])
    engine = Engine.of(model, rows=1, max_tokens=64)
    was_packed, prefill = [], engine.target.prefill

    def watched(segments):
        was_packed.append(all(packed(engine.target.weights)))
        return prefill(segments)

    monkeypatch.setattr(type(engine.target), "prefill", lambda self, segments: watched(segments))
    (found,) = engine.generate([prompt])
    assert was_packed == [length - 1 >= 2 * PACK_AFTER]
    assert found.tokens == wanted.tokens
