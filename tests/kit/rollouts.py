"""Tiny policies, prompts, a plain decoder, and drafters that guess well, badly and maliciously."""

import random

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aedit.spec_rollout.drafters import Draft, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Segment, Target
from aedit.spec_rollout.sampling import Prompt, Sampling, gumbel
from kit.exact_norms import normalize_exactly

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


KINDS = {
    "greedy": {"temperature": 0.0},
    "T = 1": {"temperature": 1.0},
    "T = 0.7": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "T = 0.7, top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
}
FLIPS = ["layer:4", "off", "layer:4x3x12", "layer:1", "layer:2x2x4", "layer:8"]


def tiny_policy(
    seed=0, dtype=torch.float64, kind=(LlamaConfig, LlamaForCausalLM), spread=0.3, vocabulary=VOCABULARY
):
    """Return a policy with random weights, so large that some next tokens are likely and others are not."""
    torch.manual_seed(seed)
    config, model = kind
    return normalize_exactly(
        model(config(**SIZES | {"vocab_size": vocabulary}, initializer_range=spread)).to(dtype).eval()
    )


def prefilled(target, tokens_T, row, start=0):
    """Compute the tokens of one row and return their features, (T, f)."""
    return target.prefill([Segment(row, start, tokens_T.tolist())])[0]


def prompts_of(count, seed=0, group_size=1, max_new_tokens=8, **sampling):
    """Return `count` samples with prompts of 1 to 9 tokens; those of a group have the same prompt."""
    draw, made = random.Random(seed), []
    sampling = Sampling(max_new_tokens=max_new_tokens, **sampling)
    for i in range(count):
        if i % group_size == 0:
            tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9)))
        group = i // group_size if group_size > 1 else -1
        ids = {"rollout": 1000 * seed + i // group_size, "sample": i}
        made.append(Prompt(tokens=tokens, **ids, group=group, sampling=sampling))
    return made


@torch.no_grad()
def next_logits(model, texts):
    """Return the logits after each text, by the model's own uncached forward pass over all of it."""
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    logits = model(input_ids=padded, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


def warped(logits_V, sampling):
    """Return the logits after transformers' own temperature, top-k and top-p."""
    x = logits_V[None]
    if sampling.allowed is not None:
        x = x.masked_fill(~sampling.allowed, -torch.inf)
    if sampling.temperature not in (0, 1):
        x = TemperatureLogitsWarper(sampling.temperature)(None, x)
    if sampling.top_k:
        x = TopKLogitsWarper(min(sampling.top_k, x.shape[-1]))(None, x)
    if sampling.top_p < 1:
        x = TopPLogitsWarper(sampling.top_p)(None, x)
    return x[0]


def perturbed(logits_V, prompt, position):
    """Return the scores whose argmax is the token at this position."""
    if prompt.sampling.temperature == 0:
        return warped(logits_V, prompt.sampling)
    ids = (torch.tensor([number]) for number in (prompt.rollout, prompt.sample))
    noise = gumbel(*ids, torch.tensor([[position]]), len(logits_V), dtype=logits_V.dtype)
    return warped(logits_V, prompt.sampling) + noise[0, 0]


def decode_plainly(model, prompts):
    """Return the tokens of each prompt, one full forward pass per token."""
    texts = [list(prompt.tokens) for prompt in prompts]
    going = list(range(len(prompts)))
    while going:
        logits = next_logits(model, [texts[i] for i in going])
        for i, logits_V in zip(list(going), logits, strict=True):
            prompt, text = prompts[i], texts[i]
            sampling, num_new = prompt.sampling, len(text) - len(prompt.tokens)
            if num_new < sampling.min_new_tokens:
                logits_V = logits_V.clone()
                logits_V[list(sampling.stop_tokens)] = -torch.inf
            text.append(int(perturbed(logits_V, prompt, len(text)).argmax()))
            if text[-1] in sampling.stop_tokens or num_new + 1 == sampling.max_new_tokens:
                going.remove(i)
    return [text[len(prompt.tokens) :] for text, prompt in zip(texts, prompts, strict=True)]


def logprobs_of(model, prompt, tokens):
    """Return log softmax(logits / T) of the tokens, teacher-forced; T = 1 where it is 0."""
    text = [*prompt.tokens, *tokens]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    logp = (logits[len(prompt.tokens) - 1 : -1] / (prompt.sampling.temperature or 1.0)).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


class Follower:
    """Drafter that knows the text of its rows and checks that updates reach it in order."""

    version = 0

    def __init__(self):
        self.rows = {}
        self.num_proposed = 0

    def begin(self, rows):
        for begun in rows:
            assert begun.row not in self.rows
            assert len(begun.features_Td) == len(begun.tokens) - 1
            assert 0 < begun.num_prompt <= len(begun.tokens)
            self.rows[begun.row] = list(begun.tokens)

    def update(self, taken):
        assert sorted(self.rows) == list(range(len(taken.tokens)))
        assert taken.features.shape[:2] == (len(taken.tokens), max(map(len, taken.tokens)))
        for row, tokens in enumerate(taken.tokens):
            self.rows[row] += tokens
            assert not taken.features[row, len(tokens) :].any()

    def move(self, source, target):
        assert target not in self.rows
        self.rows[target] = self.rows.pop(source)

    def end(self, row):
        del self.rows[row]

    def propose(self, arm, rows, noise, temperature_B):
        assert sorted(self.rows) == list(range(rows))
        assert temperature_B.shape == (rows,)
        self.num_proposed += 1
        if arm.is_chain:
            guesses = [self.chain(self.rows[row], arm.depth) for row in range(rows)]
            tokens_BN = torch.tensor([tokens for tokens, _ in guesses])
            return Draft(tokens_BN, None, self._counts(guesses), self._scores(tokens_BN))
        guesses = [self.tree(self.rows[row], arm) for row in range(rows)]
        tokens_BN = torch.tensor([tokens for (tokens, _), _ in guesses])
        parents_BN = torch.tensor([parents for (_, parents), _ in guesses])
        return Draft(tokens_BN, parents_BN, self._counts(guesses), self._scores(tokens_BN))

    def _counts(self, guesses):
        return torch.tensor([count for _, count in guesses])

    def _scores(self, tokens_BN):
        return -torch.arange(1.0, tokens_BN.shape[1] + 1).expand(tokens_BN.shape)


class Stubborn(Follower):
    """Drafter that always guesses the same token, and the same subtree below every node."""

    def __init__(self, token=7):
        super().__init__()
        self.token = token

    def chain(self, text, depth):
        return [self.token] * depth, depth

    def tree(self, text, arm):
        parents = [i // 2 - 1 if i > 1 else -1 for i in range(arm.nodes)]
        return ([self.token + i % 2 for i in range(arm.nodes)], parents), arm.nodes


class Insider(Follower):
    """Drafter that knows the continuations, mostly proposes them, and sometimes proposes wrong tokens.

    The tokens below its correct nodes are correct as well.
    """

    def __init__(self, texts, seed=0, honesty=0.8):
        super().__init__()
        self.texts, self.random, self.honesty = texts, random.Random(seed), honesty

    def _truth(self, text, depth):
        known = next((known for known in self.texts if known[: len(text)] == text), [])
        rest = known[len(text) : len(text) + depth]
        return rest + [self.random.randrange(VOCABULARY) for _ in range(depth - len(rest))]

    def chain(self, text, depth):
        guess = self._truth(text, depth)
        if self.random.random() > self.honesty:
            guess[self.random.randrange(depth)] = self.random.randrange(VOCABULARY)
        count = depth if self.random.random() < self.honesty else self.random.randint(0, depth)
        return guess, count

    def tree(self, text, arm):
        """Put the true path among nodes in random order; no two siblings have the same token."""
        truth, lie = self._truth(text, arm.depth), self.random.randrange
        tokens, parents, depths = [], [], {-1: 0}
        last_true = -1
        while len(tokens) < arm.nodes:
            parent = self.random.choice([last_true, *depths])
            if depths[parent] == arm.depth:
                continue
            taken = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
            token = truth[depths[parent]] if self.random.random() < self.honesty else lie(VOCABULARY)
            if token in taken:
                token = lie(VOCABULARY)
            if token in taken:
                continue
            if parent == last_true and token == truth[depths[parent]]:
                last_true = len(tokens)
            depths[len(tokens)] = depths[parent] + 1
            tokens.append(token)
            parents.append(parent)
        count = arm.nodes if self.random.random() < self.honesty else self.random.randint(0, arm.nodes)
        return (tokens, parents), count


class Flips:
    """Chooser that takes another arm at every step, in turn.

    With `cuts`, it verifies another number of nodes of each row, from none to more than there are.
    """

    def __init__(self, *arms, cuts=False):
        self.arms, self.seen = [parse_arm(arm) for arm in arms], []
        self.cuts = random.Random(0) if cuts else None

    def choose(self, view):
        return self.arms[len(self.seen) % len(self.arms)]

    def trim(self, view, arm, draft):
        if self.cuts is None:
            return draft.tokens_BN.shape[1]
        return [self.cuts.randint(0, arm.nodes + 1) for _ in range(view.rows)]

    def learn(self, observed):
        self.seen.append(observed)


def samples(kinds):
    """Return four samples of each kind: two of one group, one with a long and one with a short prompt.

    Rollouts are short and long; some end at stop tokens, some of those not before they have a few tokens.
    """
    made = []
    for number, kind in enumerate(kinds):
        draw = torch.Generator().manual_seed(number)
        lengths, groups = (6, 6, 13, 1), (number, number, -1, -1)
        together = torch.randint(VOCABULARY, (13,), generator=draw).tolist()
        for i, (length, group) in enumerate(zip(lengths, groups, strict=True)):
            stops = {"stop_tokens": (5, 11, 40), "min_new_tokens": 4 * (i % 2)} if number % 2 else {}
            sampling = Sampling(**KINDS[kind], **stops, max_new_tokens=24 - 3 * i)
            tokens = tuple(together[:length])
            made.append(Prompt(tokens=tokens, rollout=number, sample=i, group=group, sampling=sampling))
    return made


def engine_of(model, rows, drafter=None, *arms, mode="coupled"):
    target = Target.of(model, rows=rows, max_tokens=48, nodes=12)
    drafters = {} if drafter is None else {"layer": drafter}
    return Engine(target, drafters=drafters, chooser=Flips(*(arms or ["off"])), mode=mode)


def tokens_of(engine, prompts):
    """Return the tokens of each prompt, in the order of the prompts."""
    made = {(each.prompt.rollout, each.prompt.sample): each for each in engine.generate(prompts)}
    assert len(made) == len(prompts)
    return [made[prompt.rollout, prompt.sample].tokens for prompt in prompts]


def go_on_elsewhere(pipe, seed):
    """Finish, in a process and an engine of its own, the samples sent through the pipe."""
    torch.set_num_threads(1)
    prompts = pipe.recv()
    engine = engine_of(tiny_policy(seed), 2, Stubborn(), "layer:2", "off")
    pipe.send({rollout.prompt.sample: rollout for rollout in engine.generate(prompts)})
