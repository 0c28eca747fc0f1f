"""`aedit generate`: text from a run's policy or a model directory, with lossless speculative decoding."""

import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from aedit.launch.cli.arguments import SAMPLING, policy_folder
from aedit.launch.cli.export import drafter_beside, read_for
from aedit.launch.cli.policy import Decode, Policy, load_policy
from aedit.launch.config import LOAD_S, TRIAL_S, first_call, load_object
from aedit.spec_rollout.choose import ArmChooser, Bandit, Fixed, Goodput
from aedit.spec_rollout.drafters import (
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    load_drafter,
    parse_arm,
)
from aedit.spec_rollout.engine import Engine, Step, try_chooser, try_drafter
from aedit.spec_rollout.model import Segment, TargetModel, make_target
from aedit.spec_rollout.sampling import (
    LogitAdjustments,
    Prompt,
    Rollout,
    RowSampling,
    Sampling,
    gumbel,
    warp_logits,
)
from aedit.types import UserError, first_line, is_import_path

MAX_ROWS = 32
"""Upper limit of samples that are decoded at the same time; further ones wait."""
AUTO, BANDIT = "auto", "bandit"
ARMS = (
    *("suffix:2", "suffix:4", "suffix:8", "layer:1", "layer:2", "layer:4", "layer:8", "layer:4x2x8"),
    *("custom:2", "custom:4", "custom:8"),
)
"""Candidates of `auto` and `bandit` besides off, as far as their drafters are available."""
NO_DRAFTER = Path("none")
DEFAULT_NEW_TOKENS = 256
"""New tokens of a sample without `--max-new-tokens`."""
MAX_DRAFTED_TOKENS = 32
"""Upper limit of drafted tokens that an arm verifies at once."""
WARM_UP_TOKENS = 32
STEPS_AT_ONCE = 8
"""Steps of an engine before it is the other one's turn in a comparison."""


def generate(options: Namespace) -> int:
    """Write each sample to stdout as it grows, then a line with the speed.

    With `compare`, generate again without speculation; print the speed-up and whether the tokens are equal.
    Returns the exit code: 1 if tokens differ other than by ties of rounding. Raises UserError if there is no
    model, a prompt is too long, or arm or drafter do not fit.
    """
    policy = load_policy(options.place)
    model: nn.Module = policy.model
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts, layer = _prompts(policy, options), _layer(policy, options.arm, options.drafter)
    most = max(len(prompt.tokens) + prompt.sampling.max_new_tokens for prompt in prompts)
    sizes = min(len(prompts), MAX_ROWS), most
    target = _target(policy, sizes, layer)

    def drafting() -> Engine:
        return _engine(target, options.arm, options.drafter, layer)

    engines = [drafting()]
    if options.compare:
        # Each engine has its own rows, and one-time costs belong to neither measurement.
        plain_target = _target(policy, sizes, layer)
        _run([_warm_up(drafting(), prompts), _warm_up(Engine(plain_target), prompts)])
        engines.append(Engine(plain_target))
    made = [[engine.add(prompt) for prompt in prompts] for engine in engines]
    engine, rollouts = engines[0], made[0]
    shown = TextStream(list(zip(rollouts, _names(options), strict=True)), policy.decode, sys.stdout)
    seconds = _run(engines, shown.follow)
    for name, rollout in zip(_names(options), rollouts, strict=True):
        for line in token_lines(rollout, policy.decode):
            print(f"{name}: {line}")
    done, took_s = engine.meters, seconds[0]
    arms = ", ".join(f"{arm} {100 * n / done.num_steps:.0f} %" for arm, n in done.arms.most_common())
    print(
        f"{done.num_tokens} tokens in {took_s:.2f} s: {done.num_tokens / took_s:.0f} tokens/s, "
        f"{done.num_tokens / done.num_passes:.2f} tokens per pass; arms: {arms}"
    )
    return _compare(plain_target, made, seconds) if options.compare else 0


def _compare(target: TargetModel, made: Sequence[Sequence[Rollout]], seconds: Sequence[float]) -> int:
    """Print the comparison with the rollouts and seconds without speculation and return the exit code."""
    per_s, plain_per_s = (
        sum(len(rollout.tokens) for rollout in each) / s for each, s in zip(made, seconds, strict=True)
    )
    same, how = compare_tokens(target, *made)
    print(f"plain: {plain_per_s:.0f} tokens/s; speed-up {per_s / plain_per_s:.2f}; tokens equal: {how}")
    return 0 if same else 1


def _prompts(policy: Policy, options: Namespace) -> list[Prompt]:
    """Return all samples of the first prompt, then of the next."""
    texts = [tuple(policy.encode(text)) for text in options.prompt]
    if () in texts:
        raise UserError(
            "--prompt: a prompt is empty, and the tokenizer puts no token (BOS) before it; give a character"
        )
    sampling = _sampling(policy, max(map(len, texts)), options)
    return [
        Prompt(tokens=tokens, rollout=options.seed << 32 | i, sample=sample, group=i, sampling=sampling)
        for i, tokens in enumerate(texts)
        for sample in range(options.samples)
    ]


def _sampling(policy: Policy, longest: int, options: Namespace) -> Sampling:
    """Return the requested settings, limited to the model's positions after the longest prompt."""
    most = getattr(policy.model.config, "max_position_embeddings", None)
    room = most - longest if isinstance(most, int) else DEFAULT_NEW_TOKENS
    num_new = (
        options.max_new_tokens
        if options.max_new_tokens is not None
        else min(DEFAULT_NEW_TOKENS, max(room, 1))
    )
    if isinstance(most, int) and num_new > room:
        raise UserError(
            f"--prompt: its {longest} tokens and {num_new} new ones are more than the {most} of this model"
        )
    chosen = {name: getattr(options, name) for name in SAMPLING}
    try:
        return Sampling(**chosen, max_new_tokens=num_new, stop_tokens=policy.stop_tokens)
    except ValueError as error:
        name, _, rule = str(error).removeprefix("Sampling: ").partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {rule}") from None


def drafting_engine(policy: Policy, arm: str, drafter: Path | None, *, rows: int, max_tokens: int) -> Engine:
    """Return an engine for an arm and a drafter as `aedit generate` takes them, with the policy's tokenizer.

    arm: `auto`, `bandit`, a text for `parse_arm`, or an `ArmChooser` by import path, which is called with the
    arms. drafter: a saved `DraftLayer`, or a `Drafter` by import path, which is called with the target and
    serves the arms `custom:*`. None: the one that belongs to the policy, if there is one; `NO_DRAFTER`: none.

    Raises:
        UserError: The model is not supported, or arm or drafter do not fit.
    """
    layer = _layer(policy, arm, drafter)
    return _engine(_target(policy, (rows, max_tokens), layer), arm, drafter, layer, policy.tokenizer)


def _layer(policy: Policy, arm: str, drafter: Path | None) -> DraftLayer | None:
    """Return the requested draft layer, else the one that belongs to the policy if the arm may use it."""
    if is_import_path(str(drafter)) or drafter == NO_DRAFTER:
        return None
    if drafter is None:
        path = drafter_beside(policy_folder(policy.source))
        may_use = arm in (AUTO, BANDIT) or arm.startswith("layer")
        return read_for(policy.source, path, policy.model) if path and may_use else None
    try:
        return load_drafter(drafter, policy.model)
    except (OSError, ValueError) as error:
        raise UserError(f"--drafter: {first_line(error)}") from None


def _target(policy: Policy, sizes: tuple[int, int], layer: DraftLayer | None) -> TargetModel:
    """Return the target of a policy for so many rows and tokens."""
    rows, most = sizes
    model: nn.Module = policy.model
    model.train(False)
    try:
        taps = () if layer is None else layer.shape.tapped(policy.model.config.num_hidden_layers)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            target = make_target(model, rows=rows, max_tokens=most, nodes=MAX_DRAFTED_TOKENS, taps=taps)
        for note in notes:
            print(note.message, file=sys.stderr)
        return target
    except ValueError as error:
        raise UserError(f"{policy.source}: {error}") from None


def _engine(
    target: TargetModel, arm: str, drafter: Path | None, layer: DraftLayer | None, tokenizer: Any = None
) -> Engine:
    """Return an engine with new drafters and a new chooser."""
    drafters: dict[DrafterKind, Drafter] = {}
    if arm.partition(":")[0] not in ("off", "layer", "custom"):
        drafters["suffix"] = SuffixDrafter(device=str(target.device))
    if layer is not None:
        drafters["layer"] = LayerDrafter.of(layer, target)
    if is_import_path(str(drafter)):
        drafters["custom"] = _drafter(str(drafter), target)
    chooser = _chooser(arm, drafters, target)
    return Engine(target, drafters=drafters, chooser=chooser, tokenizer=tokenizer)


def _drafter(path: str, target: TargetModel) -> Drafter:
    """Return the drafter that `path` names, which has drafted a few tokens for the target."""
    make = load_object("--drafter", path, ("begin", "update", "move", "end", "propose"))

    def attempt() -> Drafter:
        drafter: Drafter = make(target)
        try_drafter(drafter, target)
        return drafter

    return first_call("--drafter", path, "the target and two short samples", attempt, limit_s=LOAD_S)


def _chooser(arm: str, drafters: Mapping[DrafterKind, Drafter], target: TargetModel) -> ArmChooser:
    has_trees = target.supports_trees
    arms = [
        each for each in map(parse_arm, ARMS) if each.drafter in drafters and (each.is_chain or has_trees)
    ]
    if arm in (AUTO, BANDIT):
        return Goodput(arms) if arm == AUTO else Bandit(arms)
    if is_import_path(arm) and arm.partition(":")[0] not in ("suffix", "layer", "custom"):
        make = load_object("--arm", arm, ("choose", "trim", "learn"))
        first_call("--arm", arm, "arms and steps", lambda: try_chooser(make, arms, target), limit_s=TRIAL_S)
        made: ArmChooser = make(arms)
        return made
    try:
        fixed = parse_arm(arm)
    except ValueError as error:
        raise UserError(f"--arm: {error}, or auto or bandit") from None
    if not fixed.is_off and fixed.drafter not in drafters:
        what = (
            "the file of a trained drafter"
            if fixed.drafter == "layer"
            else "package.module:Name of a drafter"
        )
        raise UserError(f"--arm {arm}: needs --drafter, {what}")
    if not fixed.is_chain and not has_trees:
        raise UserError(f"--arm {arm}: this model cannot verify trees: use a chain, such as layer:4")
    if fixed.nodes > MAX_DRAFTED_TOKENS:
        raise UserError(f"--arm {arm}: at most {MAX_DRAFTED_TOKENS} drafted tokens can be verified at once")
    return Fixed(fixed)


def _warm_up(engine: Engine, prompts: Sequence[Prompt]) -> Engine:
    """Queue short samples of the first prompts."""
    for prompt in prompts[:MAX_ROWS]:
        count = min(WARM_UP_TOKENS, prompt.sampling.max_new_tokens)
        engine.add(replace(prompt, sampling=replace(prompt.sampling, max_new_tokens=count)))
    return engine


def _run(engines: Sequence[Engine], follow: Callable[[Step], None] | None = None) -> list[float]:
    """Step until all samples have finished.

    The engines take turns, in alternating order, so that load of the machine affects all of them alike.

    Args:
        engines: Engines, each with its own rows.
        follow: Receives the steps of the first engine after each turn.

    Returns:
        The seconds of each engine, without those of `follow`.
    """
    seconds, turn = [0.0] * len(engines), list(enumerate(engines))
    while any(engine.running or engine.waiting for engine in engines):
        steps = []
        for i, engine in turn:
            for _ in range(STEPS_AT_ONCE if len(engines) > 1 else 1):
                if engine.running or engine.waiting:
                    began = time.perf_counter()
                    try:
                        step = engine.step()
                    except ValueError as error:  # of a policy with NaN
                        raise UserError(str(error)) from None
                    seconds[i] += time.perf_counter() - began
                    steps += [step] if i == 0 else []
        turn.reverse()
        for step in steps:
            if follow is not None:
                follow(step)
    return seconds


def _names(options: Namespace) -> list[str]:
    samples = range(options.samples)
    if options.samples == 1:
        return [f"prompt {i + 1}" for i in range(len(options.prompt))]
    return [f"prompt {i + 1}, sample {j + 1}" for i in range(len(options.prompt)) for j in samples]


REPLACEMENT_CHARACTER = "\ufffd"
"""Output of a decoder for bytes that are not a complete character (yet)."""


@dataclass(slots=True)
class Detokenizer:
    """Incremental decoding of the tokens of one text.

    It decodes from the token before the last complete character, as the text of a token may depend on the one
    before it.
    """

    decode: Decode
    _tokens: list[int] = field(default_factory=list)
    _first: int = 0
    _num_decoded: int = 0
    """Number of tokens from `_first` on whose characters have been returned."""

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the new complete characters, or with `last` all remaining ones."""
        self._tokens += tokens
        before = self.decode(self._tokens[self._first : self._num_decoded])
        text = self.decode(self._tokens[self._first :])
        if text.endswith(REPLACEMENT_CHARACTER) and not last:
            return ""
        self._first, self._num_decoded = self._num_decoded, len(self._tokens)
        return text[len(before) :]


class TextStream:
    """Writes samples in the order of the request.

    The first unfinished sample is written as it grows, the next ones follow. With more than one sample each
    has a line with its name above it.
    """

    def __init__(self, names: Sequence[tuple[Rollout, str]], decode: Decode, out: TextIO) -> None:
        self._names, self._decode, self._out = list(names), decode, out
        self._many = len(self._names) > 1
        self._current = 0
        self._num_shown = 0
        self._detokenizer = Detokenizer(decode)
        self._begin()

    def follow(self, step: Step) -> None:
        """Write what a step has added."""
        while step.rollouts and self._current < len(self._names):
            rollout, _ = self._names[self._current]
            new = rollout.tokens[self._num_shown :]
            self._num_shown += len(new)
            self._out.write(self._detokenizer.add(new, last=bool(rollout.finish_reason)))
            self._out.flush()
            if not rollout.finish_reason:
                return
            self._next()

    def _next(self) -> None:
        self._out.write("\n")
        self._current += 1
        self._num_shown, self._detokenizer = 0, Detokenizer(self._decode)
        self._begin()

    def _begin(self) -> None:
        if self._many and self._current < len(self._names):
            self._out.write(f"--- {self._names[self._current][1]}\n")


def token_lines(rollout: Rollout, decode: Decode) -> list[str]:
    """Return a line for each token with its log-probability and the most likely tokens at its place.

    There are none if the sample did not ask for top log-probabilities.
    """
    lines = []
    for token, logprob, top in zip(rollout.tokens, rollout.logprobs, rollout.top_logprobs, strict=False):
        best = ", ".join(f"{decode([other])!r} {value:.3f}" for other, value in top)
        lines.append(f"{decode([token])!r} {logprob:.3f} (best: {best})")
    return lines


ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Upper limit of differences between logits of the same text from passes of different shapes."""


def compare_tokens(
    target: TargetModel, rollouts: Sequence[Rollout], plain_rollouts: Sequence[Rollout]
) -> tuple[bool, str]:
    """Compare the tokens of all samples, up to the first difference of each that rounding explains.

    Returns:
    True if they are equal up to such ties, and a description.
    """
    ties = []
    for number, (first, second) in enumerate(zip(rollouts, plain_rollouts, strict=True), 1):
        both = zip(first.tokens, second.tokens, strict=False)
        index = next((i for i, (x, y) in enumerate(both) if x != y), None)
        if index is None and len(first.tokens) != len(second.tokens):
            index = min(len(first.tokens), len(second.tokens))
        if index is not None:
            where = f"number {number} differs from its token {index + 1} on"
            if score_gap(target, first, second, index) > ROUNDING[target.dtype]:
                return False, f"no, {where}"
            ties.append(where)
    if not ties:
        return True, "yes"
    dtype = str(target.dtype).removeprefix("torch.")
    more = f" (and {len(ties) - 1} more)" if len(ties) > 1 else ""
    return True, f"yes, up to ties that rounding to {dtype} decides: {ties[0]}{more}"


@torch.inference_mode()
def score_gap(target: TargetModel, first: Rollout, second: Rollout, index: int) -> float:
    """Return the difference of the policy's scores of two next tokens, with sampling noise.

    0 is a tie; infinity means that the sampling settings exclude a token. Overwrites the target's first row.
    """
    if index >= min(len(first.tokens), len(second.tokens)):
        return float("inf")
    prompt = first.prompt
    text = [*prompt.tokens, *first.tokens[:index]]
    before, last = text[:-1], torch.tensor([text[-1:]], device=target.device)
    if before:
        target.prefill([Segment(0, 0, before)])
    logits_11V = target.step(last, [len(before)])[0]
    so_far = Rollout(prompt, first.tokens[:index])
    adjustments = LogitAdjustments.of([so_far], target.vocabulary, target.device)
    if adjustments is not None:
        logits_11V = adjustments.apply(logits_11V, None)
    rows = RowSampling.of([prompt.sampling], target.vocabulary, target.device)
    drawn_11 = torch.full((1, 1), index, device=target.device)
    scores_V = warp_logits(logits_11V, rows, drawn_11)[0, 0]
    if prompt.sampling.temperature > 0:
        place = torch.tensor([[len(text)]], device=target.device)
        scores_V = scores_V + gumbel(prompt.rollout, prompt.sample, place, target.vocabulary)[0, 0]
    difference = (scores_V[first.tokens[index]] - scores_V[second.tokens[index]]).abs()
    return float(difference.nan_to_num(float("inf")))
