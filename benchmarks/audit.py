"""Audit of rollouts: false alarms with honest servers, and how soon lying ones are found.

    python -m benchmarks.audit [--quick] [--tokens 1000000] [--only TABLE ...] [--json FILE]

A tiny policy, trained for half a minute on Python text, generates answers of up to 256 tokens; the audit
recomputes each with one forward pass of `transformers`. Lies are answers of engines that really do what they
must not.
"""

import argparse
import copy
import hashlib
import importlib
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aedit.spec_rollout.audit import (
    Calibration,
    HeldRollout,
    OwnNoise,
    PolicyVersions,
    RewardRecord,
    Scored,
    ServerRecord,
    calibrate,
    form_error,
    score,
)
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import OFF, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Path as AttentionPath
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling, decode_sampling, encode_sampling, gumbel
from benchmarks.kit.small_llama import corpus, llama
from benchmarks.kit.statistics import percent, quantile
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import Policy, load

# -- answers of honest and of lying servers


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
    path: AttentionPath = "auto"
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


def better_of_two(limit: float, *, one_in: int = 1, rounds: int = 4) -> Lie:
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


# -- proofs of TOPLOC and GRAIL on the same claims


DECODED_AT_ONCE, TOP = 32, 128
MAX_EXPONENTS, MAX_MEAN, MAX_MEDIAN = 38, 10.0, 8.0
PLACES, WIDTH = 32, 16

Hidden = Callable[[HeldRollout], Tensor]
"""Returns the last hidden states of the text of a claim, (T, d)."""


def hidden_of(model: nn.Module) -> Hidden:
    """Return a function that pushes a claim's text through this model once."""

    @torch.no_grad()
    def hidden(claim: HeldRollout) -> Tensor:
        tokens_1T = torch.tensor([[*claim.prompt, *claim.tokens]])
        found: Tensor = model.model(input_ids=tokens_1T).last_hidden_state[0]  # type: ignore[operator]
        return found

    return hidden


def random_hidden(scale: float, seed: int = 0) -> Hidden:
    """Return a function that makes states of noise."""

    def hidden(claim: HeldRollout) -> Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * claim.key[0] + seed)
        return torch.randn(len(claim.prompt) + len(claim.tokens), 64, generator=generator) * scale

    return hidden


def constant_hidden(claim: HeldRollout) -> Tensor:
    """Return states of ones."""
    return torch.ones(len(claim.prompt) + len(claim.tokens), 64)


def toploc_or_why_not(build_at: Path) -> Any:
    """Return the package, or a text: why it is not here. Compile its extension in `build_at` if need be."""
    import torch.utils.cpp_extension as cpp

    spec = importlib.util.find_spec("toploc")
    if spec is None or spec.origin is None:
        return "toploc is not installed"
    try:
        return importlib.import_module("toploc")
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "toploc"]:
            del sys.modules[name]
    sources = Path(spec.origin).parent / "C" / "csrc"
    build_at.mkdir(parents=True, exist_ok=True)
    try:
        for name in ("utils", "ndd", "poly"):
            loaded = cpp.load(name, [str(sources / f"{name}.cpp")], build_directory=str(build_at))
            sys.modules[f"toploc.C.csrc.{name}"] = loaded
        return importlib.import_module("toploc")
    except (ImportError, OSError, RuntimeError) as error:
        return f"toploc does not compile here: {str(error).splitlines()[0]}"


def toploc_passes(toploc: Any, claim: HeldRollout, prover: Hidden, verifier: Hidden) -> bool:
    """Return whether TOPLOC accepts the proof of a prover's states."""
    mine, theirs = (_activations(hidden(claim), len(claim.prompt)) for hidden in (verifier, prover))
    proofs = toploc.build_proofs_bytes(theirs, DECODED_AT_ONCE, TOP, False)
    try:
        results = toploc.verify_proofs_bytes(mine, proofs, DECODED_AT_ONCE, TOP, False)
    except (RuntimeError, ValueError):
        return False
    return all(
        each.exp_mismatches <= MAX_EXPONENTS
        and each.mant_err_mean <= MAX_MEAN
        and each.mant_err_median <= MAX_MEDIAN
        for each in results
    )


def grail_passes(claim: HeldRollout, prover: Hidden, verifier: Hidden) -> bool:
    """Return whether the sketch accepts a prover's states."""
    seed = hashlib.sha256(f"{claim.key}".encode()).digest()
    numbers = np.frombuffer(hashlib.sha512(seed).digest(), dtype="<i2")[:WIDTH].astype(np.int64)
    r = np.abs(numbers) % 255 - 127
    mine, theirs = verifier(claim), prover(claim)
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    places = rng.choice(len(mine), size=min(PLACES, len(mine)), replace=False)
    return all(
        abs(_sketch(mine[place], r) - _sketch(theirs[place], r)) <= 6000 + 5 * math.sqrt(place)
        for place in places
    )


def _sketch(hidden_d: Tensor, r: "np.ndarray[Any, np.dtype[np.int64]]") -> int:
    chosen = hidden_d.abs().topk(WIDTH).indices.sort().values
    x = hidden_d[chosen].double().numpy()
    buckets = np.minimum(7, (0.8 * np.log2(np.abs(x) + 1)).astype(np.int64)) * np.sign(x).astype(np.int64)
    return int(buckets @ r)


def _activations(hidden_Td: Tensor, num_prompt: int) -> Sequence[Tensor]:
    """Return the states of the prompt, then of each token, in bfloat16."""
    found = hidden_Td.to(torch.bfloat16)
    return [found[:num_prompt], *found[num_prompt:].unbind(0)]


# -- verdicts of the audit on claims: margins once, then many servers made of them


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim with its margins; `form` names a broken rule, and then there are none."""

    form: str
    scored: Scored | None
    num_tokens: int


@dataclass(slots=True)
class Tally:
    """Sums over judged tokens."""

    tokens: int = 0
    other: int = 0
    """Tokens that are not the verifier's."""
    largest: float = 0.0
    above: dict[float, int] = field(default_factory=dict)
    """Tokens whose margin is above a limit."""
    parts: list[Scored] = field(default_factory=list)


LIMITS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def judge(policy: PolicyVersions, claim: HeldRollout, noise: OwnNoise | None = None) -> Judged:
    """Return a claim with its margins under the verifier's policy; measure `noise` on it."""
    sampling = decode_sampling(claim.sampling)
    wrong = form_error(claim, sampling, policy.vocabulary)
    scored = None if wrong else score(policy, claim, sampling, noise)
    return Judged(wrong, scored, len(claim.tokens))


def tally(judged: Sequence[Judged]) -> Tally:
    """Return sums over claims."""
    found = Tally(above=dict.fromkeys(LIMITS, 0))
    for each in judged:
        if each.scored is None or not each.scored.tokens:
            continue
        margins_T = each.scored.margins.margins_T
        found.tokens += len(margins_T)
        found.other += int((each.scored.margins.right_T != torch.tensor(each.scored.tokens)).sum())
        found.largest = max(found.largest, float(margins_T.max()))
        for limit in LIMITS:
            found.above[limit] += int((~(margins_T <= limit)).sum())
        found.parts.append(each.scored)
    return found


def calibration(judged: Sequence[Judged], dtype: torch.dtype) -> Calibration:
    """Return the calibration on honest claims."""
    parts = [each.scored for each in judged if each.scored is not None]
    return calibrate([(x.margins, torch.tensor(x.logprobs, dtype=torch.float64)) for x in parts], dtype)


def alarms(judged: Sequence[Judged], limits: Calibration, per_server: int) -> tuple[int, int]:
    """Return (servers, convicted ones) if each server has sent `per_server` of these claims in turn."""
    servers = convicted = 0
    for first in range(0, len(judged), per_server):
        record = ServerRecord()
        for each in judged[first : first + per_server]:
            assert each.scored is not None, each.form
            record, _ = record.judge(each.scored, limits)
        servers += 1
        convicted += record.num_failures > 0
    return servers, convicted


@dataclass(frozen=True, slots=True)
class Detection:
    """Convictions of servers that draw their samples from the same claims."""

    share: float
    """Of the servers that are convicted before their claims end."""
    tokens: float | None
    """Median of the tokens until then."""
    tokens_95: float | None


def detection(
    judged: Sequence[Judged],
    limits: Calibration,
    servers: int,
    seed: int = 0,
    advantages: Sequence[float] | None = None,
) -> Detection:
    """Return how soon servers are convicted, each with these claims in an order of its own.

    Args:
        judged: The claims.
        limits: Limits of the audit.
        servers: Number of servers.
        seed: Seed of the orders.
        advantages: Of each claim, for the tests that know rewards; None: they are not made.
    """
    needed: list[float] = []
    known: Sequence[float | None] = advantages or [None] * len(judged)
    order = list(zip(judged, known, strict=True))
    for number in range(servers):
        shuffled = random.Random(f"{seed} {number}").sample(order, len(order))
        found = _tokens_needed(shuffled, limits)
        if found is not None:
            needed.append(found)
    share = len(needed) / servers
    if not needed:
        return Detection(0.0, None, None)
    return Detection(share, quantile(needed, 0.5), quantile(needed, 0.95))


def _tokens_needed(order: Sequence[tuple[Judged, float | None]], limits: Calibration) -> int | None:
    record, rewards, tokens = ServerRecord(), RewardRecord(), 0
    for each, advantage in order:
        tokens += each.num_tokens
        if each.form:
            return tokens
        assert each.scored is not None
        record, judgement = record.judge(each.scored, limits)
        reason = judgement.reason
        if not reason and advantage is not None:
            rewards, reason = rewards.judge(each.scored, advantage, limits)
        if reason:
            return tokens
    return None


# -- the benchmark


ABOUT = "False alarms and detection rates of the audit of rollouts."
METHOD = (
    "Policy: Llama, 2 layers, width 64, 257 tokens, half a minute of training on Python text; prompts of 32"
    " bytes, answers of up to 256, temperature 1.",
    "Generated by the engine; checked by one forward pass of transformers per answer, one answer at a time.",
)
WAYS = (
    Way("1 row", 1),
    Way("8 rows", 8),
    Way("512 rows", 512),
    Way("512 rows, 2 threads", 512, threads=2),
    Way("64 rows, drafts of 4", 64, arm="suffix:4"),
    Way("64 rows, generic path", 64, path="generic"),
)
SHARES = (0.01, 0.03, 0.61, 0.25, 0.05, 0.05)
"""Of the honest tokens, by way."""
ROLLOUTS_PER_SERVER = 40
SERVERS = 200
ADAPTIVE = 40
"""Servers of each kind that knows the limits."""
TABLES = ("honest", "dtype", "lies", "adaptive", "rivals", "cost")
BUILD = Path("runs/toploc")


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of one run of this benchmark."""

    policy: Policy
    other: Policy
    tokens: int
    new_tokens: int
    lies: int
    """Answers of each lie."""
    adaptive: int
    """Answers of each server that knows the limits."""
    bf16_tokens: int


def setting(args: argparse.Namespace) -> Setting:
    """Return the sizes that the options ask for."""
    minutes = 0.03 if args.quick else 0.5
    policy = Policy(task="python", size="quick", minutes=minutes)
    return Setting(
        policy=policy,
        other=replace(policy, seed=1),
        tokens=2_000 if args.quick else args.tokens,
        new_tokens=24 if args.quick else 256,
        lies=6 if args.quick else 32,
        adaptive=12 if args.quick else 200,
        bf16_tokens=500 if args.quick else args.tokens // 5,
    )


def measure(args: argparse.Namespace) -> list[Report]:
    """Return all tables."""
    torch.set_num_threads(1)
    chosen = setting(args)
    model = load(chosen.policy).requires_grad_(False)
    sampling = Sampling(max_new_tokens=chosen.new_tokens, stop_tokens=(END,))
    limits = _calibrated(model, sampling, chosen)
    reports: list[Report] = []
    if "honest" in args.only:
        reports.append(_honest(model, sampling, chosen, limits))
    if "dtype" in args.only:
        reports.append(_by_dtype(model, sampling, chosen))
    if "lies" in args.only:
        lies = _lies(model, load(chosen.other).requires_grad_(False))
        asked = _prompts(sampling, chosen.lies)
        found = {name: _judged(model, lie(model, asked)) for name, lie in lies.items()}
        reports.append(_detected(found, limits))
    if "adaptive" in args.only:
        reports += [_adaptive(model, sampling, chosen, name) for name in ("fp32", "bf16")]
    if "rivals" in args.only and not args.quick:
        reports.append(_rivals(model, load(chosen.other).requires_grad_(False), sampling))
    if "cost" in args.only:
        reports.append(_cost(args.quick))
    return reports


def _calibrated(model: nn.Module, sampling: Sampling, chosen: Setting) -> Calibration:
    """Return limits from honest answers that no table has."""
    policy = _verifier(model)
    told = _generated(model, sampling, chosen.tokens // 50, WAYS[2], 0)
    return calibration([judge(policy, each) for each in told], torch.float32)


def _prompts(sampling: Sampling, count: int, first: int = 1 << 24) -> list[Any]:
    return prompts(count, sampling, first)


def _verifier(model: nn.Module) -> PolicyVersions:
    """Return a verifier with the weights of `model` as the version of all claims."""
    policy = PolicyVersions(copy.deepcopy(model), kept=1)
    policy.add(VERSION, dict(model.state_dict()))
    return policy


def _judged(model: nn.Module, told: Sequence[Any]) -> list[Judged]:
    policy = _verifier(model)
    return [judge(policy, each) for each in told]


# --- honest servers


def _honest(model: nn.Module, sampling: Sampling, chosen: Setting, limits: Calibration) -> Report:
    """Return the table of honest servers in fp32."""
    policy, wide = _verifier(model), Calibration.default(torch.float32)
    rows, total, convicted, largest, servers = [], 0, 0, 0.0, 0
    for number, (way, share) in enumerate(zip(WAYS, SHARES, strict=True)):
        wanted, key = int(share * chosen.tokens), (number + 1) << 20
        judged = [judge(policy, each) for each in _generated(model, sampling, wanted, way, key)]
        done = tally(judged)
        made = [alarms(judged, each, ROLLOUTS_PER_SERVER) for each in (limits, wide)]
        apart = sum((~(part.margins.margins_T <= limits.tau)).sum().item() for part in done.parts)
        rows.append(
            (
                way.name,
                f"{done.tokens:,}",
                percent(done.other / done.tokens, 4),
                f"{done.largest:.1e}",
                str(apart),
                f"{made[0][1]} of {made[0][0]}",
                f"{made[1][1]} of {made[1][0]}",
            )
        )
        total, largest = total + done.tokens, max(largest, done.largest)
        servers, convicted = servers + made[0][0], convicted + made[0][1] + made[1][1]
    enough = total >= 10**6
    bars = (
        Bar(
            f"no false alarm: {convicted} in {total:,} honest tokens of {servers} servers",
            convicted == 0 and enough if enough or convicted else None,
        ),
    )
    method = (
        *METHOD,
        f"Calibrated on {limits.num_tokens:,} further tokens: eps {limits.eps:.2g}, tau {limits.tau:.2g}, p0 "
        f"{2 * limits.rate:.2g}; default: tau {wide.tau:.2g}, p0 {2 * wide.rate:.2g}. A server: "
        f"{ROLLOUTS_PER_SERVER} answers.",
    )
    figures = {"tokens": total, "alarms": convicted, "largest": largest, "eps": limits.eps, "tau": limits.tau}
    columns = (
        *("honest engine, fp32", "tokens", "other token", "largest margin", "above tau"),
        *("convicted, calibrated", "by default"),
    )
    return Report("Honest servers", method, columns, tuple(rows), bars, figures)


def _generated(model: nn.Module, sampling: Sampling, num_tokens: int, way: Way, first: int) -> Iterator[Any]:
    """Yield claims of about so many tokens."""
    count = max(2, num_tokens // sampling.max_new_tokens)
    for each in generate(model, prompts(count, sampling, first), way):
        yield claimed(each)


def _by_dtype(model: nn.Module, sampling: Sampling, chosen: Setting) -> Report:
    """Return margins of honest engines in fp32 and bf16 under verifiers of both dtypes.

    Limits are measured on the first fifth of the answers; the others are judged.
    """
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    back = copy.deepcopy(rounded).to(torch.float32)
    engines = {"fp32": back, "bf16": rounded}
    rows, figures = [], {}
    for mine, theirs in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
        told = list(_generated(engines[mine], sampling, chosen.bf16_tokens, WAY, 1 << 26))
        dtype = torch.bfloat16 if "bf16" in (mine, theirs) else torch.float32
        policy, first = _verifier(engines[theirs]), len(told) // 5
        noise = OwnNoise(policy.dtype)
        measured = [judge(policy, each, noise) for each in told[:first]]
        judged = [judge(policy, each) for each in told[first:]]
        done, limits = tally(judged), {"default": Calibration.default(dtype)}
        limits["calibrated"] = calibration(measured, dtype)
        if noise.limits is not None:
            limits["own noise"] = noise.limits
        shares = [done.above[limit] / done.tokens for limit in LIMITS]
        made = {key: alarms(judged, each, ROLLOUTS_PER_SERVER) for key, each in limits.items()}
        name = f"engine {mine}, verifier {theirs}"
        figures[name] = {"other": done.other / done.tokens, "above": shares, "largest": done.largest} | {
            f"convicted, {key}": each for key, each in made.items()
        }
        rows.append(
            (
                name,
                f"{done.tokens:,}",
                percent(done.other / done.tokens, 3),
                *(percent(share, 3) for share in shares),
                f"{limits['calibrated'].eps:.1e}",
                *(
                    f"{made[key][1]} of {made[key][0]}" if key in made else "-"
                    for key in ("default", "calibrated", "own noise")
                ),
            )
        )
    columns = (
        *("same weights", "tokens", "other token", *(f"m > {limit:g}" for limit in LIMITS)),
        *("eps", "convicted by default", "calibrated", "by own noise"),
    )
    return Report("Honest servers by dtype", (), columns, tuple(rows), (), figures)


# --- lying servers


def _lies(model: nn.Module, other: nn.Module) -> Mapping[str, Lie]:
    return {
        "another seed": other_seed,
        "greedy": with_sampling(temperature=0.0),
        "temperature 0.9": with_sampling(temperature=0.9),
        "another model": by(lambda _: other),
        "one step older, lr 1e-3": by(one_step_back(1e-3)),
        "one step older, lr 1e-4": by(one_step_back(1e-4)),
        "one step older, lr 1e-5": by(one_step_back(1e-5)),
        "one step older, lr 1e-6": by(one_step_back(1e-6)),
        "8-bit weights": by(quantized(8)),
        "4-bit weights": by(quantized(4)),
        "half of the answer": cut,
        "half, then an end token": truncated,
        "best of 4": picked(4),
        "one token edited": edited,
        "answer of another sample": reused,
        "log-probabilities 0.05 too low": false_logprobs,
        "random tokens": of_nothing(lambda i, place: (31 * i + 17 * place * place + 5) % 256),
        "one token, repeated": of_nothing(lambda i, place: 101),
    }


MUST_BE_FOUND = 0.99
NEAR = ("one step older, lr 1e-5", "one step older, lr 1e-6")
"""Lies that may stay unseen: these policies are almost equal."""


def _detected(found: Mapping[str, Sequence[Judged]], limits: Calibration) -> Report:
    wide = Calibration.default(torch.float32)
    rows, figures, missed = [], {}, []
    for name, judged in found.items():
        done, by_limits = tally(judged), {}
        for key, each in (("calibrated", limits), ("default", wide)):
            by_limits[key] = detection(judged, each, SERVERS)
        other = percent(done.other / done.tokens, 2) if done.tokens else "form"
        cells = [
            cell
            for each in by_limits.values()
            for cell in (percent(each.share, 0), _count(each.tokens), _count(each.tokens_95))
        ]
        num_tokens = sum(each.num_tokens for each in judged)
        rows.append((name, f"{num_tokens:,}", other, *cells))
        figures[name] = {key: [each.share, each.tokens, each.tokens_95] for key, each in by_limits.items()}
        if by_limits["calibrated"].share < MUST_BE_FOUND and name not in NEAR:
            missed.append(name)
    bars = (Bar(f"every other lie is found, calibrated; not: {', '.join(missed) or 'none'}", not missed),)
    columns = (
        *("lie", "tokens", "other token", "found", "median", "95 %"),
        *("found, default", "median", "95 %"),
    )
    method = (
        f"{SERVERS} servers per lie, each with the same answers in an order of its own, all audited; tokens"
        " audited until the conviction.",
    )
    return Report("Lying servers", method, columns, tuple(rows), bars, figures)


# --- servers that know the limits


def _adaptive(model: nn.Module, sampling: Sampling, chosen: Setting, dtype: str) -> Report:
    """Return what servers gain that stay below the limits of single tokens, and how soon they are found."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    engine = copy.deepcopy(model).to(kind)
    policy, noise = _verifier(engine), OwnNoise(kind)
    asked = _prompts(sampling, chosen.adaptive)
    trusted = _prompts(sampling, 2 * chosen.adaptive, 1 << 27)
    measured = [judge(policy, each, noise) for each in honest(engine, trusted)]
    limits = {"default": Calibration.default(kind), "calibrated": calibration(measured, kind)}
    if noise.limits is not None:
        limits["own noise"] = noise.limits
    wide, tight = limits["default"], limits.get("own noise", limits["calibrated"])
    true = {each.key: each for each in honest(engine, asked)}
    lies: dict[str, Lie] = {
        "none: honest": lambda *_: [*true.values()],
        "log-probs -0.008": shifted(-0.008),
        "log-probs +-0.008, by the reward": by_reward(lambda x: 0.008 if x > 0 else -0.008),
        f"log-probs {-tight.largest_bias:.1g}: the bias that is allowed": shifted(-tight.largest_bias),
    }
    for limit, text in ((wide.tau, "the default tau"), (tight.tau, "tau"), (tight.eps, "eps")):
        lies[f"better of two tokens within {limit:.2g}, {text}"] = better_of_two(limit)
    lies[f"the same within {tight.eps:.2g}, one answer of 10"] = better_of_two(tight.eps, one_in=10)
    rows, figures, unseen = [], {}, []
    before = torch.tensor([reward(each) for each in true.values()], dtype=torch.float64)
    for name, lie in lies.items():
        told = lie(engine, asked)
        judged = [judge(policy, each) for each in told]
        done, cells = tally(judged), []
        changed = sum(each.tokens != true[each.key].tokens for each in told)
        rewards = torch.tensor([reward(each) for each in told], dtype=torch.float64)
        gain = float((rewards.mean() - before.mean()) / before.std())
        found = {
            key: detection(judged, each, ADAPTIVE, advantages=advantages(told))
            for key, each in limits.items()
        }
        for each in found.values():
            cells += [percent(each.share, 0), _count(each.tokens)]
        if found.get("own noise", found["calibrated"]).share < MUST_BE_FOUND:
            unseen.append(name)
        figures[name] = {"gain": gain, "changed": changed} | {
            key: [each.share, each.tokens] for key, each in found.items()
        }
        others = percent(done.other / done.tokens, 2)
        rows.append((name, others, f"{changed} of {len(told)}", f"{gain:+.3f}", *cells))
    columns = (
        *("what the server does", "other tokens", "answers changed", "reward, sd"),
        *(text for key in limits for text in (f"found, {key}", "median tokens")),
    )
    method = (
        f"{dtype}, {sum(each.num_tokens for each in measured):,} tokens to calibrate on. {ADAPTIVE} servers"
        f" with the same {len(asked)} answers, all audited with their advantages. Reward: share of spaces.",
        *(
            f"{key}: eps {each.eps:.2g}, tau {each.tau:.2g}, other tokens up to {each.ties:.2f} of those"
            f" expected, bias up to {each.largest_bias:.2g}"
            for key, each in limits.items()
        ),
        f"Not found by the tightest limits: {'; '.join(unseen) or 'none'}.",
    )
    bars = (Bar("the honest server is not convicted", "none: honest" in unseen),)
    return Report(f"Servers that know the limits, {dtype}", method, columns, tuple(rows), bars, figures)


def _count(tokens: float | None) -> str:
    return "-" if tokens is None else f"{tokens:,.0f}"


# --- other proofs


def _rivals(model: nn.Module, other: nn.Module, sampling: Sampling) -> Report:
    """Return the share of answers that each proof accepts, on the same controls."""
    toploc = toploc_or_why_not(BUILD)
    asked, own = _prompts(sampling, 24), hidden_of(model)
    older, eight, four = (change(model) for change in (one_step_back(1e-4), quantized(8), quantized(4)))
    scale = float(own(honest(model, asked[:1])[0]).std())
    bf16 = copy.deepcopy(model).to(torch.bfloat16)
    controls: dict[str, tuple[Lie, Callable[[Any], Any]]] = {
        "honest": (honest, own),
        "honest, bf16": (by(lambda _: bf16), lambda claim: hidden_of(bf16)(claim).float()),
        "another seed": (other_seed, own),
        "greedy": (with_sampling(temperature=0.0), own),
        "temperature 0.9": (with_sampling(temperature=0.9), own),
        "best of 4": (picked(4), own),
        "one token edited": (edited, own),
        "half, then an end token": (truncated, own),
        "another model, its text": (by(lambda _: other), own),
        "another model, its states": (by(lambda _: other), hidden_of(other)),
        "one step older, lr 1e-4": (by(lambda _: older), hidden_of(older)),
        "8-bit weights": (by(lambda _: eight), hidden_of(eight)),
        "4-bit weights": (by(lambda _: four), hidden_of(four)),
        "states of noise": (honest, random_hidden(scale)),
        "states of ones": (honest, constant_hidden),
    }
    limits, policy = Calibration.default(torch.float32), _verifier(model)
    rows, figures = [], {}
    for name, (lie, prover) in controls.items():
        told = lie(model, asked)
        grail = [grail_passes(each, prover, own) for each in told]
        accepted = {"GRAIL sketch": sum(grail) / len(told)}
        if not isinstance(toploc, str):
            passed = [toploc_passes(toploc, each, prover, own) for each in told]
            accepted["TOPLOC"] = sum(passed) / len(told)
        needs_states = name.startswith("states")
        judged = [judge(policy, each) for each in told]
        wide = Calibration.default(torch.bfloat16) if name == "honest, bf16" else limits
        failed = [detection([each], wide, 1).share for each in judged]
        accepted["this audit"] = 1 - sum(failed) / len(told)
        figures[name] = accepted
        cells = [
            percent(accepted[each], 0) if each in accepted else "-" for each in ("TOPLOC", "GRAIL sketch")
        ]
        rows.append((name, *cells, "no states" if needs_states else percent(accepted["this audit"], 0)))
    method = (
        "Share of answers of 256 tokens that are accepted, each by itself; this audit: by default limits.",
        "TOPLOC: package toploc, 128 values per 32 tokens, limits 38, 10 and 8. GRAIL: its sketch alone,"
        " restated. A liar with the right text pushes it through the right model once.",
        *([toploc] if isinstance(toploc, str) else []),
    )
    return Report(
        "Other proofs", method, ("answers", "TOPLOC", "GRAIL sketch", "this audit"), tuple(rows), (), figures
    )


# --- cost


def _cost(quick: bool) -> Report:
    """Return what the recomputation of a token costs beside its generation."""
    model = llama(64 if quick else 256, 2 if quick else 12, 512).eval().requires_grad_(False)
    sampling = Sampling(max_new_tokens=16 if quick else 128)
    policy, rows, figures = _verifier(model), [], {}
    for num_rows in (1, 8, 32):
        asked = prompts(num_rows, sampling, 5 << 20)
        list(generate(model, asked[:1], Way("", 1)))
        began = time.perf_counter()
        told = [claimed(each) for each in generate(model, asked, Way("", num_rows))]
        decode_s = time.perf_counter() - began
        began = time.perf_counter()
        for each in told:
            judge(policy, each)
        audit_s = time.perf_counter() - began
        tokens = sum(len(each.tokens) for each in told)
        share = audit_s / decode_s
        figures[str(num_rows)] = {"decode_s": decode_s / tokens, "audit_s": audit_s / tokens}
        rows.append(
            (
                f"{num_rows}",
                f"{1e3 * decode_s / tokens:.2f} ms",
                f"{1e3 * audit_s / tokens:.2f} ms",
                percent(share, 0),
                percent(0.2 * share, 1),
                percent(0.02 * share, 2),
            )
        )
    columns = ("rows of the server", "decode a token", "audit a token", "share", "at q = 0.2", "at q = 0.02")
    width = "width 64, 2 layers" if quick else "width 256, 12 layers, 9 M parameters"
    method = (f"{width}, fp32, one thread; answers of {sampling.max_new_tokens} tokens.",)
    return Report("Cost of the recomputation", method, columns, tuple(rows), (), figures)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=int, default=1_050_000, help="honest tokens in fp32; by dtype a fifth of it"
    )
    does = "tables to make (default: all)"
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, metavar="TABLE", help=does)


if __name__ == "__main__":
    main("audit", ABOUT, measure, options=_options)
