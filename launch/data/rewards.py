"""Reward functions of a run, as its configuration names them. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from aedit.launch.config import PromptConfig, RewardConfig, RunConfig
from aedit.launch.data.prompt_rows import source_rows
from aedit.spec_rollout.rl import BUILT_IN, Problem, RewardPool, RewardSpec, Scalar, answered
from aedit.types import UserError

EXAMPLES = 4
"""Problems on which a function is called before the run: one that fails on all of them is refused."""

WITH_ANSWER = {"exact", "numeric", "regex", "math"}
"""Built-in functions that read the column of the right answer; `regex` does if its pattern has that group."""


def reward_specs(config: RewardConfig, prompts: PromptConfig) -> tuple[RewardSpec, ...]:
    """Return what `RewardPool` needs. Raises UserError for unknown names, and options that no function has.

    Whether a function can be imported and has an option is seen by the pool's processes (`RewardPool.check`).
    """
    weights = config.weights or (1.0,) * len(config.functions)
    options: dict[str, dict[str, Scalar]] = {name: {} for name in config.functions}
    for key, value in config.options.items():
        function, dot, option = key.partition(".")
        if not dot or function not in options or function not in BUILT_IN:
            names = ", ".join(name for name in options if name in BUILT_IN) or "none"
            raise UserError(
                f"reward.options has the key {key!r}, expected FUNCTION.OPTION of a built-in function in"
                f" reward.functions, which are: {names}"
            )
        options[function][option] = value
    for name in options:
        if name in WITH_ANSWER:
            options[name]["answer_key"] = prompts.answer_key
    try:
        return tuple(
            RewardSpec(function=name, weight=weight, options=options[name])
            for name, weight in zip(config.functions, weights, strict=True)
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def need_answer(config: RewardConfig) -> bool:
    """Return whether a reward of the run reads the column of the right answer."""
    return bool((WITH_ANSWER - {"regex"}) & set(config.functions))


def reward_pool(config: RunConfig, problems: Sequence[Problem], *, workers: int = 0) -> RewardPool:
    """Return the processes that compute the rewards of `problems`, after a call of each function.

    workers: number of processes; 0: `reward.workers`. Raises UserError if a function cannot be imported,
    requires an argument that is no column of all problems, or fails on examples.
    """
    reward = config.reward
    columns = set.intersection(*(set(problem.columns) for problem in problems))
    pool = RewardPool(
        reward_specs(reward, config.prompts),
        workers=workers or reward.workers,
        time_limit_s=reward.time_limit_s,
        first_time_limit_s=reward.first_time_limit_s,
        max_failed_groups=reward.max_failed_groups,
        columns=sorted(columns),
        on_error=reward.on_error,
    )
    try:
        # Groups of two equal answers: the right one, or the text of the prompt.
        shown = [
            (problem, [str(problem.columns.get(config.prompts.answer_key, problem.prompt))] * 2)
            for problem in problems[:EXAMPLES]
        ]
        pool.check((answered(problem, answers), answers) for problem, answers in shown)
    except (ValueError, TimeoutError) as error:
        pool.close()
        raise UserError(str(error)) from None
    except BaseException:
        pool.close()
        raise
    return pool


def check_rewards(config: RunConfig) -> None:
    """Call the reward functions on the first problems of the source. Raises UserError as `reward_pool` does.

    A dataset of the Hugging Face hub is not loaded for that, and a row without a prompt is not called with:
    the nodes report it.
    """
    prompts = config.prompts
    if prompts.source.startswith("hf:"):
        reward_specs(config.reward, prompts)
        return
    few = replace(prompts, size=EXAMPLES) if prompts.source.startswith("gym:") else prompts
    problems = []
    for index, (_, row) in enumerate(islice(source_rows(few, config.seed), EXAMPLES)):
        columns = dict(row)
        prompt = columns.pop(prompts.prompt_key, None)
        if prompt and isinstance(prompt, str | list):
            prompt = prompt if isinstance(prompt, str) else tuple(prompt)
            problems.append(Problem(index=index, prompt=prompt, tokens=(), columns=columns))
    if problems:
        reward_pool(config, problems, workers=1).close()
