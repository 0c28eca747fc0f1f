"""Reward functions of a run, as its configuration names them. Imports no torch."""

from aedit.launch.config.rl import PromptConfig, RewardConfig
from aedit.spec_rollout.rl.rewards.reward import BUILT_IN, RewardSpec, Scalar
from aedit.types import UserError

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
