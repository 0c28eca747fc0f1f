"""Tests that a model is refused by the fast path if its own forward pass computes something else.

The oracle is `transformers.generate`: a model is refused, or its tokens are those of `generate`.
"""

import copy
from types import MethodType

import pytest
import torch
from kit.rollouts import SIZES, VOCABULARY, tiny_policy
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aedit import EditConfig, LayerSync, MeanExchange
from aedit.edit.hooks import Hook
from aedit.proto.transports import MemoryWorld
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.model.families import unsupported_reason
from aedit.spec_rollout.sampling import Prompt, Sampling

PROMPT = (3, 1, 4, 1, 5)


def small():
    """Return a float32 model, in which nothing of the tests has been changed."""
    return tiny_policy(seed=2, dtype=torch.float32)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Linear):
    def forward(self, x):
        return 0.2 * super().forward(x)


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids.roll(1, -1))


class Noisy(nn.Module):
    def forward(self, x):
        return x + x.roll(1, -1)


def head_bias(model):
    model.lm_head.bias = nn.Parameter(3 * torch.randn(VOCABULARY))


def head_of_another_class(model):
    model.lm_head = Scaled(32, VOCABULARY, bias=False)


def head_in_a_sequence(model):
    model.lm_head = nn.Sequential(Noisy(), model.lm_head)


def embedding_of_another_class(model):
    embedding = Shifted(VOCABULARY, 32)
    embedding.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = embedding


def embedding_with_a_largest_norm(model):
    model.model.embed_tokens.max_norm = 0.5


def forward_hook(model):
    model.model.layers[1].register_forward_hook(lambda module, args, output: output.roll(1, -1))


def forward_hook_on_the_head(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))


def forward_pre_hook(model):
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].roll(1, -1),))


def pruned_weight(model):
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)


def parametrization(model):
    parametrize.register_parametrization(model.model.layers[0].self_attn.v_proj, "weight", Noisy())


def parametrized_norm(model):
    norm = model.model.layers[1].input_layernorm
    nn.init.normal_(norm.weight)
    parametrize.register_parametrization(norm, "weight", Noisy())


def forward_of_an_instance(model):
    right = type(model.model.layers[0].mlp).forward
    model.model.layers[0].mlp.forward = MethodType(
        lambda self, x: right(self, x.roll(1, -1)), model.model.layers[0].mlp
    )


def adapter(model):
    model.model.layers[0].self_attn.q_proj = LoRA(model.model.layers[0].self_attn.q_proj)


def another_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def another_attention_scale(model):
    model.model.layers[0].self_attn.scaling = 3.0


def another_epsilon_in_one_norm(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 50.0


def configuration_changed_afterwards(model):
    model.config.rms_norm_eps = 50.0


def layer_taken_out(model):
    del model.model.layers[0]


def layer_added(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def bias_in_a_projection_of_some(model):
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.randn(32))


def registered_attention(model):
    def doubled(module, query, *rest, **more):
        return sdpa_attention_forward(module, 2 * query, *rest, **more)

    AttentionInterface.register("doubled", doubled)
    model.set_attn_implementation("doubled")


CHANGES = {
    head_bias: "lm_head has a parameter bias",
    head_of_another_class: "lm_head is a Scaled",
    head_in_a_sequence: "lm_head is a Sequential",
    embedding_of_another_class: "model.embed_tokens is a Shifted",
    embedding_with_a_largest_norm: "model.embed_tokens has max_norm 0.5",
    forward_hook: "model.layers.1 has a forward hook, .*forward_hook.*lambda.*: remove it",
    forward_hook_on_the_head: "lm_head has a forward hook",
    forward_pre_hook: "model.norm has a forward hook",
    pruned_weight: "up_proj has a forward hook, L1Unstructured",
    parametrization: "v_proj is a ParametrizedLinear",
    parametrized_norm: "input_layernorm is a ParametrizedLlamaRMSNorm",
    forward_of_an_instance: "layers.0.mlp has another forward",
    adapter: "q_proj is a LoRA",
    another_activation: "act_fn is a ReLU",
    another_attention_scale: "self_attn has scaling 3.0",
    another_epsilon_in_one_norm: "layers.1.input_layernorm has variance_epsilon 50.0",
    configuration_changed_afterwards: "variance_epsilon 1e-06: its configuration says 50.0",
    layer_taken_out: "model.layers has 1 members|layers.1 is missing",
    layer_added: "model.layers has 3 members",
    bias_in_a_projection_of_some: "layers.1.mlp.down_proj has a parameter bias",
    registered_attention: "attention implementation 'doubled'",
}


def tokens_of(model, generate):
    if generate:
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        return ids[0, len(PROMPT) :].tolist()
    engine = Engine.of(model, rows=1, max_tokens=40)
    asked = Prompt(tokens=PROMPT, sampling=Sampling(temperature=0.0, max_new_tokens=24))
    return next(engine.generate([asked])).tokens


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_the_fast_path_would_ignore_is_refused_in_one_line_that_names_the_module(change):
    model = small()
    change(model)
    with pytest.raises(ValueError, match=CHANGES[change]) as refusal:
        Target.of(model, rows=1, max_tokens=20)
    assert "\n" not in str(refusal.value)
    try:
        made = tokens_of(model, generate=False)
    except ValueError:
        return
    assert made == tokens_of(model, generate=True)


def test_most_of_these_changes_change_the_tokens_of_generate():
    plain, same = tokens_of(small(), generate=True), set()
    for change in CHANGES:
        model = small()
        change(model)
        if tokens_of(model, generate=True) == plain:
            same.add(change)
    assert same == {configuration_changed_afterwards, layer_added}


def test_a_forward_replaced_in_a_class_is_refused(monkeypatch):
    model = small()
    kind = type(model.model.layers[0].mlp)
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: right(self, x.roll(1, -1)))
    assert "mlp has another forward method" in unsupported_reason(model)


def test_a_subclass_of_the_same_name_is_refused():
    class Doubled(LlamaForCausalLM):
        def forward(self, *args, **more):
            made = super().forward(*args, **more)
            made.logits = made.logits.roll(1, -1)
            return made

    Doubled.__name__ = "LlamaForCausalLM"
    with pytest.raises(ValueError, match="is not a class of transformers"):
        Target.of(Doubled(LlamaConfig(**SIZES)), rows=1, max_tokens=20)


def test_a_hook_for_all_modules_is_refused_while_it_is_registered():
    model = small()
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        assert "hook for all modules" in unsupported_reason(model)
    finally:
        handle.remove()
    assert unsupported_reason(model) == ""


def value_head(model):
    model.value_head = nn.Sequential(nn.Linear(32, 1), nn.Tanh())


def training(model):
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


def recorded_hidden_states(model):
    model(torch.tensor([PROMPT]), output_hidden_states=True)


def hook_of_a_layer_sync(model):
    model.register_forward_pre_hook(Hook(lambda *_: None))


def compiled_in_place(model):
    model.model.layers[0].compile(backend="eager")


def no_dropout(model):
    model.config.attention_dropout = 0.5


def resized(model):
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)


@pytest.mark.parametrize(
    "change",
    [
        value_head, training, recorded_hidden_states, hook_of_a_layer_sync, compiled_in_place, no_dropout,
        resized,
    ],
)  # fmt: skip
def test_what_changes_no_output_is_accepted(change):
    model = small()
    change(model)
    assert unsupported_reason(model) == ""
    made = tokens_of(model, generate=False)
    assert made == tokens_of(model.eval(), generate=True)


def test_a_model_that_a_layer_sync_trains_is_accepted():
    model = small()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(MemoryWorld(1).node(0))
    with LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=8)):
        assert any(module._forward_pre_hooks for module in model.modules())
        assert unsupported_reason(model) == ""
        assert Target.of(model, rows=1, max_tokens=20).num_layers == 2


def test_the_check_draws_no_random_number_and_changes_no_weight():
    model = small()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    assert unsupported_reason(model) == ""
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
