"""Tests inner optimizers of every kind, against the same training in plain torch."""

import warnings
from copy import deepcopy

import pytest
import torch
from kit.deferred import PLAIN, alone, node
from kit.nodes import batches, furthest, in_threads, loss, parameters, plain_training, tower
from torch import nn

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, EverySteps, LayerSync, MeanExchange, PenaltyConfig, Shards
from aedit.edit.optimizers import InnerOptimizers
from aedit.proto.transports import MemoryWorld

EVERY, STEPS = 3, 8


# -- the state of a new optimizer

OPTIONS = {
    "ASGD": [{"t0": 2.0, "lambd": 0.1}],
    "Adadelta": [{}],
    "Adafactor": [{"lr": 0.1}],
    "Adagrad": [{"initial_accumulator_value": 0.5}],
    "Adam": [{"amsgrad": True}, {"foreach": False}, {"lr": torch.tensor(0.01)}],
    "AdamW": [{}],
    "Adamax": [{}],
    "LBFGS": [{"lr": 0.1}],
    "Muon": [{}],
    "NAdam": [{"momentum_decay": 0.5}],
    "RAdam": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{"lr": 0.03}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}],
    "SparseAdam": [{}],
}


def torch_classes():
    kinds = (value for value in vars(torch.optim).values() if isinstance(value, type))
    return {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}


def test_every_class_of_torch_optim_is_tried():
    assert torch_classes() == set(OPTIONS)


def steps_along(inner, p, gradients):
    """Step along gradients that do not depend on the parameter; return the parameter after each step."""
    passed = []
    for gradient in gradients:

        def closure(gradient=gradient):
            p.grad = gradient.to_sparse(1) if isinstance(inner, torch.optim.SparseAdam) else gradient.clone()
            return (p * gradient).sum()

        if isinstance(inner, torch.optim.LBFGS):
            inner.step(closure)
        else:
            closure()
            inner.step()
        passed.append(p.detach().clone())
    return passed


def subclassed(kind):
    return type(kind.__name__, (kind,), {"__module__": "somewhere"})


@pytest.mark.parametrize("own", [False, True], ids=["torch", "subclass"])
@pytest.mark.parametrize(("kind", "options"), [(k, o) for k, many in OPTIONS.items() for o in many])
def test_a_reset_optimizer_goes_on_as_a_new_one(kind, options, own):
    kind = getattr(torch.optim, kind)
    kind = subclassed(kind) if own and kind not in (torch.optim.LBFGS, torch.optim.SparseAdam) else kind
    random = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 4, 6, 3, generator=random)
    model = nn.Linear(3, 6, bias=False)
    inner = kind(model.parameters(), **options)
    steps_along(inner, model.weight, before)
    kept = set(inner.state[model.weight])
    InnerOptimizers(inner, model, Shards()).renew([model.weight])
    fresh = deepcopy(model)
    other = kind(fresh.parameters(), **options)
    for ours, theirs in zip(
        steps_along(inner, model.weight, after), steps_along(other, fresh.weight, after), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert set(inner.state[model.weight]) == kept


def test_after_a_reset_a_checkpoint_still_finds_all_state():
    for name in torch_classes() - {"LBFGS"}:
        model = nn.Linear(3, 6, bias=False)
        inner = getattr(torch.optim, name)(model.parameters(), **OPTIONS[name][0])
        steps_along(inner, model.weight, torch.ones(1, 6, 3))
        kept = {key: type(value) for key, value in inner.state[model.weight].items()}
        InnerOptimizers(inner, model, Shards()).renew([model.weight])
        assert {key: type(value) for key, value in inner.state[model.weight].items()} == kept, name


@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "Rprop", "AdamW"])
def test_a_distrusted_node_goes_on_from_the_anchor_with_a_new_optimizer(name):
    kind, data = getattr(torch.optim, name), batches(0, 8)
    model, anchor = tower(), parameters(tower())
    inner = kind(model.parameters(), lr=0.01)
    exchange = MeanExchange(MemoryWorld(1).node(0), outer=Average(), penalty=PenaltyConfig(clip=None))
    with LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=4)) as sync:
        for step, batch in enumerate(data):
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            if step == 3:
                for p in model.parameters():
                    p.data.fill_(torch.nan)
            sync.step()
        found = parameters(model)
    expected = tower()
    expected.load_state_dict(anchor)
    plain = kind(expected.parameters(), lr=0.01)
    for batch in data[4:]:
        loss(expected, batch).backward()
        plain.step()
        plain.zero_grad()
    assert furthest(found, parameters(expected)) == 0


# -- optimizers that keep weights


class MasterSgd(torch.optim.Optimizer):
    """SGD whose bf16 parameters are written from fp32 copies that only the optimizer holds."""

    def __init__(self, params, lr, key="master"):
        super().__init__(params, {"lr": lr, "key": key})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state[group["key"]] = p.detach().float().clone()
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["momentum"].mul_(0.5).add_(p.grad.float())
                state[group["key"]].sub_(group["lr"] * state["momentum"])
                p.copy_(state[group["key"]])


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv:2405.15682): p is y while training, x = average of z while evaluating."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                x = (p - (1 - group["beta"]) * z) / group["beta"]
                z.sub_(group["lr"] * p.grad)
                x.lerp_(z, 1 / group["k"])
                p.copy_(torch.lerp(z, x, group["beta"]))

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] else ():
                p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for p in () if group["train_mode"] else group["params"]:
                p.lerp_(self.state[p]["z"], 1 - group["beta"])
            group["train_mode"] = True


def trained_together(model, make_inner, data, *, config=None, act=lambda model, inner: None, **options):
    """Return models and optimizers of nodes that train together; `act` runs before they leave."""
    config = config or EditConfig(every=EVERY)

    def job(transport, n):
        own = deepcopy(model)
        inner = make_inner(own)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        steps = inner if isinstance(inner, list) else [inner]
        with LayerSync.of(own, inner, exchange=exchange, config=config, **options) as sync:
            for batch in data[n]:
                loss(own, batch.to(own.scale.dtype)).backward()
                for each in steps:
                    each.step()
                    each.zero_grad()
                sync.step()
            sync.finish()
            act(own, inner)
        return own, inner

    return in_threads(len(data), job)


def nodes_by_hand(model, make_inner, data, weights_of, *, act=lambda model, inner: None):
    """Train in plain loops that move `weights_of(inner, p)` to their mean every EVERY steps: the oracle."""
    nodes = [(own, make_inner(own)) for own in (deepcopy(model) for _ in data)]
    for start in range(0, STEPS, EVERY):
        for (own, inner), mine in zip(nodes, data, strict=True):
            for batch in mine[start : start + EVERY]:
                loss(own, batch.to(own.scale.dtype)).backward()
                for each in inner if isinstance(inner, list) else [inner]:
                    each.step()
                    each.zero_grad()
        if start + EVERY > STEPS:
            for own, inner in nodes:
                act(own, inner)
        meet(nodes, weights_of)
    return nodes


@torch.no_grad()
def meet(nodes, weights_of):
    for same in zip(*(own.parameters() for own, _ in nodes), strict=True):
        kept = [weights_of(inner, p) for (_, inner), p in zip(nodes, same, strict=True)]
        mean = torch.stack([exact.double() for exact, _ in kept]).mean(0)
        for (exact, others), p in zip(kept, same, strict=True):
            for other in others:
                other.add_((mean - exact).to(other))
            exact.copy_(mean)
            p.copy_(mean)


DATA = [batches(n, STEPS) for n in range(2)]


def master(inner, p):
    return inner.state[p]["master"], []


def master_sgd(model):
    return MasterSgd(model.parameters(), lr=0.002)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_fp32_copies_of_bf16_parameters_are_what_travels(landing):
    model = tower().bfloat16()
    found = trained_together(model, master_sgd, DATA, config=EditConfig(every=EVERY, landing=landing))
    if landing == "forward":
        expected = nodes_by_hand(model, master_sgd, DATA, master)
        for own, inner in found:
            for p, q in zip(own.parameters(), expected[0][0].parameters(), strict=True):
                assert (inner.state[p]["master"] - expected[0][1].state[q]["master"]).abs().max() < 1e-6
    for p, q in zip(found[0][0].parameters(), found[1][0].parameters(), strict=True):
        assert torch.equal(p, q)
        one, other = found[0][1].state[p]["master"], found[1][1].state[q]["master"]
        assert torch.equal(one, other)
        assert torch.equal(one.bfloat16(), p)
        assert not torch.equal(one.bfloat16().float(), one), "there is something that bf16 does not hold"


@pytest.mark.parametrize("warmup_steps", [0, "all"])
def test_weights_of_an_optimizer_that_has_stepped_before_start_from_the_common_model(warmup_steps):
    models = [tower(seed).bfloat16() for seed in range(2)]

    def job(transport, n):
        inner = master_sgd(models[n])
        one_step(models[n], inner, DATA[n][0])
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        config = EditConfig(every=1, warmup_steps=warmup_steps)
        with LayerSync.of(models[n], inner, exchange=exchange, config=config) as sync:
            first = [p.detach().clone() for p in models[n].parameters()]
            one_step(models[n], inner, DATA[n][1])
            sync.step()
        return first, [inner.state[p]["master"].clone() for p in models[n].parameters()]

    (first, masters), (other_first, other_masters) = in_threads(2, job)
    for ours, theirs in zip([*first, *masters], [*other_first, *other_masters], strict=True):
        if warmup_steps == 0 or ours.dtype == torch.bfloat16:
            assert torch.equal(ours, theirs)
        else:  # their momentum differs, from their first steps
            assert (ours - theirs).abs().max() < 0.05


def one_step(model, inner, batch):
    loss(model, batch.to(model.scale.dtype)).backward()
    inner.step()
    inner.zero_grad()


def schedule_free(model):
    return ScheduleFree(model.parameters(), lr=0.1)


def test_the_fast_weights_of_a_schedule_free_optimizer_move_with_the_parameters():
    def z(inner, p):
        return p, [inner.state[p]["z"]]

    expected = nodes_by_hand(tower(), schedule_free, DATA, z)
    for (own, inner), (plain, other) in zip(
        trained_together(tower(), schedule_free, DATA), expected, strict=True
    ):
        assert furthest(parameters(own), parameters(plain)) < 1e-5
        for p, q in zip(own.parameters(), plain.parameters(), strict=True):
            assert (inner.state[p]["z"] - other.state[q]["z"]).abs().max() < 1e-5


def test_in_evaluation_mode_at_the_end_nodes_meet_at_the_average_of_a_schedule_free_optimizer():
    def act(model, inner):
        inner.eval()

    def z(inner, p):
        return p, [inner.state[p]["z"]]

    expected = nodes_by_hand(tower(), schedule_free, DATA, z, act=act)
    found = trained_together(tower(), schedule_free, DATA, act=act)
    assert furthest(parameters(found[0][0]), parameters(found[1][0])) == 0
    assert furthest(parameters(found[0][0]), parameters(expected[0][0])) < 1e-5


def test_a_round_must_not_land_on_parameters_that_mean_something_else():
    model = tower()
    inner = schedule_free(model)
    exchange = MeanExchange(alone(), outer=Average(), penalty=PLAIN)
    sync = LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=1))
    sync.__enter__()
    loss(model, batches(0, 1)[0]).backward()
    inner.step()
    sync.step()
    inner.eval()
    model(batches(0, 1)[0])
    assert sync.in_flight, "nothing lands in a pass on other values"
    with pytest.raises(ValueError, match=r"sync.finish\(\) before either"):
        sync.finish()


class Lookahead(torch.optim.Optimizer):
    """Lookahead (arXiv:1907.08610).

    Slow weights of another optimizer's fast ones, without hooks of its own.
    """

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.calls = optimizer, k, alpha, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state.setdefault(p, {"slow": p.detach().clone()})
        self.optimizer.step()
        self.calls += 1
        for p, state in self.state.items() if self.calls % self.k == 0 else ():
            state["slow"].lerp_(p, self.alpha)
            p.copy_(state["slow"])

    def zero_grad(self):
        self.optimizer.zero_grad()


def lookahead(model):
    return Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))


def test_slow_weights_around_another_optimizer_move_with_the_parameters():
    def slow(inner, p):
        return p, [inner.state[p]["slow"]]

    expected = nodes_by_hand(tower(), lookahead, DATA, slow)
    for (own, _), (plain, _) in zip(trained_together(tower(), lookahead, DATA), expected, strict=True):
        assert furthest(parameters(own), parameters(plain)) < 1e-5


def test_the_average_of_asgd_moves_with_the_parameters():
    def make(model):
        return torch.optim.ASGD(model.parameters(), lr=0.1, t0=1)

    def ax(inner, p):
        return p, [inner.state[p]["ax"]]

    expected = nodes_by_hand(tower(), make, DATA, ax)
    for (own, inner), (plain, other) in zip(trained_together(tower(), make, DATA), expected, strict=True):
        for p, q in zip(own.parameters(), plain.parameters(), strict=True):
            assert (inner.state[p]["ax"] - other.state[q]["ax"]).abs().max() < 1e-5


class Keeping(torch.optim.SGD):
    """SGD that keeps a tensor like each parameter, at a distance from it."""

    def __init__(self, params, distance):
        super().__init__(params, lr=0.01)
        self.distance = distance

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["thing"] = p * (1 + self.distance)


def keep(distance, **options):
    model = tower()
    inner = Keeping(model.parameters(), distance)
    exchange = MeanExchange(alone(), outer=Average(), penalty=PLAIN)
    sync = LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=100), **options)
    with sync:
        loss(model, batches(0, 1)[0]).backward()
        inner.step()
        sync.step()
    return sync.optimizers, model.scale


def test_state_that_may_be_a_weight_or_not_must_be_named():
    with pytest.raises(ValueError, match=r"'thing' of Keeping is 0\.70 .*weight_states=\('thing',\)"):
        keep(0.7)
    for weight_states, moved in ((("thing",), 1.0), ((), 0.0)):
        optimizers, p = keep(0.7, weight_states=weight_states)
        before = next(iter(optimizers.outermost[0].state[p].values())).clone()
        optimizers.shift(p, p.detach() + 1)
        assert torch.allclose(optimizers.outermost[0].state[p]["thing"] - before, torch.tensor(moved))


class Counting(torch.optim.Optimizer):
    """Heavy-ball momentum with a count and a factor per parameter that can equal a one-element parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["count"] = state.get("count", torch.zeros(1)) + 1
            state["factor"] = torch.ones(1)
            state["velocity"] = state.get("velocity", 0) * 0.9 + p.grad
            p.sub_(0.01 * state["velocity"])


def test_moments_are_no_weights_although_their_gradient_is_like_the_parameter():
    model = nn.ParameterDict({"factor": torch.tensor([1.0]), "matrix": torch.ones(3, 4)})
    inner = Counting(model.values(), {})
    with LayerSync.of(model, inner, exchange=MeanExchange(alone()), config=EditConfig(every=99)) as sync:
        for _ in range(3):
            sum(p.square().sum() / 2 for p in model.values()).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
        before = {key: state.clone() for key, state in inner.state[model["factor"]].items()}
        sync.optimizers.shift(model["factor"], model["factor"].detach() + 1)
        for key, state in inner.state[model["factor"]].items():
            assert torch.equal(state, before[key]), key


class InBytes(torch.optim.Optimizer):
    """Optimizer with moments in eight bits and a scale for each tensor, as 8-bit optimizers have."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["state1"] = torch.full_like(p, 128, dtype=torch.uint8)
                state["absmax1"] = torch.zeros(1)
            moment = (state["state1"].float() / 127 - 128 / 127) * state["absmax1"] * 0.9 + p.grad
            state["absmax1"] = moment.abs().max().reshape(1)
            state["state1"] = (moment / state["absmax1"] * 127 + 128).round().to(torch.uint8)
            p.sub_(0.02 * moment)


def in_bytes(model):
    return InBytes(model.parameters(), {})


def test_an_optimizer_with_moments_in_eight_bits_trains_as_alone():
    expected = nodes_by_hand(tower(), in_bytes, DATA, lambda inner, p: (p, []))
    for own, _ in trained_together(tower(), in_bytes, DATA):
        assert furthest(parameters(own), parameters(expected[0][0])) < 1e-2


def test_a_weight_state_that_no_optimizer_keeps_is_an_error():
    with pytest.raises(ValueError, match="names 'z', but the optimizers keep thing"):
        keep(0.1, weight_states=("z",))


# -- several optimizers


def pair(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def test_two_optimizers_share_a_model():
    expected = nodes_by_hand(tower(), pair, DATA, lambda inner, p: (p, []))
    for own, _ in trained_together(tower(), pair, DATA):
        assert furthest(parameters(own), parameters(expected[0][0])) < 1e-5


def test_in_the_warm_up_both_optimizers_step_along_the_mean_gradient():
    found = trained_together(tower(), pair, DATA, config=EditConfig(warmup_steps="all"))
    model = tower()
    inner = pair(model)
    for halves in zip(*DATA, strict=True):
        loss(model, torch.cat(halves)).backward()
        for each in inner:
            each.step()
            each.zero_grad()
    for own, _ in found:
        assert furthest(parameters(own), parameters(model)) < 1e-5


def test_a_distrusted_unit_loses_the_state_of_both():
    model = tower()
    inner = pair(model)
    sync = LayerSync.of(model, inner, exchange=MeanExchange(alone()))
    loss(model, batches(0, 1)[0]).backward()
    for each in inner:
        each.step()
    sync.optimizers.renew(sync.units[1].params)  # `first`
    assert inner[0].state[model.first.weight]["momentum_buffer"].abs().max() == 0
    assert inner[1].state[model.first.bias]["exp_avg"].abs().max() == 0
    assert inner[1].state[model.last.bias]["exp_avg"].abs().max() > 0
    with pytest.raises(ValueError, match="there are 2 inner optimizers"):
        _ = sync.inner


def test_lbfgs_starts_over_where_a_unit_has_landed():
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    start_of = tower()

    def job(transport, n):
        own = deepcopy(start_of)
        inner = make(own)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        with LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=2)) as sync:
            for batch in DATA[n]:
                inner.step(lambda batch=batch: passed(own, inner, batch))
                sync.step()
        return parameters(own)

    nodes = [(own, make(own)) for own in (deepcopy(start_of), deepcopy(start_of))]
    for start in range(0, STEPS, 2):
        for n, (own, inner) in enumerate(nodes):
            for batch in DATA[n][start : start + 2]:
                inner.step(lambda own=own, inner=inner, batch=batch: passed(own, inner, batch))
        meet(nodes, lambda inner, p: (p, []))
        nodes = [(own, make(own)) for own, _ in nodes]
    for found in in_threads(2, job):
        assert furthest(found, parameters(nodes[0][0])) < 1e-4


def passed(model, inner, batch):
    inner.zero_grad()
    value = loss(model, batch)
    value.backward()
    return value


# -- what cannot be trained right is refused by name


class Odd(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.inside = nn.Module()
        self.inside.odd = nn.Parameter(p)
        self.usual = nn.Linear(3, 1)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (torch.ones(3, dtype=torch.complex64), r"inside.odd is torch.complex64.*view_as_real"),
        (torch.ones(3, dtype=torch.float64), r"inside.odd is torch.float64.*model.float\(\)"),
        (torch.eye(3).to_sparse(), r"inside.odd is stored as torch.sparse_coo.*to_dense"),
    ],
    ids=["complex", "float64", "sparse"],
)
def test_parameters_that_anchors_cannot_hold_are_refused(p, message):
    model = Odd(p)
    inner = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=message):
        LayerSync.of(model, inner, exchange=MeanExchange(alone()))
    model.inside.odd.requires_grad_(False)
    inner = torch.optim.SGD(model.usual.parameters())
    LayerSync.of(model, inner, exchange=MeanExchange(alone()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(2), "parameter weight has no shape yet: run a batch"),
        (lambda: nn.Linear(3, 2, device="meta"), "parameter weight is on the meta device, without values"),
    ],
)
def test_parameters_without_values_are_refused(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        of(model, torch.optim.SGD(model.parameters()))


def test_the_default_device_meta_is_refused_at_each_entry():
    model = tower()
    sync, inner = node(model, alone())
    message = r"the default device of torch is meta.*call torch\.set_default_device\(None\)"
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        of(model, inner)
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        sync.__enter__()
    with sync, torch.device("meta"), pytest.raises(ValueError, match=message):
        sync.step()


@pytest.mark.parametrize(
    ("exchange", "got"), [(MeanExchange, "MeanExchange itself: call it"), (None, "NoneType")]
)
def test_what_is_no_exchange_is_named(exchange, got):
    model = tower()
    rule = rf"exchange must be an Exchange, such as MeanExchange\(TorchTransport\(\)\), got {got}"
    with pytest.raises(ValueError, match=rule):
        LayerSync.of(model, torch.optim.SGD(model.parameters()), exchange=exchange)


def of(model, inner):
    return LayerSync.of(model, inner, exchange=MeanExchange(alone()))


def test_optimizers_must_cover_the_model_and_nothing_else():
    model = tower()
    with pytest.raises(ValueError, match=r"first.weight \(and 5 more\) .*in no optimizer.*as a list"):
        of(model, torch.optim.SGD([model.scale]))
    with pytest.raises(ValueError, match=r"2 parameters that are not in the model.*\(7, 5\).*fully_shard"):
        of(model, torch.optim.SGD([*model.parameters(), *tower().first.parameters()]))
    with pytest.raises(ValueError, match="empty list"):
        of(model, [])


class NoHooks(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups, self.state = [{"params": list(params)}], {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1), "StepLR"),
        (lambda model: list(model.parameters()), "Parameter: LayerSync.of takes a torch.optim.Optimizer"),
        (lambda model: NoHooks(model.parameters()), "NoHooks has no step hooks.*Optimizer.__init__"),
    ],
)
def test_what_is_no_optimizer_is_named(make, message):
    model = tower()
    with pytest.raises(ValueError, match=message):
        of(model, make(model))


def test_wrappers_of_accelerate_are_taken_off():
    from accelerate import Accelerator

    def job(model, prepare):
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, outer = prepare(model, inner)
        exchange = MeanExchange(alone(), outer=Average(), penalty=PLAIN)
        with LayerSync.of(model, outer, exchange=exchange, config=EditConfig(every=2)) as sync:
            for batch in batches(0, 5):
                loss(model, batch).backward()
                outer.step()
                outer.zero_grad()
                sync.step()
            assert sync.inner is inner
        return parameters(model)

    assert furthest(job(tower(), Accelerator(cpu=True).prepare), job(tower(), lambda *both: both)) == 0


def test_with_accelerate_micro_batches_are_not_steps():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tower()
    model, inner = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    exchange, rounds = MeanExchange(alone(), outer=Average(), penalty=PLAIN), []
    with LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=2)) as sync:
        sync.on_round = lambda outcome, waited_s: rounds.append(outcome.round.steps)
        for batch in batches(0, 10):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                inner.step()
                inner.zero_grad()
                sync.step()
        assert sync.steps == 5
    assert rounds == [2, 2, 1]
    accelerator.gradient_state._reset_state()  # one for the whole process


class Skipping(torch.optim.SGD):
    step_was_skipped = False


def test_a_step_that_a_wrapped_scaler_skipped_does_not_count():
    model = tower()
    inner = Skipping(model.parameters())
    with LayerSync.of(model, inner, exchange=MeanExchange(alone())) as sync:
        for inner.step_was_skipped, steps in ((False, 1), (True, 1), (False, 2)):
            sync.step()
            assert sync.steps == steps


def test_a_parameter_that_is_unfrozen_later_is_named_at_the_next_step():
    model = tower()
    model.middle.requires_grad_(False)
    sync, _ = node(model, alone())
    sync.__enter__()
    sync.step()
    model.middle.requires_grad_(True)
    with pytest.raises(ValueError, match=r"middle.weight \(and 1 more\) has become trainable since"):
        sync.step()


def test_a_parameter_that_is_added_later_is_named_at_the_next_step():
    model = tower()
    sync, inner = node(model, alone())
    sync.__enter__()
    model.extra = nn.Linear(3, 1, bias=False)
    inner.add_param_group({"params": model.extra.parameters()})
    with pytest.raises(ValueError, match=r"parameter extra.weight was added since"):
        sync.step()


# -- objects that are replaced inside the block


def new_head(model, inner):
    model.last = nn.Linear(3, 1)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assigned(model, inner):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def normed(model, inner):
    nn.utils.parametrizations.weight_norm(model.last)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def old_weight_norm(model, inner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.last)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def tied(model, inner):
    model.middle.bias = model.scale
    return inner


def removed(model, inner):
    model.last.bias = None
    return inner


def adapted(model, inner):
    model.last.adapter = nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([model.last.adapter], lr=0.1)


def other_optimizer(model, inner):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def other_parameters(model, inner):
    inner.param_groups[0]["params"] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    return inner


def fewer_parameters(model, inner):
    inner.param_groups[0]["params"].pop()
    return inner


CHANGES = [
    (
        new_head,
        r"parameter last.weight \(and 1 more\) was replaced or removed.*make a new exchange, schedule and",
    ),
    (assigned, r"parameter scale \(and 6 more\) was replaced or removed"),
    (normed, r"parameter last.weight was replaced or removed"),
    (old_weight_norm, r"parameter last.weight was replaced or removed"),
    (tied, r"parameter middle.bias was replaced or removed"),
    (removed, r"parameter last.bias was replaced or removed"),
    (adapted, r"parameter last.adapter was added since LayerSync.of"),
    (other_optimizer, r"an optimizer of class AdamW that LayerSync.of was not given has stepped"),
    (other_parameters, r"the optimizer has 7 parameters that are not in the model"),
    (fewer_parameters, r"parameter last.bias of the model is in no optimizer"),
]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_objects_replaced_inside_the_block_are_named_at_the_next_step_or_at_its_end(change, message, ends):
    model = tower()
    sync, inner = node(model, alone(), every=2)

    def enter():
        with sync:
            one_step(model, inner, batches(0, 1)[0])
            sync.step()
            other = change(model, inner)
            one_step(model, other, batches(1, 1)[0])
            if not ends:
                with pytest.raises(ValueError, match=message):
                    sync.step()

    with pytest.raises(ValueError, match=message):  # at the end of the block too, which would push the rest
        enter()


@pytest.mark.parametrize(
    ("cast", "now"),
    [
        (lambda model: model.double(), r"torch\.float64 of shape \(3,\) on cpu"),
        (lambda model: model.half(), r"torch\.float16 of shape \(3,\) on cpu"),
        (lambda model: setattr(model.scale, "data", torch.ones(1)), r"torch\.float32 of shape \(1,\) on cpu"),
    ],
    ids=["double", "half", "shape"],
)
def test_parameters_that_are_cast_in_the_block_are_named_wherever_something_would_land(cast, now):
    message = rf"parameter scale was torch\.float32 of shape \(3,\) on cpu at LayerSync.of and is {now} now"
    for act in (LayerSync.step, LayerSync.finish, LayerSync.land, lambda sync: sync.update_engine(None)):
        model = tower()
        sync, inner = node(model, alone(), every=1)

        def enter(sync=sync, inner=inner, act=act):
            with sync:
                one_step(sync.model, inner, batches(0, 1)[0])
                sync.step()
                cast(sync.model)
                with pytest.raises(ValueError, match=message):
                    act(sync)

        with pytest.raises(ValueError, match=message):  # and at the end
            enter()


def test_a_cast_that_is_undone_before_the_step_is_accepted():
    model, data = tower(), batches(0, 6)
    sync, inner = node(model, alone(), every=2)
    with sync:
        for batch in data:
            model.double()(batch.double())
            model.float()
            one_step(model, inner, batch)
            sync.step()
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert furthest(parameters(model), expected) <= 1e-6


def test_a_parameter_that_is_frozen_later_is_named_and_until_then_moves_in_one_landing_only():
    model = tower()
    sync, inner = node(model, alone(), every=2, outer=Nesterov(0.7, 0.9))
    seen = []

    def enter():
        with sync:
            for i, batch in enumerate(batches(0, 8)):
                if i == 4:
                    model.middle.requires_grad_(False)
                one_step(model, inner, batch)
                seen.append(model.middle.weight.detach().clone())
                sync.step()

    message = r"middle.weight \(and 1 more\) has been frozen since LayerSync.of.*outer optimizer would go on"
    with pytest.raises(ValueError, match=message):
        enter()
    assert len(seen) == 6
    assert not torch.equal(seen[3], seen[4]), "the round that holds its training lands"
    assert torch.equal(seen[4], seen[5])


@pytest.mark.parametrize("leaves", ["frozen", "trainable"])
def test_parameters_that_are_frozen_for_a_part_of_each_step_are_trained(leaves):
    model, data = tower(), batches(0, 6)
    sync, inner = node(model, alone(), every=2)
    with sync:
        for batch in data:
            model.middle.requires_grad_(True)
            one_step(model, inner, batch)
            model.middle.requires_grad_(False)
            model(batch)
            model.middle.requires_grad_(leaves == "trainable")
            sync.step()
    model.requires_grad_(True)
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert furthest(parameters(model), expected) <= 1e-6


class Hidden(torch.optim.Optimizer):
    """Optimizer that keeps the one that does its work in an attribute of its own choice."""

    def __init__(self, optimizer):
        self.worker = optimizer
        super().__init__(optimizer.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        self.worker.step()


def test_weights_of_an_optimizer_that_another_one_keeps_inside_itself_move_with_the_parameters():
    make = lambda model: Hidden(master_sgd(model))  # noqa: E731
    expected = nodes_by_hand(
        tower().bfloat16(), make, DATA, lambda inner, p: (inner.worker.state[p]["master"], [])
    )
    for own, inner in trained_together(tower().bfloat16(), make, DATA):
        for p, q in zip(own.parameters(), expected[0][0].parameters(), strict=True):
            ours, theirs = inner.worker.state[p]["master"], expected[0][1].worker.state[q]["master"]
            assert (ours - theirs).abs().max() < 1e-6


def same_model(model, inner):
    model.first = torch.compile(model.first, backend="eager")
    deepcopy(model), deepcopy(inner)
    inner.load_state_dict(inner.state_dict())
    inner.add_param_group({"params": [nn.Parameter(torch.ones(1), requires_grad=False)]})
    swa = torch.optim.swa_utils.AveragedModel(model)
    swa.update_parameters(model)


def test_what_leaves_the_parameters_the_same_objects_is_accepted():
    model, data = tower(), batches(0, 6)
    sync, inner = node(model, alone(), every=2)
    other = torch.optim.AdamW(tower().parameters())
    with sync:
        for i, batch in enumerate(data):
            if i == 3:
                same_model(model, inner)
            one_step(model, inner, batch)
            other.step()
            sync.step()
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert furthest({n.replace("._orig_mod", ""): p for n, p in parameters(model).items()}, expected) <= 1e-6


def test_optimizers_of_others_are_watched_inside_the_block_only():
    model = tower()
    sync, inner = node(model, alone(), every=2)
    with sync:
        one_step(model, inner, batches(0, 1)[0])
        sync.step()
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, other, batches(1, 1)[0])
    again, _ = node(model, alone(), every=2)
    with again:
        again.step()


def test_a_step_outside_the_block_is_an_error():
    model = tower()
    sync, _ = node(model, alone())
    with pytest.raises(ValueError, match="wrap the training loop in `with sync:`"):
        sync.step()
    with sync:
        sync.step()
    with pytest.raises(ValueError, match="outside the block"):
        sync.step()


# -- sparse gradients


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


def bags():
    torch.manual_seed(3)
    return Bags()


def sparse_pair(model):
    return [
        torch.optim.SparseAdam(model.table.parameters(), lr=0.01),
        torch.optim.Adam(model.head.parameters(), lr=0.01),
    ]


def read(model, ids, inner):
    (model(ids) - ids.float().mean(1, keepdim=True) / 12).square().mean().backward()
    for each in inner:
        each.step()
        each.zero_grad()


IDS = [torch.randint(12, (6, 4, 2), generator=torch.Generator().manual_seed(n)) for n in range(2)]


def read_together(warmup_steps):
    start = bags()  # not in a thread: the seed is the process's

    def job(transport, n):
        model = deepcopy(start)
        inner = sparse_pair(model)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        config = EditConfig(warmup_steps=warmup_steps)
        with LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(3), config=config) as sync:
            for ids in IDS[n]:
                read(model, ids, inner)
                sync.step()
        return parameters(model)

    return in_threads(2, job)


def test_sparse_gradients_train_between_rounds():
    nodes = [(model, sparse_pair(model)) for model in (bags(), bags())]
    for start in (0, 3):
        for n, (model, inner) in enumerate(nodes):
            for ids in IDS[n][start : start + 3]:
                read(model, ids, inner)
        meet(nodes, lambda inner, p: (p, []))
    for found in read_together(0):
        assert furthest(found, parameters(nodes[0][0])) < 1e-6


def test_sparse_gradients_are_averaged_in_the_warm_up_and_stay_sparse():
    model = bags()
    inner = sparse_pair(model)
    for both in zip(*IDS, strict=True):
        read(model, torch.cat(both), inner)
    for found in read_together("all"):
        assert furthest(found, parameters(model)) < 1e-6
