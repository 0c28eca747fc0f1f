"""`aedit train-drafter`: train a drafter on rollouts of the policy with which a run begins."""

import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from aedit.launch.cli.export import check_out_folder, written_whole
from aedit.launch.config import RunConfig
from aedit.launch.data import load_problems, load_tokenizer
from aedit.launch.node import StopDecoder, build_model, draft_form, run_sampling, taps_of
from aedit.spec_rollout.drafters import write_drafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.rl import Problem
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    FeatureSample,
    LossConfig,
    RingShape,
    RowFeatures,
    train_drafter,
)
from aedit.types import UserError

FIRST_ROLLOUT = 1 << 32
"""Keys of samples from here on are of no run: a drafter does not learn the noise that it will meet."""
ROWS = 32
MAX_TOKENS = 1024
"""Prompt and answer."""
LEAST_TOKENS = 1024
LR = 3e-3
"""First learning rate; it falls to a twentieth."""
CHAIN = 4


def write_trained_drafter(config: RunConfig, out: Path, *, minutes: float, num_tokens: int) -> None:
    """Train a drafter of the form `drafter.form` with the loss `drafter.loss`, and write it to `out`.

    It learns from answers to the run's problems, sampled as the run samples them.

    Args:
        config: Configuration of a run of reinforcement learning whose model is pretrained.
        out: Directory that does not exist or is empty; written completely or not at all.
        minutes: Duration of the training, after the rollouts.
        num_tokens: Tokens of the rollouts, prompts included.

    Raises:
        UserError: The configuration or an argument does not fit, or `out` cannot be written.
    """
    if not minutes > 0 or minutes == float("inf"):
        raise UserError(f"--minutes: must be above 0, got {minutes}")
    if num_tokens < LEAST_TOKENS:
        raise UserError(f"--tokens: must be at least {LEAST_TOKENS}, got {num_tokens}")
    check_out_folder(out, "--out")
    if not config.prompts.source:
        raise UserError("prompts.source: must name the problems of the run, as a drafter learns from answers")
    if not config.model.pretrained:
        raise UserError(
            "model.pretrained: must name the policy with which the run begins, as a new one changes at once"
        )
    say = Console(stderr=True, highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(config.data)
    longest = config.data.seq_len - config.rl.sampling.max_new_tokens
    problems = load_problems(
        config.prompts, tokenizer, seed=config.seed, longest=longest, needs_answer=False
    ).train
    model: Any = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    model.train(False).requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")
    sampling = run_sampling(config, model, tokenizer.eos_id, config.rl.sampling.temperature)
    name = config.model.pretrained
    say.print(f"aedit: {name}: {num_tokens:,} tokens of rollouts, then {minutes:g} min of training")
    try:
        samples = collect_rollouts(
            model,
            _prompts(problems, sampling, config.seed),
            num_tokens,
            taps=taps_of(config.drafter, model),
            max_tokens=config.data.seq_len,
            tokenizer=StopDecoder(tokenizer),
        )
        training = DraftTrainingConfig(lr=LR, loss=LossConfig(tokens=config.drafter.loss))
        form = draft_form(config.drafter)
        layer, match = train_drafter(model, samples, training, minutes, config.seed, form=form)
    except ValueError as error:
        raise UserError(f"{name}: no drafter for this policy: {error}") from None
    with written_whole(out) as writing:
        write_drafter(layer, model.config, writing, verifier=name)
    accepted, reached = 0.0, 1.0
    for chance in match.overlap_D[:CHAIN]:
        reached *= chance
        accepted += reached
    print(f"{out}: of {CHAIN} drafted tokens {accepted:.2f} are accepted on rollouts that it has not seen")
    print(f'set drafter.pretrained = "{out}"')


def collect_rollouts(
    model: Any,
    asked: Iterator[Prompt],
    num_tokens: int,
    *,
    taps: Sequence[int] = (),
    max_tokens: int = MAX_TOKENS,
    tokenizer: Any = None,
) -> list[FeatureSample]:
    """Return the policy's rollouts with its hidden states, `num_tokens` of them or slightly more.

    Args:
        model: `transformers` causal language model.
        asked: Prompts; as many as are needed are taken.
        num_tokens: Tokens of prompts and answers together.
        taps: Layers whose outputs are part of a feature.
        max_tokens: Most tokens of a prompt and its answer.
        tokenizer: Decodes text, where prompts have stop strings; see `Engine`.
    """
    target = make_target(model, rows=ROWS, max_tokens=max_tokens, taps=tuple(taps))
    engine, width = Engine(target, tokenizer=tokenizer), target.feature_size
    most = num_tokens + ROWS * max_tokens  # and as much again for pages that are not full
    shape = RingShape.within(2 * most * RingShape(width, torch.float32, 1).row_bytes, width, torch.float32)
    buffer = np.zeros(shape.num_bytes, np.uint8)
    engine.sink = RowFeatures(FeatureRing(buffer, shape))
    made = 0
    for prompt in asked:
        engine.add(prompt)
        while len(engine.running) + len(engine.waiting) >= ROWS and made < num_tokens:
            made += sum(len(one.tokens) + len(one.prompt.tokens) for one in engine.step().finished)
        if made >= num_tokens:
            break
    engine.close()
    reader = FeatureReader(buffer)
    return [sample for entry in reader.entries() if (sample := reader.read(entry)) is not None]


def _prompts(problems: Sequence[Problem], sampling: Sampling, seed: int) -> Iterator[Prompt]:
    """Yield the problems in random order, again and again."""
    rng = random.Random(seed)
    for number in count():
        if number % len(problems) == 0:
            order = rng.sample(problems, len(problems))
        tokens = tuple(order[number % len(problems)].tokens)
        yield Prompt(tokens=tokens, rollout=FIRST_ROLLOUT, sample=number, sampling=sampling)
