"""Rewards of other packages: `gym` (reasoning-gym, extra `gym`) and `math` (math-verify, extra `math`)."""

import importlib
import re
from typing import Any

from aedit.spec_rollout.rl.rewards.built_in import answers, text_of
from aedit.spec_rollout.rl.tasks.gym import entry_and_source

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym_reward(completions: list[Any], **columns: Any) -> list[float]:
    """Return the score that the generator of reasoning-gym gives the completion, from 0 to 1.

    Only the text in the last `<answer>` tag counts if there is one. The problem is generated again from the
    column `gym`, as its score may depend on more than the answer.
    """
    if "gym" not in columns:
        raise ValueError('the reward "gym" needs prompts.source = "gym:NAME", whose rows have a column gym')
    _package("reasoning_gym", "gym")
    scores = []
    for completion, origin in zip(map(text_of, completions), columns["gym"], strict=True):
        entry, source = entry_and_source(origin)
        tagged = _TAGGED.findall(completion)
        given = (tagged[-1] if tagged else completion).strip()
        scores.append(float(source.score_answer(given, entry)))
    return scores


def math_reward(completions: list[Any], *, answer_key: str = "answer", **columns: Any) -> list[float | None]:
    """Return 1 where math-verify finds the completion's result equal to the answer, else 0.

    None where the answer itself cannot be read.
    """
    verify = _package("math_verify", "math")
    values: list[float | None] = []
    for completion, answer in zip(map(text_of, completions), answers(columns, answer_key), strict=True):
        text = str(answer)
        right = verify.parse(text if "\\" in text or "$" in text else f"${text}$")
        values.append(float(verify.verify(right, verify.parse(completion))) if right else None)
    return values


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"the reward {extra!r} needs a package: pip install 'aedit[{extra}]' ({error})"
        ) from None
