"""Build the objective of reinforcement learning from the configuration."""

from contextlib import ExitStack
from functools import partial

from torch import nn

from aedit.launch.config import RunConfig
from aedit.launch.data import AnswerTokens, Curriculum, ProblemSet, reward_pool
from aedit.launch.node.model import stop_tokens
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_drafter import TrainerDeaths
from aedit.launch.node.rl_evaluate import FIRST_KEY
from aedit.launch.node.rl_groups import GroupStream
from aedit.launch.node.rl_objective import PolicyObjective
from aedit.launch.node.rl_pipeline import GroupPipeline
from aedit.launch.node.rl_policy import PolicyGradient, without_dropout
from aedit.launch.node.rl_records import RLRecords, Waits
from aedit.launch.node.rl_servers import make_training_audit
from aedit.launch.node.rl_warm_up import WarmUp
from aedit.launch.node.rl_workers import make_source
from aedit.launch.node.sharding import make_model
from aedit.launch.records import Recorder
from aedit.spec_rollout.rl import Group, RewardReport
from aedit.spec_rollout.sampling import Sampling


def make_policy_objective(problems: ProblemSet, parts: NodeParts) -> PolicyObjective:
    """Return the objective of a node; closing it ends its processes.

    Raises UserError if the model has no engine or a reward cannot be used.
    """
    config, sync, world = parts.config, parts.sync, parts.world
    without_dropout(sync.model)
    longest = max(len(problem.tokens) for problem in (*problems.train, *problems.held_out))
    curriculum = Curriculum.of(problems.train) if config.prompts.curriculum else None
    waits = Waits(sync)
    with ExitStack() as opened:
        rewards = opened.enter_context(reward_pool(config, (*problems.train, *problems.held_out)))
        source, online, learner = make_source(parts, longest, waits.window)
        pipeline = GroupPipeline(
            source=source,
            rewards=rewards,
            decode=parts.tokenizer.decode,
            window=waits.window,
            report=partial(_record_faults, parts.recorder),
        )
        opened.pop_all()
    sync.idle = online
    if online is not None and parts.shared is not None:
        parts.shared.connect(online, sync.shards)
    stream = GroupStream(
        config=config.rl,
        order=parts.order,
        choose=curriculum.problem if curriculum else lambda position, index: problems.train[index],
        pipeline=pipeline,
        shards=sync.shards,
        sampling=_sampling(config, parts, config.rl.sampling.temperature),
        check_stop=parts.stop.check,
    )
    return PolicyObjective(
        config=config,
        sync=sync,
        stream=stream,
        gradient=PolicyGradient(
            config=config,
            model=sync.model,
            reference=_reference(config, parts),
            shards=sync.shards,
            device=world.device,
            learner=learner,
            audit=make_training_audit(config, source),
        ),
        warm_up=_warm_up(problems, parts),
        records=RLRecords(
            config=config, sync=sync, pipeline=pipeline, waits=waits, shards=sync.shards, online=online
        ),
        held_out=problems.held_out,
        curriculum=curriculum,
        greedy=_sampling(config, parts, 0.0),
        online=online,
        deaths=None if online is None else TrainerDeaths(online, parts.recorder.event),
        directory=parts.recorder.directory,
        started=config.rl.supervised_steps == 0,
    )


def _warm_up(problems: ProblemSet, parts: NodeParts) -> WarmUp:
    config = parts.config
    return WarmUp(
        config=config,
        model=parts.sync.model,
        problems=problems.train,
        answers=AnswerTokens(
            parts.tokenizer,
            config.prompts.answer_key,
            config.data.seq_len,
            chat_template=config.prompts.chat_template,
        ),
        world=parts.world,
    )


def _sampling(config: RunConfig, parts: NodeParts, temperature: float) -> Sampling:
    chosen = config.rl.sampling
    return Sampling(
        temperature=temperature,
        max_new_tokens=chosen.max_new_tokens,
        stop_tokens=stop_tokens(parts.sync.model, parts.tokenizer.eos_id),
        stop_strings=chosen.stop,
    )


def _reference(config: RunConfig, parts: NodeParts) -> nn.Module | None:
    """Return the policy at the start: the configured model itself, equal on all nodes and after a resume."""
    if not config.rl.kl:
        return None
    model = make_model(config, parts.tokenizer, parts.world)
    without_dropout(model)
    return model.requires_grad_(False)


def _record_faults(recorder: Recorder, group: Group, report: RewardReport) -> None:
    """Record the calls of reward functions that failed."""
    for fault in report.events:
        recorder.event(
            "reward_error",
            function=fault.function,
            sample=_name(fault.sample),
            line=fault.line,
            message=fault.message,
        )


def _name(sample: str) -> str:
    """Return `position/sample` of a fault as people know it: held-out problems have keys of their own."""
    position, slash, number = sample.partition("/")
    held_out = int(position) - FIRST_KEY
    return f"held-out {held_out}{slash}{number}" if held_out >= 0 else sample
