"""Built-in rewards: exact, numeric, regex, format (1 or 0 per completion); gym and math of other packages."""

import importlib
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from aedit.spec_rollout.rl.tasks import entry_and_source

MAX_DIGITS = 1000
"""Longer numbers are no numbers: they would take long to compare."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?|(?<!\w)[-+]?\.\d+"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_reward(
    completions: list[Any], *, answer_key: str = "answer", ignore_case: bool = False, **columns: Any
) -> list[float]:
    """Return 1 where the completion is the answer, up to white space around it."""

    def plain(text: object) -> str:
        stripped = str(text).strip()
        return stripped.casefold() if ignore_case else stripped

    pairs = zip(map(text_of, completions), answers(columns, answer_key), strict=True)
    return [float(plain(completion) == plain(answer)) for completion, answer in pairs]


def numeric_reward(
    completions: list[Any], *, answer_key: str = "answer", tolerance: float = 0.0, **columns: Any
) -> list[float]:
    r"""Return 1 where the completion's final number equals the answer's: 1,000 is 1e3, and 1/2 is 0.5.

    The final number is the one after the last `####`, else in the last `\boxed{}`, else the last one.

    tolerance: largest difference relative to the answer that counts as equal.
    """
    values = []
    for completion, answer in zip(map(text_of, completions), answers(columns, answer_key), strict=True):
        right, found = final_number(str(answer)), final_number(completion)
        if right is None:
            raise ValueError(f"the answer {str(answer)[:60]!r} has no number")
        close = found is not None and abs(found - right) <= Fraction(tolerance) * abs(right)
        values.append(float(close))
    return values


def regex_reward(
    completions: list[Any], *, pattern: str = "", answer_key: str = "answer", **columns: Any
) -> list[float]:
    """Return 1 where `pattern` is found in the completion.

    If the pattern has a group `(?P<answer>...)`, its text must also be the answer.
    """
    if not pattern:
        raise ValueError('reward.options: the reward "regex" needs "regex.pattern"')
    expression = re.compile(pattern, re.DOTALL)
    if "answer" not in expression.groupindex:
        return [float(expression.search(text_of(completion)) is not None) for completion in completions]
    pairs = zip(map(text_of, completions), answers(columns, answer_key), strict=True)
    return [
        float(
            any((match["answer"] or "").strip() == str(answer).strip() for match in expression.finditer(text))
        )
        for text, answer in pairs
    ]


def format_reward(completions: list[Any], *, tags: str = "think,answer", **columns: Any) -> list[float]:
    """Return 1 where the completion is these tags in order, each once, and nothing outside of them."""
    names = [re.escape(name.strip()) for name in tags.split(",")]
    whole = re.compile(r"\s*" + r"\s*".join(f"<{n}>((?:(?!</?{n}>).)*)</{n}>" for n in names) + r"\s*", re.S)
    return [float(whole.fullmatch(text_of(completion)) is not None) for completion in completions]


def text_of(completion: Any) -> str:
    """Return the text of a completion: itself, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


def answers(columns: dict[str, Any], answer_key: str) -> Sequence[Any]:
    """Return the column of the right answers, or raise ValueError that names it."""
    if answer_key not in columns:
        names = ", ".join(sorted(set(columns) - {"prompts", "completion_ids"})) or "none"
        raise ValueError(
            f"prompts.answer_key = {answer_key!r} is no column of the prompts; they have: {names}"
        )
    found: Sequence[Any] = columns[answer_key]
    return found


def final_number(text: str) -> Fraction | None:
    """Return the final number of a text (see `numeric_reward`), or None if there is none."""
    if "####" in text:
        text = text.rpartition("####")[2]
    elif (boxed := last_boxed(text)) is not None:
        text = boxed
    text = _FRACTION.sub(r" \1/\2 ", text)
    found = [match.group() for match in _NUMBER.finditer(text)]
    return exact_number(found[-1]) if found else None


def exact_number(text: str) -> Fraction | None:
    """Return the number that `text` writes, exactly, or None if it is none or too long."""
    plain = re.sub(r"[,$\s]", "", text)
    exponent = re.search(r"[eE][-+]?(\d+)", plain)
    if len(plain) > MAX_DIGITS or (exponent and int(exponent[1]) > MAX_DIGITS):
        return None
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` with balanced braces holds, or None if there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : place]
        start = text.rfind("\\boxed{", 0, start)
    return None


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
