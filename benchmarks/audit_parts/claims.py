"""Answers of servers, honest and lying, as their trainer receives them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aedit.spec_rollout.audit import HeldRollout
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import OFF, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Path, make_target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling, encode_sampling, gumbel
from benchmarks.kit.small_llama import corpus

PROMPT_BYTES = 32
VERSION = 1
END = 256
OTHER_KEYS = 1 << 20
"""Samples of a server that draws with keys of its own begin here."""


@dataclass(frozen=True, slots=True)
class Way:
    """Shapes and code paths of an engine."""

    name: str
    rows: int
    arm: str = "off"
    path: Path = "auto"
    threads: int = 1


def prompts(count: int, sampling: Sampling, first: int = 0) -> list[Prompt]:
    """Return `count` prompts of Python text, keyed by their number."""
    texts = corpus(256).train
    return [
        Prompt(
            tokens=tuple(int(x) for x in texts[(first + i) % len(texts)][:PROMPT_BYTES]),
            rollout=first + i,
            sample=0,
            sampling=sampling,
        )
        for i in range(count)
    ]


def generate(model: nn.Module, asked: Sequence[Prompt], way: Way) -> Iterator[Rollout]:
    """Yield the answers of an engine."""
    before = torch.get_num_threads()
    torch.set_num_threads(way.threads)
    try:
        most = max(len(each.tokens) + each.sampling.max_new_tokens for each in asked)
        target = make_target(model, rows=way.rows, max_tokens=most, nodes=16, path=way.path)
        arm = parse_arm(way.arm)
        drafters = {} if arm.is_off else {arm.drafter: SuffixDrafter(device="cpu")}
        engine = Engine(target, drafters=drafters, chooser=Fixed(OFF if arm.is_off else arm))
        engine.update_weights(None, VERSION)
        yield from engine.generate(asked)
    finally:
        torch.set_num_threads(before)


def claimed(rollout: Rollout, prompt: Prompt | None = None) -> HeldRollout:
    """Return an answer as a server claims it, for its own prompt or another one."""
    asked = prompt or rollout.prompt
    return HeldRollout(
        server="server",
        public_key=b"",
        key=asked.key,
        prompt=asked.tokens,
        sampling=encode_sampling(asked.sampling),
        tokens=tuple(rollout.tokens),
        logprobs=tuple(rollout.logprobs),
        versions=tuple(rollout.versions),
        start=0,
        finish_reason=rollout.finish_reason,
    )


WAY = Way("32 rows", 32)
Lie = Callable[[nn.Module, Sequence[Prompt]], list[HeldRollout]]
"""Returns the claims of a server that should generate these prompts with this policy."""


def honest(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return true claims."""
    return [claimed(each) for each in generate(model, asked, WAY)]


def by(change: Callable[[nn.Module], nn.Module]) -> Lie:
    """Return the lie of a server that generates with another model."""
    return lambda model, asked: honest(change(model), asked)


def with_sampling(**settings: float) -> Lie:
    """Return the lie of a server that draws with other settings."""

    def lie(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
        known = {each.key: each for each in asked}
        others = [replace(each, sampling=replace(each.sampling, **settings)) for each in asked]  # type: ignore[arg-type]
        return [claimed(each, known[each.prompt.key]) for each in generate(model, others, WAY)]

    return lie


def other_seed(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return claims that were drawn with other keys."""
    return picked(1)(model, asked)


def picked(count: int) -> Lie:
    """Return the lie of a server that draws `count` answers and claims the most likely one."""

    def lie(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
        tried = [replace(each, sample=OTHER_KEYS + i) for each in asked for i in range(count)]
        found: dict[int, list[Rollout]] = {}
        for each in generate(model, tried, WAY):
            found.setdefault(each.prompt.rollout, []).append(each)
        return [claimed(max(found[p.rollout], key=_mean_logprob), p) for p in asked]

    return lie


def edited(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return claims in which one token is the likeliest other one; later ones are drawn as they should."""
    texts = {each.prompt.key: each for each in generate(model, asked, WAY)}
    rest = []
    for prompt in asked:
        rollout = texts[prompt.key]
        place = (7 * prompt.rollout) % max(1, len(rollout.tokens) - 1)
        logp_V = _logprobs(model, [*prompt.tokens, *rollout.tokens[:place]])
        logp_V[rollout.tokens[place]] = -torch.inf
        logp_V[END] = -torch.inf
        token = int(logp_V.argmax())
        begun = Rollout(
            prompt,
            [*rollout.tokens[:place], token],
            [*rollout.logprobs[:place], float(logp_V[token])],
            [VERSION] * (place + 1),
        )
        rest.append(replace(prompt, partial=begun))
    return [claimed(each) for each in generate(model, rest, WAY)]


def reused(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return true answers that are claimed for another sample of the same prompt."""
    return [replace(each, key=(each.key[0], 1)) for each in honest(model, asked)]


def cut(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return the first halves of true answers."""
    found = []
    for each in honest(model, asked):
        half = slice(len(each.tokens) // 2)
        found.append(
            replace(
                each, tokens=each.tokens[half], logprobs=each.logprobs[half], versions=each.versions[half]
            )
        )
    return found


def of_nothing(draw: Callable[[int, int], int]) -> Lie:
    """Return the lie of a server without a model: draw(sample, place) is a token, all logprobs are -2."""

    def lie(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
        most = asked[0].sampling.max_new_tokens
        return [
            claimed(
                Rollout(
                    each,
                    [draw(i, place) for place in range(most)],
                    [-2.0] * most,
                    [VERSION] * most,
                    finish_reason="length",
                )
            )
            for i, each in enumerate(asked)
        ]

    return lie


def truncated(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return claims that end with an end token after half of the text."""
    found = []
    for each in generate(model, asked, WAY):
        half = len(each.tokens) // 2
        logp = float(_logprobs(model, [*each.prompt.tokens, *each.tokens[:half]])[END])
        cut = replace(each, tokens=[*each.tokens[:half], END], logprobs=[*each.logprobs[:half], logp])
        found.append(claimed(replace(cut, versions=[VERSION] * (half + 1), finish_reason="stop")))
    return found


def false_logprobs(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
    """Return true tokens with log-probabilities that are 0.05 too low."""
    return [replace(each, logprobs=tuple(x - 0.05 for x in each.logprobs)) for each in honest(model, asked)]


def shifted(shift: float) -> Lie:
    """Return the lie of a server with true tokens whose log-probabilities are all shifted."""
    return by_reward(lambda _: shift)


def by_reward(shift: Callable[[float], float]) -> Lie:
    """Return the lie of a server with true tokens that shifts log-probabilities by the sample's advantage."""

    def lie(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
        told = honest(model, asked)
        return [
            replace(each, logprobs=tuple(x + shift(advantage) for x in each.logprobs))
            for each, advantage in zip(told, advantages(told), strict=True)
        ]

    return lie


def reward(claim: HeldRollout | Rollout) -> float:
    """Return the share of spaces in an answer: what the adaptive servers below would like to raise."""
    return sum(token == 32 for token in claim.tokens) / len(claim.tokens)


def advantages(told: Sequence[HeldRollout]) -> list[float]:
    """Return rewards minus their mean, over their standard deviation."""
    rewards = torch.tensor([reward(each) for each in told], dtype=torch.float64)
    return ((rewards - rewards.mean()) / rewards.std()).tolist()


def chosen(limit: float, *, one_in: int = 1, rounds: int = 4) -> Lie:
    """Return the lie of a server that draws the second-best token where it is nearly as good.

    At up to `rounds` places of an answer, the second-best sum of logit and noise is within `limit` of the
    best one. The server generates both texts and keeps the one with the higher reward.

    Args:
        limit: Largest margin of a chosen token.
        one_in: One of so many answers is treated so; the others are true.
        rounds: Places that are tried per answer.
    """

    def lie(model: nn.Module, asked: Sequence[Prompt]) -> list[HeldRollout]:
        kept = {each.prompt.key: each for each in generate(model, asked, WAY)}
        first = {prompt.key: 0 for prompt in asked[::one_in]}
        for _ in range(rounds):
            tried = []
            for key, start in first.items():
                branch = _next_branch(model, kept[key], start, limit)
                first[key] = len(kept[key].tokens) if branch is None else len(branch.tokens)
                if branch is not None:
                    tried.append(replace(branch.prompt, partial=branch))
            for each in generate(model, tried, WAY) if tried else ():
                if reward(each) > reward(kept[each.prompt.key]):
                    kept[each.prompt.key] = each
        return [claimed(kept[prompt.key], prompt) for prompt in asked]

    return lie


@torch.no_grad()
def _next_branch(model: nn.Module, text: Rollout, start: int, limit: float) -> Rollout | None:
    """Return the answer up to its first near tie from `start` on, with the other token; None: no tie."""
    prompt = text.prompt
    tokens = torch.tensor([[*prompt.tokens, *text.tokens]])
    logits_TV = model(input_ids=tokens).logits[0, len(prompt.tokens) - 1 : -1].float()
    positions_T = torch.arange(len(text.tokens)) + len(prompt.tokens)
    sums_TV = logits_TV + gumbel(*prompt.key, positions_T[None], logits_TV.shape[1], logits_TV.dtype)[0]
    best_T2 = sums_TV.topk(2)
    near_T = (best_T2.values[:, 0] - best_T2.values[:, 1] <= limit).tolist()
    for place in range(start, len(text.tokens) - 1):
        first, second = best_T2.indices[place].tolist()
        if near_T[place] and text.tokens[place] == first and END not in (first, second):
            logp = float(logits_TV[place].log_softmax(-1)[second])
            begun = [*text.tokens[:place], second], [*text.logprobs[:place], logp]
            return Rollout(replace(prompt, partial=None), *begun, [VERSION] * (place + 1))
    return None


def quantized(bits: int) -> Callable[[nn.Module], nn.Module]:
    """Return a function that rounds matrices to so many bits, with a scale per row."""

    def change(model: nn.Module) -> nn.Module:
        made, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
        with torch.no_grad():
            for each in made.parameters():
                if each.dim() == 2:
                    step = each.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
                    each.copy_((each / step).round() * step)
        return made

    return change


def one_step_back(lr: float) -> Callable[[nn.Module], nn.Module]:
    """Return a function that moves the weights by one step of Adam at this learning rate."""

    def change(model: nn.Module) -> nn.Module:
        made = copy.deepcopy(model).train().requires_grad_(True)
        rows = torch.from_numpy(corpus(256).train[:8].astype("int64"))
        logits = made(input_ids=rows[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.optim.Adam(made.parameters(), lr=lr).step()
        return made.eval().requires_grad_(False)

    return change


@torch.no_grad()
def _logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits.log_softmax(-1)


def _mean_logprob(rollout: Rollout) -> float:
    return sum(rollout.logprobs) / len(rollout.logprobs)
