"""Configuration of a very small policy that trains on rewards, for runs in real processes."""

TOML = """
name = "x"
dir = "{directory}"
device = "cpu"
restarts = 2
[model]
sizes = {{ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 2 }}
[data]
seq_len = 16
[prompts]
source = "aedit.spec_rollout.rl.tasks.arithmetic:rows"
options = {{ levels = 1 }}
{prompts}
[reward]
functions = ["regex"]
options = {{ "regex.pattern" = "[0-9+ -/]" }}
[rl]
groups = {groups}
group_size = 3
eval_every = 0
eval_problems = 2
{rl}
[rl.sampling]
max_new_tokens = 4
[drafter]
kind = "off"
"""


def rl_toml(directory, *, groups, prompts, tables, rl=""):
    """Return the configuration of a run named x. prompts, rl: more of their tables; tables: what follows."""
    return TOML.format(directory=directory, groups=groups, prompts=prompts, rl=rl) + tables
