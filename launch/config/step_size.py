"""Samples and tokens of an inner step of a node, from its configuration."""

from aedit.launch.config.config import RunConfig


def samples_per_step(config: RunConfig) -> int:
    """Return the samples, or prompts, that a node draws per inner step, rounded up."""
    if not config.prompts.source:
        return config.train.batch_size * config.train.accumulate
    return -(-config.rl.groups // (config.rl.batches * config.rl.epochs))


def tokens_per_step(config: RunConfig) -> int:
    """Return the tokens that an inner step of a node counts for: with rewards, its rollouts.

    Their lengths depend on the policy, and a node must not count for more because its answers are longer.
    """
    if not config.prompts.source:
        return config.train.batch_size * config.train.accumulate * config.data.seq_len
    return samples_per_step(config) * config.rl.group_size
