"""Training loop of a node whose objective is the reward of rollouts."""

from aedit.launch.node.rl_objective import PolicyObjective
from aedit.launch.node.train import TrainingNode


def train_policy(node: TrainingNode, policy: PolicyObjective) -> None:
    """Train until the end of the run's budget or a stop request; then save and leave with the other nodes.

    policy: the objective of `node`.
    """
    with node.in_run():
        while node.goes_on():
            node.stop.check()
            if policy.warm_up_ends(node.budget.progress()):
                node.evaluate()
            node.begin_step()
            if policy.warms_up:
                policy.take_answers()
            else:
                policy.update_engine()  # lands; one policy version begins all new groups of the batch
                policy.take_groups()  # prompts, rollouts, rewards
            while policy.has_steps() and node.goes_on():
                node.accumulate_gradients()  # advantages, policy loss
                node.sync.average_gradients()  # during the warm-up of `edit` only
                node.inner_step()
                node.sync.step()  # opens a round if one is due
                node.record_step()
            node.evaluate_if_due()
            node.save_after_a_round()
