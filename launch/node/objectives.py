"""Data and objective of a node, from its configuration: text, or problems and rewards."""

from dataclasses import dataclass
from pathlib import Path

from aedit.launch.config import RunConfig
from aedit.launch.data import Corpus, CorpusTokenizer, ProblemSet, load_corpus, load_problems, need_answer
from aedit.launch.node.objective import NodeParts, Objective, TextObjective
from aedit.launch.node.rl_build import make_policy_objective


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Samples of a run; one of the two."""

    corpus: Corpus | None = None
    problems: ProblemSet | None = None

    @property
    def num_samples(self) -> int:
        """Return the number of samples in an epoch: texts, or prompts."""
        if self.problems is not None:
            return len(self.problems.train)
        assert self.corpus is not None
        return len(self.corpus.train)

    @property
    def facts(self) -> dict[str, object]:
        """Return the properties that must be equal for nodes and checkpoints of one run."""
        if self.problems is not None:
            return {"problems": self.problems.fingerprint}
        return {"samples of the corpus": self.num_samples}


def load_data(config: RunConfig, tokenizer: CorpusTokenizer, directory: Path) -> TrainingData:
    """Return the samples of the run. directory: of packed text.

    Raises UserError for an unusable source.
    """
    if not config.prompts.source:
        return TrainingData(corpus=load_corpus(config.data, tokenizer, directory))
    problems = load_problems(
        config.prompts,
        tokenizer,
        seed=config.seed,
        longest=config.data.seq_len - config.rl.sampling.max_new_tokens,
        needs_answer=need_answer(config.reward) or config.rl.supervised_steps > 0,
    )
    return TrainingData(problems=problems)


def make_objective(data: TrainingData, parts: NodeParts) -> Objective:
    """Return the objective of a node. Raises UserError if the model or the rewards cannot be used."""
    if data.problems is not None:
        return make_policy_objective(data.problems, parts)
    assert data.corpus is not None
    return TextObjective(
        config=parts.config, world=parts.world, corpus=data.corpus, order=parts.order, sync=parts.sync
    )
