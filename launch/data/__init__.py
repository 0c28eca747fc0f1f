"""Text to samples, and problems with their rewards.

Begin at `samples.load_corpus` and `prompts.load_problems`.

readers: files and datasets, as documents.
corpus: the documents of a source in one order; a first look at them without torch.
tokenizer: of bytes, or of Hugging Face.
samples: tokens packed into rows on disk.
order: which sample is next, over all nodes, with and without a hub.
prompt_rows, prompts: rows of a source of problems; problems as the policy reads them.
curriculum: which problem is next, by the share that was solved.
rewards: the reward functions of a configuration.

`launch.node` trains on both; `launch.processes` checks them before anything starts.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.data.corpus import check_data, documents, is_held_out
    from aedit.launch.data.curriculum import Curriculum, solved_of
    from aedit.launch.data.order import LeasedOrder, Order, SampleOrder, first_free
    from aedit.launch.data.prompt_rows import check_source
    from aedit.launch.data.prompts import AnswerTokens, ProblemSet, load_problems
    from aedit.launch.data.readers import Document
    from aedit.launch.data.rewards import check_rewards, need_answer, reward_pool
    from aedit.launch.data.samples import Corpus, batch, evaluation_indices, load_corpus
    from aedit.launch.data.tokenizer import ByteTokenizer, CorpusTokenizer, load_tokenizer

__all__ = [
    "AnswerTokens",
    "ByteTokenizer",
    "Corpus",
    "CorpusTokenizer",
    "Curriculum",
    "Document",
    "LeasedOrder",
    "Order",
    "ProblemSet",
    "SampleOrder",
    "batch",
    "check_data",
    "check_rewards",
    "check_source",
    "documents",
    "evaluation_indices",
    "first_free",
    "is_held_out",
    "load_corpus",
    "load_problems",
    "load_tokenizer",
    "need_answer",
    "reward_pool",
    "solved_of",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
