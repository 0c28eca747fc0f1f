"""Tests that an engine notices changed weights, and that an update makes every later token theirs."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.rollouts import decode_plainly, prompts_of, tiny_policy
from test_draft_layer import layer_for
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import LayerDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import GraphCache, Target, make_target
from aedit.weights import WeightWatch

ASKED = prompts_of(3, max_new_tokens=10, temperature=1.0)


def stepped(policy, inner):
    policy.train()
    policy(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    inner.step()
    policy.eval()


def by_sgd(policy):
    stepped(policy, torch.optim.SGD(policy.parameters(), lr=0.3))


def by_adamw(policy):
    stepped(policy, torch.optim.AdamW(policy.parameters(), lr=0.03))


def by_fused_adamw(policy):
    """Change the weights without PyTorch's count of changes."""
    counts = [p._version for p in policy.parameters()]
    stepped(policy, torch.optim.AdamW(policy.parameters(), lr=0.03, fused=True))
    assert counts == [p._version for p in policy.parameters()]


def by_data(policy):
    for p in policy.parameters():
        p.data.add_(0.02)


def by_numpy(policy):
    for p in policy.parameters():
        array = p.detach().numpy()
        array += np.float64(0.02)


def by_copies(policy):
    policy.load_state_dict(tiny_policy(seed=4).state_dict())


def by_assignment(policy):
    policy.load_state_dict(tiny_policy(seed=4).state_dict(), assign=True)


def by_new_data(policy):
    for p, other in zip(policy.parameters(), tiny_policy(seed=4).parameters(), strict=True):
        p.data = other.data


def by_another_head(policy):
    head = nn.Linear(32, 64, bias=False, dtype=torch.float64)
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    policy.lm_head = head


def by_another_layer(policy):
    policy.model.layers[1] = tiny_policy(seed=4).model.layers[1]


WAYS = [
    by_sgd,
    by_adamw,
    by_fused_adamw,
    by_data,
    by_numpy,
    by_copies,
    by_assignment,
    by_new_data,
    by_another_head,
    by_another_layer,
]


def engine_with(seed=1, rows=3):
    policy = tiny_policy(seed=seed)
    return policy, Engine.of(policy, rows=rows, max_tokens=64)


def continued(policy, prompt, tokens):
    """Return plain decoding of what follows `tokens`."""
    sampling = replace(prompt.sampling, max_new_tokens=10 - len(tokens))
    rest = replace(prompt, tokens=(*prompt.tokens, *tokens), sampling=sampling)
    return decode_plainly(policy, [rest])[0]


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_was_not_told_of_new_weights_raises_until_it_is(way):
    policy, engine = engine_with()
    before = [rollout.tokens for rollout in engine.generate(ASKED)]
    way(policy)
    with pytest.raises(RuntimeError, match=r"has changed, .* version 0: call engine\.update_weights\(None,"):
        list(engine.generate(ASKED))
    engine.update_weights(None, 1)
    made = list(engine.generate([]))
    made.sort(key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, ASKED) != before
    assert {version for rollout in made for version in rollout.versions} == {1}


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_change_between_two_steps_give_no_token_of_the_wrong_version(way):
    policy, engine = engine_with()
    made = [engine.add(prompt) for prompt in ASKED]
    for _ in range(4):
        engine.step()
    before = [list(rollout.tokens) for rollout in made]
    way(policy)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has changed"):
            engine.step()
    engine.update_weights(policy.state_dict(), 3)
    list(engine.generate([]))
    for prompt, rollout, tokens in zip(ASKED, made, before, strict=True):
        assert rollout.tokens == tokens + continued(policy, prompt, tokens)
        assert rollout.versions == [0] * 4 + [3] * 6


def held(function):
    """Yield the tensors that a function of closures and partials keeps."""
    kept = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    kept += [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    kept += [getattr(function, name) for name in ("weight", "bias", "parts") if hasattr(function, name)]
    for each in [part for value in kept for part in (value if isinstance(value, tuple) else (value,))]:
        if isinstance(each, torch.Tensor):
            yield each
        elif callable(each):
            yield from held(each)


def test_the_parameters_stay_shared_with_a_trainer_on_the_same_rank():
    policy, engine = engine_with()
    addresses = [p.data_ptr() for p in policy.parameters()]
    for version, way in enumerate((by_sgd, by_fused_adamw), 1):
        way(policy)
        engine.update_weights(None, version)
        assert [p.data_ptr() for p in policy.parameters()] == addresses
    found = {tensor.data_ptr() for tensor in held(engine.target.weights.layers[0].attention.qkv)}
    assert len(found) >= 3, "queries, keys and values"
    assert found <= set(addresses)


def test_after_a_cast_there_and_back_positions_rotate_as_in_the_model():
    """It rounds the frequencies of rotary positions, which are no weights."""
    policy, text = tiny_policy().float(), torch.arange(200)[None] % 48
    target = Target.of(policy, rows=1, max_tokens=256)
    policy.half().float()
    target.update_weights(None, 1)
    with torch.no_grad():
        wanted = policy(text, use_cache=False).logits[0]
    torch.testing.assert_close(target.step(text, [0])[0][0], wanted, rtol=1e-4, atol=1e-4)


def test_training_that_leaves_the_weights_alone_raises_nothing():
    policy, engine = engine_with()
    policy(input_ids=torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    policy.zero_grad()
    policy.train().eval().to("cpu")
    copy.deepcopy(policy)
    policy.state_dict()
    made = sorted(engine.generate(ASKED), key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, ASKED)


def test_weights_that_are_not_a_number_are_equal_to_themselves():
    policy = tiny_policy()
    with torch.no_grad():
        policy.lm_head.weight.fill_(torch.nan)
    watch = WeightWatch(policy)
    assert watch.changed(thorough=True) is None
    policy.lm_head.weight.data[0, 0] = 1.0
    assert watch.changed(thorough=True) == "lm_head.weight"
    watch.look()
    assert watch.changed(thorough=True) is None


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lambda policy: policy.float(), r"was \(64, 32\) in torch.float64 .*: make a new engine"),
        (lambda policy: policy.resize_token_embeddings(70), r"is \(70, 32\) .* make a new engine"),
        (lambda policy: delattr(policy.model, "norm"), r"model.norm.weight .* is missing and was"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(way, words):
    policy, engine = engine_with()
    way(policy)
    with pytest.raises(ValueError, match=words):
        engine.update_weights(None, 1)
    with pytest.raises(RuntimeError, match="has changed"):
        list(engine.generate(ASKED))


def test_tensors_of_every_shape_are_watched():
    module = nn.Module()
    shapes = [(), (1,), (0, 3), (3, 5, 2), (2, 300)]
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))
    module.register_buffer("kept", torch.zeros(4, dtype=torch.int8))
    module.register_buffer("own", torch.zeros(4), persistent=False)
    watch = WeightWatch(module)
    for name in ("p0", "p1", "p3", "p4", "kept"):
        module.state_dict()[name].data.add_(1)
        assert watch.changed(thorough=True) == name
        watch.look()
        module.state_dict()[name].add_(1)
        assert watch.changed() == name
        watch.look()
    module.own.add_(1)
    assert watch.changed(thorough=True) is None


# -- versions


def test_two_sets_of_weights_never_have_one_version():
    policy, engine = engine_with()
    other = tiny_policy(seed=4).state_dict()
    engine.update_weights(policy.state_dict(), 0)
    engine.update_weights(copy.deepcopy(policy.state_dict()), 0)
    with pytest.raises(ValueError, match="version 0 is that of other weights"):
        engine.update_weights(other, 0)
    by_sgd(policy)
    for weights in (None, policy.state_dict()):
        with pytest.raises(ValueError, match="version 0 is that of other weights"):
            engine.update_weights(weights, 0)
    engine.update_weights(other, 5)
    with pytest.raises(ValueError, match="version 4 is below version 5, which the engine has"):
        engine.update_weights(other, 4)
    assert engine.version == 5
    assert engine.status()["version"] == 5


# -- failures on the way


def test_after_an_update_that_failed_on_the_way_only_a_complete_one_helps(monkeypatch):
    engine = engine_with()[1]
    made = [engine.add(prompt) for prompt in ASKED]
    engine.step()
    other = tiny_policy(seed=4)
    copies, right = [], torch.Tensor.copy_

    def failing(self, source, *rest):
        copies.append(source)
        if len(copies) == 5:
            raise torch.OutOfMemoryError("no memory")
        return right(self, source, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", failing)
        with pytest.raises(torch.OutOfMemoryError):
            engine.update_weights(other.state_dict(), 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="update to version 1 of the weights failed on the way"):
            engine.step()
    with pytest.raises(ValueError, match="version 0 is that of other weights"):
        engine.update_weights(None, 0)
    engine.update_weights(other.state_dict(), 1)
    list(engine.generate([]))
    for prompt, rollout in zip(ASKED, made, strict=True):
        first = rollout.tokens[:1]
        assert rollout.tokens == first + continued(other, prompt, first)
        assert rollout.versions == [0] + [1] * 9


# -- captured graphs


def traced(function, inputs, shared):
    """Return `function` as a CUDA graph has it: it reads the tensors of its recording."""
    return make_fx(lambda tokens, lengths: function(tokens, lengths))(*inputs)


@pytest.mark.parametrize("way", [by_assignment, by_new_data, by_another_layer, by_copies, by_sgd])
def test_captured_graphs_read_the_weights_where_they_are_now(way):
    policy, engine = engine_with(rows=4)
    engine.target.graphs = GraphCache(torch.device("cpu"), record=traced)
    list(engine.generate(ASKED))
    num_recorded = len(engine.target.graphs)
    assert num_recorded > 0
    way(policy)
    engine.update_weights(None, 1)
    moved = way in (by_assignment, by_new_data, by_another_layer)
    assert len(engine.target.graphs) == (0 if moved else num_recorded)
    made = sorted(engine.generate(ASKED), key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, ASKED)


@pytest.mark.parametrize("way", [by_assignment, by_new_data, by_sgd])
def test_a_drafter_that_reads_the_policy_s_embedding_reads_the_new_one(way):
    """What it proposes is what a drafter that is made for the new weights proposes."""
    policy = tiny_policy(seed=1)
    target, layer = Target.of(policy, rows=3, max_tokens=64), layer_for(policy)
    drafter = LayerDrafter.of(layer, target)
    engine = Engine(target, drafters={"layer": drafter}, chooser=Fixed.of("layer:4"))
    list(engine.generate(ASKED))
    drafter.graphs = GraphCache(torch.device("cpu"), record=lambda function, *_: function)
    drafter.graphs.run("a key", lambda: ())
    way(policy)
    engine.update_weights(None, 1)
    assert len(drafter.graphs) == (way == by_sgd)
    drafter.graphs = None
    again = [replace(prompt, rollout=prompt.rollout + 100) for prompt in ASKED]
    made = sorted(engine.generate(again), key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, again)
    other = Target.of(policy, rows=3, max_tokens=64)
    drafters = {"layer": LayerDrafter.of(layer, other)}
    fresh = Engine(other, drafters=drafters, chooser=Fixed.of("layer:4"))
    theirs = sorted(fresh.generate(again), key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.passes for rollout in made] == [rollout.passes for rollout in theirs]


class Adapter(nn.Module):
    """A layer with two adapters, with the attributes by which layers of PEFT choose among them."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.adapters = base_layer, nn.ModuleDict()
        for seed, name in enumerate(("one", "two")):
            generator = torch.Generator().manual_seed(seed)
            self.adapters[name] = nn.Linear(32, 32, bias=False, dtype=torch.float64)
            nn.init.normal_(self.adapters[name].weight, 0, 0.3, generator=generator)
        self._active_adapter, self._disable_adapters = ["one"], False
        self.merged_adapters, self.scaling = [], {"one": 1.0, "two": 0.5}

    def forward(self, x):
        used = [] if self._disable_adapters else self._active_adapter
        return self.base_layer(x) + sum(self.scaling[name] * self.adapters[name](x) for name in used)


def other_adapter(layer):
    layer._active_adapter = ["two"]


def both_adapters(layer):
    layer._active_adapter.append("two")


def no_adapter(layer):
    layer._disable_adapters = True


def other_scale(layer):
    layer.scaling["one"] = -2.0


@pytest.mark.parametrize("switch", [other_adapter, both_adapters, no_adapter, other_scale])
def test_another_choice_of_adapters_is_another_version(switch):
    """No tensor changes, and all tokens do."""
    policy = tiny_policy(seed=1)
    layer = policy.model.layers[1].self_attn.o_proj = Adapter(policy.model.layers[1].self_attn.o_proj)
    engine = Engine(make_target(policy, rows=3, max_tokens=64, path="generic"))
    before = sorted(engine.generate(ASKED), key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.tokens for rollout in before] == decode_plainly(policy, ASKED)
    switch(layer)
    message = r"the choice of adapters of model\.layers\.1\.self_attn\.o_proj has changed, .* version 0"
    with pytest.raises(RuntimeError, match=message):
        list(engine.generate(ASKED))
    engine.update_weights(None, 1)
    made = sorted(engine.generate([]), key=lambda rollout: rollout.prompt.rollout)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, ASKED)
    assert [rollout.tokens for rollout in made] != [rollout.tokens for rollout in before]
