"""Samples of the supervised warm-up: prompt, right answer and end of text; the loss is on the latter two."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.launch.data.prompts import prompt_text
from aedit.launch.data.tokenizer import CorpusTokenizer
from aedit.spec_rollout.rl import Problem
from aedit.types import UserError


@dataclass(frozen=True, slots=True)
class SupervisedBatch:
    """Rows of equal length, filled up at their ends with the end-of-text token."""

    tokens_BT: Tensor
    """int64, (rows, tokens), on CPU."""
    mask_BT: Tensor
    """bool, (rows, tokens): tokens to predict, each from those before it. False at the first place."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens to predict."""
        return int(self.mask_BT.sum())


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

    def batch(self, problems: Sequence[Problem]) -> SupervisedBatch:
        """Return one row per problem; raises what `row` raises."""
        rows = [self.row(problem) for problem in problems]
        shape = len(rows), max(len(tokens) for tokens, _ in rows)
        tokens_BT = torch.full(shape, self.tokenizer.eos_id, dtype=torch.int64)
        mask_BT = torch.zeros(shape, dtype=torch.bool)
        for b, (tokens, prompt) in enumerate(rows):
            tokens_BT[b, : len(tokens)] = torch.tensor(tokens)
            mask_BT[b, prompt : len(tokens)] = True
        return SupervisedBatch(tokens_BT, mask_BT)
