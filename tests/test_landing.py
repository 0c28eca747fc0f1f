"""When units land, and that nothing is lost or counted twice on the way."""

import pydoc_data.topics
import random
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import Script, Tower, batches, furthest, in_threads, loss, parameters, plain_training, tower, train
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.async_sgd.outer import Average, Nesterov
from aedit.edit.config import EditConfig, PenaltyConfig
from aedit.edit.exchange import MeanExchange
from aedit.edit.sync import LayerSync
from aedit.proto.memory import MemoryWorld
from aedit.types import Round

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)
NAMES = ["rest", "first", "middle", "last"]


class Held:
    """A transport whose answers come when the test says so; asking for one too early is an error."""

    def __init__(self, transport):
        self.transport = transport
        self.open = True
        self.asked = []
        """Keys of the units sent so far."""

    def gather(self, key, row):
        return Answer(self, self.transport.gather(key, row))

    def weighted_mean(self, key, value, weight):
        self.asked.append(key.partition("/")[2])
        return Answer(self, self.transport.weighted_mean(key, value, weight))

    def __getattr__(self, name):
        return getattr(self.transport, name)


class Answer:
    def __init__(self, held, pending):
        self.held, self.pending = held, pending

    def done(self):
        return self.held.open and self.pending.done()

    def result(self):
        assert self.held.open, "this would have waited for another node"
        return self.pending.result()


class Late(Held):
    """Answers come after a random number of looks, or at once to whoever insists."""

    def __init__(self, transport, seed):
        super().__init__(transport)
        self.random = random.Random(seed)

    def gather(self, key, row):
        return Looked(self.transport.gather(key, row), self.random.randrange(6))

    def weighted_mean(self, key, value, weight):
        return Looked(self.transport.weighted_mean(key, value, weight), self.random.randrange(6))


class Looked:
    def __init__(self, pending, looks):
        self.pending, self.looks = pending, looks

    def done(self):
        self.looks -= 1
        return self.looks < 0 and self.pending.done()

    def result(self):
        return self.pending.result()


def node(model, transport, *, outer=None, penalty=PLAIN, schedule=None, lr=0.1, **config):
    """`model` as a node, and its inner optimizer."""
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    exchange = MeanExchange(transport, outer=outer or Average(), penalty=penalty)
    config = EditConfig(**{"every": 10_000, **config})
    return LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config), inner


def alone():
    """A transport of a node without others, whose answers can be held back."""
    return Held(MemoryWorld(1, timeout_s=5).node(0))


def step(sync, inner, batch):
    loss(sync.model, batch).backward()
    inner.step()
    inner.zero_grad()
    sync.step()


def move(model, rng):
    """An inner step by numbers that fp32 adds without rounding. Returns it, by name."""
    moved = {}
    for name, p in model.named_parameters():
        moved[name] = torch.randint(-512, 512, p.shape, generator=rng) / 1024
        with torch.no_grad():
            p.add_(moved[name])
    return moved


def round_numbers(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 256).round() / 256)
    return model


# -- arrival: nothing is lost, nothing counted twice


def keep_moving(model, transport, steps, left, seed, config):
    """Scripted inner steps; returns what they added and where the anchors are in the end."""
    sync, _ = node(model, transport, schedule=Script(steps), landing="arrival", **config)
    rng, x = torch.Generator().manual_seed(seed), torch.ones(1, 5)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with sync:
        for _ in range(sum(steps) + left):
            model(x)
            for name, moved in move(model, rng).items():
                total[name] += moved
            sync.step()
    return total, anchors(sync), parameters(model)


def anchors(sync):
    found = {}
    for i, unit in enumerate(sync.units):
        for (p, part), name in zip(unit.split(sync.exchange.store.read(i)[0]), unit.names, strict=True):
            found[name] = part.view_as(p).clone()
    return found


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("fragments", [1, 3])
def test_on_arrival_the_anchors_move_by_what_all_inner_steps_added(fragments, data):
    """Uneven nodes, late answers, steps left over at the end: the sum is exact, bit for bit."""
    nodes = data.draw(st.sampled_from([1, 2, 4]), "nodes")
    rounds = data.draw(st.integers(3, 7), "rounds")
    paces = st.lists(st.integers(1, 4), min_size=rounds, max_size=rounds)
    steps = [data.draw(paces, f"steps of {n}") for n in range(nodes)]
    left = data.draw(st.sampled_from([[0] * nodes, [1 + n % 3 for n in range(nodes)]]), "left")
    seed = data.draw(st.integers(0, 1000), "seed")
    model = round_numbers(tower())

    def job(transport, n):
        config = {"fragments": fragments, "every": 300}
        return keep_moving(deepcopy(model), transport, steps[n], left[n], 10 * seed + n, config)

    results = in_threads(nodes, job, wrap=lambda transport, n: Late(transport, 7 * seed + n))
    start = parameters(model)
    for _, anchor, ended in results:
        for name in start:
            added = sum(total[name] for total, _, _ in results) / nodes
            assert torch.equal(anchor[name] - start[name], added)
            assert torch.equal(ended[name], anchor[name])


def test_on_arrival_training_goes_on_while_answers_are_withheld():
    held, model, data = alone(), tower(), batches(0, 9)
    sync, inner = node(model, held, every=3, landing="arrival")
    with sync:
        for batch in data[:3]:
            step(sync, inner, batch)
        held.open = False
        for batch in data[3:5]:
            step(sync, inner, batch)
        assert sync.in_flight
        assert sync.waited_s == 0
        held.open = True
        for batch in data[5:]:
            step(sync, inner, batch)
        assert sync.round_id == 2
    # Alone and with plain averaging, the anchors are where the steps have gone.
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert furthest(parameters(model), expected) <= 1e-6


def test_on_arrival_an_answer_is_added_to_the_steps_made_meanwhile():
    held, model = alone(), round_numbers(tower())
    sync, _ = node(model, held, landing="arrival", outer=Average(0.5))
    rng, x, start = torch.Generator().manual_seed(0), torch.ones(1, 5), parameters(model)
    with sync:
        before = move(model, rng)
        sync.step()
        sync.begin(Round(1, 1))
        held.open = False
        meanwhile = move(model, rng)
        sync.step()
        model(x)
        held.open = True
        model(x)
        assert torch.equal(model.scale, start["scale"] + before["scale"] + meanwhile["scale"]), "not seen yet"
        sync.step()  # here the opening's answer is seen and the units are sent
        sync.step()  # here theirs
        model(x)
        for name, p in model.named_parameters():
            assert torch.equal(p, start[name] + before[name] / 2 + meanwhile[name])
        sync.schedule.last_id = 1


def test_a_node_that_ends_early_answers_on_and_weighs_nothing():
    start = round_numbers(tower())
    steps = [[1, 2], [1, 2, 1, 3, 1]]

    def job(transport, n):
        return keep_moving(deepcopy(start), transport, steps[n], 0, n, {})

    (short, anchor, _), (long, same, ended) = in_threads(2, job)
    rng = torch.Generator().manual_seed(1)
    shared = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    for _ in range(3):  # what the longer one added while both were there
        for name, moved in move(deepcopy(start), rng).items():
            shared[name] += moved
    for name, p in start.named_parameters():
        both, alone = short[name] + shared[name], long[name] - shared[name]
        assert torch.equal(anchor[name], p + both / 2 + alone)
        assert torch.equal(anchor[name], same[name])
        assert torch.equal(ended[name], same[name])


# -- forward


def test_the_last_round_takes_the_mean_without_momentum():
    """One node with a fast outer momentum: after the last, half interval its anchor is where it stands."""
    model, transport = tower(), alone()
    sync, inner = node(model, transport, outer=Nesterov(0.8, 0.85), every=4)
    with sync:
        for batch in batches(0, 6):
            step(sync, inner, batch)
        before = parameters(model)
    assert furthest(parameters(model), before) <= 1e-6
    assert furthest(anchors(sync), parameters(model)) == 0
    assert all(sync.exchange.store.read(i)[1].momentum.abs().max() > 0 for i in range(len(sync.units)))


def run_forward(prefetch, nodes=2):
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=0.01)
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=PenaltyConfig(clip=0.05))
        train(own, inner, exchange, batches(n, 20), EditConfig(every=4, prefetch=prefetch))
        return parameters(own)

    return in_threads(nodes, job)


def test_prefetch_changes_no_bit():
    plain = run_forward(0)
    assert furthest(plain[0], parameters(tower())) > 0.01
    for prefetch in (1, 2, 99):
        for ours, theirs in zip(run_forward(prefetch), plain, strict=True):
            assert furthest(ours, theirs) == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2, 99])
def test_as_many_units_as_asked_for_are_under_way_ahead_of_the_one_that_runs(prefetch):
    held, model, sent_at = alone(), tower(), {}
    sync, _ = node(model, held, prefetch=prefetch)
    with sync:
        for name in NAMES[1:]:

            def note(module, args, name=name):
                sent_at[name] = list(held.asked)

            model.get_submodule(name).register_forward_pre_hook(note)
        sync.begin(Round(1, 1))
        assert held.asked == [], "a unit is sent when its turn comes"
        model(torch.ones(1, 5))
        sync.schedule.last_id = 1
    assert sent_at == {name: NAMES[: i + 1 + prefetch] for i, name in enumerate(NAMES) if i}


def test_a_module_runs_on_its_new_anchor():
    model = tower()
    sync, _ = node(model, alone(), outer=Average(0.5))
    start = parameters(model)
    with sync:
        add_one(model)
        sync.begin(Round(1, 1))
        ran_on = []
        model.last.register_forward_pre_hook(lambda *_: ran_on.append(model.last.weight.detach().clone()))
        model(torch.ones(1, 5))
        torch.testing.assert_close(ran_on[0], start["last.weight"] + 0.5)
        sync.schedule.last_id = 1


def add_one(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)


class Checkpointed(Tower):
    """A Tower whose blocks run again in the backward pass."""

    reentrant = False

    def forward(self, x):
        for block in (self.first, self.middle):
            x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x * self.scale)


class Stored(Checkpointed):
    """The same, computed once."""

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh() * self.scale)


def train_twice_computed(kind, reentrant, landing):
    torch.manual_seed(0)
    model = kind()
    model.reentrant = reentrant
    outer = Counting(Nesterov())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(MemoryWorld(1).node(0), outer=outer, penalty=PLAIN)
    data = [batch.requires_grad_() for batch in batches(0, 12)]
    train(model, inner, exchange, data, EditConfig(every=3, landing=landing, prefetch=0))
    return parameters(model), [batch.grad for batch in data], outer.updates


class Counting:
    def __init__(self, outer):
        self.outer, self.updates = outer, 0

    def init(self, anchor):
        return self.outer.init(anchor)

    def update(self, *args, **kwargs):
        self.updates += 1
        return self.outer.update(*args, **kwargs)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient_and_lands_nothing_twice(reentrant, landing):
    ours, our_grads, our_updates = train_twice_computed(Checkpointed, reentrant, landing)
    theirs, their_grads, their_updates = train_twice_computed(Stored, reentrant, landing)
    assert furthest(ours, theirs) == 0
    assert all(torch.equal(a, b) for a, b in zip(our_grads, their_grads, strict=True))
    assert our_updates == their_updates == 4 * 4  # four rounds, four units; the leaving one only averages


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_answer_between_forward_and_recompute_waits_for_the_next_forward(reentrant, landing):
    torch.manual_seed(0)
    held, model = alone(), Checkpointed()
    model.reentrant = reentrant
    sync, _ = node(model, held, landing=landing, outer=Average(0.5))
    x = torch.ones(2, 5, requires_grad=True)
    with sync:
        add_one(model)
        sync.begin(Round(1, 1))
        if landing == "arrival":
            sync.step()  # sends the units
            held.open = False
        out = model(x).sum()
        ran_on = parameters(model)
        held.open = True
        out.backward()
        assert sync.in_flight == (landing == "arrival")
        assert furthest(parameters(model), ran_on) == 0
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        sync.schedule.last_id = 1
    stored = Stored()
    stored.load_state_dict(ran_on)
    stored(x).sum().backward()
    assert furthest(grads, {name: p.grad for name, p in stored.named_parameters()}) == 0


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_accumulated_gradients_are_those_of_the_joined_batch(landing):
    model, data = tower(), batches(0, 24)
    exchange = MeanExchange(MemoryWorld(1).node(0), outer=Average(), penalty=PLAIN)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = train(model, inner, exchange, data, EditConfig(every=2, landing=landing), accumulate=3)
    joined = [torch.cat(data[i : i + 3]) for i in range(0, 24, 3)]
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), joined)
    assert furthest(parameters(model), expected) <= 1e-6
    assert (sync.steps, sync.round_id) == (8, 5)


class Skipping(Tower):
    def forward(self, x):
        return self.last(self.first(x).tanh()[:, :3] * self.scale)


def test_a_unit_whose_module_does_not_run_lands_before_the_backward_pass():
    torch.manual_seed(0)
    model = Skipping()
    sync, _ = node(model, alone(), outer=Average(0.5), prefetch=0)
    start = parameters(model)
    with sync:
        add_one(model)
        sync.begin(Round(1, 1))
        out = model(torch.ones(2, 5)).sum()
        assert not sync.in_flight
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), start[name] + 0.5)
        out.backward()
        sync.schedule.last_id = 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_lands_what_is_under_way_and_training_goes_on(mode):
    model, data = tower(), batches(0, 4)
    sync, inner = node(model, alone(), every=2, outer=Nesterov())
    other = tower()
    plain_sync, plain_inner = node(other, alone(), every=2, outer=Nesterov())
    with sync, plain_sync:
        for batch in data:
            step(sync, inner, batch)
            model.eval()
            with mode():
                model(batch)
            assert not sync.in_flight
            model.train()
            step(plain_sync, plain_inner, batch)
    assert furthest(parameters(model), parameters(other)) == 0


def hooks_of(model, inner):
    on_modules = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return on_modules, len(inner._optimizer_step_pre_hooks)


@pytest.mark.parametrize("error", [None, KeyError])
def test_the_hooks_are_gone_afterwards(error):
    model = tower()
    sync, inner = node(model, alone(), every=2)
    before = hooks_of(model, inner)

    def enter():
        with sync:
            assert hooks_of(model, inner) != before
            for batch in batches(0, 3):
                step(sync, inner, batch)
            if error:
                raise error

    if error:
        with pytest.raises(error):
            enter()
    else:
        enter()
    assert hooks_of(model, inner) == before
    before = parameters(model)
    model(torch.ones(1, 5))
    assert furthest(parameters(model), before) == 0


def test_a_distrusted_node_adopts_the_mean_and_forgets_its_moments():
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=0.01)
        exchange = MeanExchange(transport, outer=Average(), penalty=PenaltyConfig(weights="uniform"))
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=1000))
        with sync:
            loss(own, batches(n, 1)[0]).backward()
            inner.step()
            if n == 1:
                with torch.no_grad():
                    own.middle.weight[0, 0] = float("nan")
            sync.begin(Round(1, 1))
            own(torch.ones(1, 5))
            moments = {name: inner.state[p]["exp_avg"].abs().sum() for name, p in own.named_parameters()}
            sync.schedule.last_id = 1
        return parameters(own), {name for name, size in moments.items() if size == 0}

    (trusted, kept), (other, forgotten) = in_threads(2, job)
    assert furthest(trusted, other) == 0
    assert (kept, forgotten) == (set(), {"middle.weight", "middle.bias"})


# -- waiting


class Windows:
    """Idle work that remembers when it was let in."""

    def __init__(self):
        self.causes = []

    @contextmanager
    def window(self, cause):
        self.causes.append(cause)
        yield


class Slow(Held):
    """Answers that are there only for those who wait for them."""

    def gather(self, key, row):
        return Looked(self.transport.gather(key, row), 10**9)

    def weighted_mean(self, key, value, weight):
        return Looked(self.transport.weighted_mean(key, value, weight), 10**9)


def forward_with_idle_work(kind):
    model, ticks = tower(), iter(range(1000))
    sync, _ = node(model, kind(MemoryWorld(1).node(0)))
    sync.idle, sync.clock = Windows(), lambda: next(ticks)
    with sync:
        sync.begin(Round(1, 1))
        assert sync.idle.causes == []
        model(torch.ones(1, 5))
        sync.schedule.last_id = 1
        return sync.idle.causes.copy(), sync.waited_s, sync.idle_used_s


def test_idle_work_is_let_in_while_the_node_waits():
    causes, waited_s, idle_used_s = forward_with_idle_work(Slow)
    assert causes == ["round"] * 5  # the opening and four units
    assert waited_s == idle_used_s == 5


def test_idle_work_stays_out_when_answers_are_here():
    assert forward_with_idle_work(Held) == ([], 0, 0)


def test_a_wait_can_be_given_up():
    model = tower()
    sync, _ = node(model, Slow(MemoryWorld(1).node(0)))
    asked = []

    def give_up(position):
        asked.append(position)
        raise KeyboardInterrupt

    sync.while_waiting = give_up
    sync.exchange.anchor()
    sync.schedule.last_id = 4
    sync.begin(Round(4, 1))
    with pytest.raises(KeyboardInterrupt):
        sync.finish()
    assert asked == [4]


def test_a_round_given_up_and_opened_again_changes_nothing():
    data = batches(0, 6)

    def trained(give_up):
        model = tower()
        penalty = PenaltyConfig(step_weight=0.5)
        sync, inner = node(model, alone(), every=2, outer=Nesterov(), penalty=penalty)
        with sync:
            for batch in data:
                step(sync, inner, batch)
                if give_up and sync.in_flight:
                    for round in sync.abandon():
                        sync.begin(round)
        return parameters(model), sync.total_steps

    (ours, our_steps), (theirs, their_steps) = trained(True), trained(False)
    assert furthest(ours, theirs) == 0
    assert our_steps == their_steps == 6


# -- from the warm-up to the first local phases


def text(seed, count):
    """Batches of 8 x 32 bytes of Python's own documentation."""
    topics = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    starts = random.Random(seed)
    rows = [starts.randrange(len(topics) - 32) for _ in range(8 * count)]
    return torch.tensor([list(topics[row : row + 32]) for row in rows]).view(count, 8, 32)


def language_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def test_a_language_model_does_not_jump_when_the_warm_up_ends():
    """Held-out loss of a small Llama after each of the first local rounds, against the end of the warm-up."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    held_out, losses = text(99, 16).flatten(0, 1), {}

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=3e-3)
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=PenaltyConfig())
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=8, warmup_steps=40))
        with sync:
            for ids in text(n, 72):
                language_loss(own, ids).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
                if sync.steps in (40, 48, 56, 64, 72):
                    with torch.no_grad():  # lands
                        losses[n, sync.steps] = language_loss(own, held_out).item()
        assert sync.round_id == 5

    in_threads(2, job)
    assert losses[0, 40] < 3.6, "the warm-up has taught it something: a guess costs 4.85"
    for step in (48, 56, 64, 72):
        assert losses[0, step] <= 1.02 * losses[0, 40]
        assert losses[0, step] == losses[1, step]
