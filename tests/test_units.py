"""Tests units: every trainable parameter belongs to one of them, and lands before anything uses it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from aedit.edit import find_units


def llama(*, tied):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **sizes))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_head=2, n_layer=3, n_positions=8))


def mlp(blocks=3):
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)])


def by_name(units):
    return {unit.name: unit.names for unit in units}


def check_partition(model, units):
    """Check that every trainable parameter is in exactly one unit, once, and no frozen one in any."""
    placed = [p for unit in units for p in unit.params]
    assert len({id(p) for p in placed}) == len(placed)
    assert {id(p) for p in placed} == {id(p) for p in model.parameters() if p.requires_grad}
    names = dict(model.named_parameters(remove_duplicate=False))
    for unit in units:
        assert unit.params
        assert unit.numel == sum(p.numel() for p in unit.params)
        assert all(names[name] is p for name, p in zip(unit.names, unit.params, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_travels_block_by_block(tied):
    model = llama(tied=tied)
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["rest", *(f"model.layers.{i}" for i in range(3))]
    rest = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    assert set(units[0].names) == rest
    for unit in units[1:]:
        assert unit.modules == [model.get_submodule(unit.name)]
        assert {id(p) for p in unit.params} == {id(p) for p in unit.modules[0].parameters()}


def test_a_gpt2_travels_block_by_block():
    model = gpt2()
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["rest", *(f"transformer.h.{i}" for i in range(3))]
    assert "transformer.wte.weight" in units[0].names
    assert "lm_head.weight" not in units[0].names, "tied: the same parameter as wte"


def test_a_plain_mlp_travels_child_by_child():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    units = find_units(model)
    check_partition(model, units)
    assert by_name(units) == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


class Listed(nn.Module):
    """Model with blocks in a list, as most handwritten transformers have them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x * self.gain


def test_the_members_of_a_list_are_the_blocks():
    units = find_units(Listed())
    assert [unit.name for unit in units] == ["rest", "blocks.0", "blocks.1", "blocks.2"]
    assert units[0].names == ["gain", "embed.weight", "embed.bias"]


def test_a_parameter_shared_by_two_blocks_travels_with_the_first():
    model = mlp()
    model[2][0].weight = model[1][0].weight
    units = find_units(model)
    check_partition(model, units)
    assert by_name(units) == {
        "0": ["0.0.weight", "0.0.bias"],
        "1": ["1.0.weight", "1.0.bias"],
        "2": ["2.0.bias"],
    }


def test_a_parameter_shared_with_the_root_travels_with_the_rest():
    model = Listed()
    model.blocks[1].weight = model.blocks[0].weight
    model.head = model.blocks[2].weight
    units = find_units(model)
    check_partition(model, units)
    rest = next(unit for unit in units if unit.name == "rest")
    assert any(p is model.head for p in rest.params)
    assert by_name(units)["blocks.2"] == ["blocks.2.bias"]


def test_frozen_parameters_stay_at_home():
    model = Listed()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].bias.requires_grad_(False)
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["rest", "blocks.1", "blocks.2"]
    assert by_name(units)["blocks.1"] == ["blocks.1.weight"]


def test_a_frozen_root_leaves_no_rest():
    model = Listed()
    model.embed.requires_grad_(False)
    model.gain.requires_grad_(False)
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_root_that_only_contains_needs_no_rest():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    units = find_units(model)
    check_partition(model, units)
    assert [unit.name for unit in units] == ["a", "b"]


def test_a_model_that_is_frozen_as_a_whole_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        find_units(mlp().requires_grad_(False))


def test_names_with_a_star_choose_modules():
    model = llama(tied=False)
    units = find_units(model, ["model.layers.*.mlp", "model.embed_tokens"])
    check_partition(model, units)
    assert [unit.name for unit in units] == [
        "rest",
        "model.embed_tokens",
        *(f"model.layers.{i}.mlp" for i in range(3)),
    ]


def test_a_module_inside_a_chosen_one_is_no_unit_of_its_own():
    units = find_units(llama(tied=False), ["model.layers.*", "model.layers.1.mlp"])
    assert [unit.name for unit in units] == ["rest", *(f"model.layers.{i}" for i in range(3))]


def test_a_name_that_starts_like_another_is_not_inside_it():
    model = nn.Module()
    model.block, model.block2 = nn.Linear(2, 2), nn.Linear(2, 2)
    assert by_name(find_units(model, ["block"])) == {
        "rest": ["block2.weight", "block2.bias"],
        "block": ["block.weight", "block.bias"],
    }


def test_a_rest_lands_before_any_part_of_a_container_that_uses_it():
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "head": nn.Linear(2, 2), "block": nn.Linear(2, 2)})
    rest = find_units(model, ["block"])[0]
    assert rest.name == "rest"
    assert rest.modules == [model, model["embed"], model["head"]]


def test_a_name_that_matches_nothing_is_refused_with_examples():
    with pytest.raises(ValueError, match=r"edit\.units: no module is called 'layer\.\*'.*like 0, 0\.0, 0\.1"):
        find_units(mlp(), ["0", "layer.*"])


def test_a_container_cannot_be_a_unit():
    with pytest.raises(ValueError, match=r"blocks is a container without a forward"):
        find_units(Listed(), ["blocks"])


@pytest.mark.parametrize("make", [mlp, Listed, gpt2])
def test_the_whole_model_as_one_unit(make):
    model = make()
    units = find_units(model, "model")
    check_partition(model, units)
    assert [(unit.name, unit.modules[0]) for unit in units] == [("model", model)]


# -- as vectors


def test_a_unit_is_a_vector_in_registration_order_and_back():
    model = nn.Linear(3, 2)
    unit = find_units(model, "model")[0]
    flat = unit.flat()
    assert torch.equal(flat, torch.cat([model.weight.detach().reshape(-1), model.bias.detach()]))
    flat += 1
    assert not torch.equal(unit.flat(), flat), "a copy"
    unit.adopt(flat)
    assert torch.equal(unit.flat(), flat)


def test_a_unit_follows_its_anchor_and_keeps_what_it_has_learned_meanwhile():
    model = nn.Linear(3, 1, bias=False)
    unit = find_units(model, "model")[0]
    unit.adopt(torch.tensor([1.0, 0.1, 1e8]))
    unit.sent = unit.flat()
    with torch.no_grad():
        model.weight[0, 0] += 4
    unit.follow(torch.tensor([3.0, 0.7, 1.0]))
    assert torch.equal(unit.flat(), torch.tensor([7.0, 0.7, 1.0])), (
        "the anchor's bits where nothing was learned"
    )


def test_a_unit_without_some_gradients_has_zeros_there_and_keeps_them_missing():
    model = nn.Linear(2, 1)
    unit = find_units(model, "model")[0]
    model.weight.grad = torch.tensor([[1.0, 2.0]])
    assert unit.gradient().tolist() == [1, 2, 0]
    unit.set_gradient(torch.tensor([3.0, 4.0, 5.0]))
    assert model.weight.grad.tolist() == [[3, 4]]
    assert model.bias.grad is None


def test_a_missing_gradient_is_zero_even_where_the_parameter_is_not_finite():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    assert find_units(model, "model")[0].gradient().tolist() == [0, 0, 0]


def test_what_a_half_precision_unit_can_hold_is_told():
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    unit = find_units(model, "model")[0]
    fine = torch.tensor([1.001, -3.0])
    assert unit.representable(fine).tolist() == [1.0, -3.0]
    unit.adopt(fine)
    assert torch.equal(unit.flat(), unit.representable(fine))


# -- any module


class Branch(nn.Module):
    """Module that runs its children in order and may own a parameter that it uses first."""

    def __init__(self, children, owns, listed):
        super().__init__()
        self.own = nn.Parameter(torch.ones(1)) if owns else None
        self.inner = nn.ModuleList(children) if listed else nn.Sequential(*children)

    def forward(self, x):
        if isinstance(self.inner, nn.Sequential):
            x = self.inner(x)
        else:
            for child in self.inner:
                x = child(x)
        return x if self.own is None else x * self.own


class Leaf(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=not frozen)

    def forward(self, x):
        return x * self.weight


def branches(children):
    return st.builds(Branch, st.lists(children, min_size=1, max_size=4), st.booleans(), st.booleans())


TREES = branches(st.recursive(st.builds(Leaf, st.booleans()), branches, max_leaves=12))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_whatever_the_model_every_parameter_lands_once_and_before_its_use(data):
    model = data.draw(TREES, "model")
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    for _ in range(data.draw(st.integers(0, 3), "ties")):
        one, other = data.draw(st.sampled_from(leaves)), data.draw(st.sampled_from(leaves))
        one.weight = other.weight
    runners = [n for n, m in model.named_modules() if n and not isinstance(m, nn.ModuleList)]
    some = st.lists(st.sampled_from(runners), min_size=1, max_size=3)
    spec = data.draw(st.one_of(st.sampled_from(["auto", "model"]), some), "spec")
    if not any(p.requires_grad for p in model.parameters()):
        return
    units = find_units(model, spec)
    check_partition(model, units)
    check_landing_order(model, units)


class Note:
    """Hook that returns nothing, whatever `act` returns."""

    def __init__(self, act):
        self.act = act

    def __call__(self, *_):
        self.act()


def check_landing_order(model, units):
    """Run the model and check that nothing uses a parameter before its unit's module has begun."""
    landed, early = set(), []
    for unit in units:
        land = Note(lambda unit=unit: landed.update(map(id, unit.params)))
        for module in unit.modules:
            module.register_forward_pre_hook(land, prepend=True)
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        look = lambda name=name, own=own: early.extend(name for p in own if id(p) not in landed)  # noqa: E731
        module.register_forward_pre_hook(Note(look))
    model(torch.ones(1))
    assert not early
    assert landed == {id(p) for unit in units for p in unit.params}
