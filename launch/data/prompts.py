"""Problems of a reinforcement-learning run: prompts as the policy reads them, with the columns of rewards.

`AnswerTokens` makes the samples of the supervised warm-up: prompt, right answer, end of text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b, sha256

import torch
from torch import Tensor

from aedit.launch.config import PromptConfig
from aedit.launch.data.prompt_rows import KEY, source_rows
from aedit.launch.data.tokenizer import CorpusTokenizer
from aedit.spec_rollout.rl import Messages, Problem
from aedit.types import UserError, first_line


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """All problems of a source. Equal on all nodes that have the same source, seed and tokenizer."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    """Never trained on. No prompt is in both parts."""
    fingerprint: str
    """Digest of all problems: nodes and checkpoints with the same one have the same stream of prompts."""


def load_problems(
    config: PromptConfig,
    tokenizer: CorpusTokenizer,
    *,
    seed: int = 0,
    longest: int = 0,
    needs_answer: bool = True,
) -> ProblemSet:
    """Return the problems of `config.source`, divided by hash of the prompt.

    Args:
        config: Source and columns.
        tokenizer: Tokenizer of the policy.
        seed: Seed of generators.
        longest: Most tokens of a prompt, `data.seq_len` less `rl.sampling.max_new_tokens`; 0: no limit.
        needs_answer: Each row must have the column of the right answer.

    Raises:
        UserError: The source cannot be used, a row has no such column or another type, a prompt is empty or
            too long, or there are fewer than two different prompts.
    """
    columns = [(config.prompt_key, "prompts.prompt_key")]
    columns += [(config.answer_key, "prompts.answer_key")] if needs_answer else []
    problems = []
    for index, (name, row) in enumerate(source_rows(config, seed)):
        for column, key in columns:
            if column not in row:
                close = get_close_matches(column, list(row), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; its columns are {', '.join(row)}"
                raise UserError(f"{key} = {column!r} is missing in {name}{hint}")
        prompt = _prompt(config, name, row[config.prompt_key])
        tokens = prompt_tokens(prompt, tokenizer, chat_template=config.chat_template, name=name)
        if longest and len(tokens) > longest:
            raise UserError(
                f"{KEY}: the prompt of {name} has {len(tokens)} tokens, and data.seq_len -"
                f" rl.sampling.max_new_tokens leaves {longest}; raise data.seq_len, lower"
                " rl.sampling.max_new_tokens, or leave the row out"
            )
        others = {column: value for column, value in row.items() if column != config.prompt_key}
        problems.append(Problem(index=index, prompt=prompt, tokens=tokens, columns=others))
    if not problems:
        raise UserError(
            f"{KEY} = {config.source!r} has no rows, expected at least 2 different prompts; add some"
        )
    places = {id(problem): prompt_position(problem.prompt) for problem in problems}
    different = sorted(set(places.values()))
    if len(different) < 2:
        raise UserError(
            f"{KEY} = {config.source!r} has one prompt only, expected at least 2 different ones, as some are"
            " held out for evaluation; add some"
        )
    # The nearest share that leaves a prompt in either part.
    share = min(max(config.held_out, different[1]), different[-1])
    held_out = tuple(problem for problem in problems if places[id(problem)] < share)
    train = tuple(problem for problem in problems if places[id(problem)] >= share)
    digest = sha256(_canonical([config.held_out, config.curriculum]))
    for problem in problems:
        digest.update(_canonical([problem.prompt, problem.tokens, dict(problem.columns)]))
    return ProblemSet(train, held_out, digest.hexdigest()[:16])


def prompt_position(prompt: str | Messages) -> float:
    """Return the hash of the prompt as a number in [0, 1). Problems below the held-out share are held out."""
    digest = blake2b(_canonical(prompt), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def prompt_tokens(
    prompt: str | Messages,
    tokenizer: CorpusTokenizer,
    *,
    chat_template: bool = True,
    name: str = "the prompt",
) -> tuple[int, ...]:
    """Return the ids of a prompt: by the tokenizer's chat template where it has one, else of the text.

    Raises UserError for messages without a template, a prompt that the template or the tokenizer does not
    accept, and one without tokens.
    """
    try:
        ids = tokenizer.encode_chat(_messages(prompt)) if chat_template else None
        if ids is None and isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
    except Exception as error:  # a template may raise anything, such as for a role that it does not know
        why = first_line(error)
        raise UserError(f"{KEY}: the tokenizer does not accept the prompt of {name}: {why}") from error
    if ids is None:
        why = "the tokenizer has no chat template" if chat_template else "prompts.chat_template is false"
        raise UserError(f"{KEY}: {name} is a list of messages, but {why}; write the prompts as text")
    if len(ids) == 0:
        raise UserError(
            f"{KEY}: {name} has an empty prompt, and the tokenizer puts no token before it; expected at"
            " least one token; leave the row out"
        )
    return tuple(ids.tolist())


def prompt_text(
    prompt: str | Messages, tokenizer: CorpusTokenizer, *, chat_template: bool = True
) -> tuple[str, bool]:
    """Return the text whose ids `prompt_tokens` returns, and whether the chat template has written it."""
    rendered = tokenizer.render(_messages(prompt)) if chat_template else None
    if rendered is not None:
        return rendered, True
    assert isinstance(prompt, str), "prompt_tokens refuses messages without a template"
    return prompt, False


def _messages(prompt: str | Messages) -> Messages:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def _prompt(config: PromptConfig, row: str, value: object) -> str | Messages:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return tuple(value)
    raise UserError(
        f"prompts.prompt_key: column {config.prompt_key!r} of {row} holds {json.dumps(value)[:60]},"
        " expected text or a list of messages with role and content"
    )


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Rows of prompt and answer for any problems of a source.

    Args:
        tokenizer: Tokenizer of the policy.
        answer_key: Column of the right answer.
        seq_len: Most tokens of a row.
        chat_template: The prompts have the chat template of the tokenizer, where it has one.
    """

    tokenizer: CorpusTokenizer
    answer_key: str
    seq_len: int
    chat_template: bool = True

    def row(self, problem: Problem) -> tuple[tuple[int, ...], int]:
        """Return the tokens of prompt, answer and end of text, and the number of those of the prompt.

        Raises UserError if there is no such column, or the row is longer than `seq_len`.
        """
        if problem.columns.get(self.answer_key) is None:
            raise UserError(
                f"prompts.answer_key = {self.answer_key!r}: problem {problem.index} has no answer there,"
                " which rl.supervised_steps needs; set it to the column of the right answer"
            )
        text = str(problem.columns[self.answer_key])
        prompt, is_chat = prompt_text(problem.prompt, self.tokenizer, chat_template=self.chat_template)
        answer = self.tokenizer.encode_answer(prompt, text, is_chat=is_chat).tolist()
        tokens = (*problem.tokens, *answer, self.tokenizer.eos_id)
        if len(tokens) > self.seq_len:
            raise UserError(
                f"data.seq_len = {self.seq_len}: prompt and answer of problem {problem.index} have"
                f" {len(tokens)} tokens with the end of text; raise data.seq_len, or leave the problem out"
            )
        return tokens, len(problem.tokens)

    def batch(self, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
        """Return tokens and mask of one row per problem, on CPU; raises what `row` raises.

        tokens_BT: int64, (rows, tokens), filled up at the ends with the end-of-text token. mask_BT: bool, the
        tokens to predict, each from those before it; False at the first place.
        """
        rows = [self.row(problem) for problem in problems]
        shape = len(rows), max(len(tokens) for tokens, _ in rows)
        tokens_BT = torch.full(shape, self.tokenizer.eos_id, dtype=torch.int64)
        mask_BT = torch.zeros(shape, dtype=torch.bool)
        for b, (tokens, prompt) in enumerate(rows):
            tokens_BT[b, : len(tokens)] = torch.tensor(tokens)
            mask_BT[b, prompt : len(tokens)] = True
        return tokens_BT, mask_BT
