"""Text to samples: readers, tokenizers, packing, order and leases."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.data.corpus import Document, documents, is_held_out
    from aedit.launch.data.curriculum import Curriculum, solved_of
    from aedit.launch.data.leased import LeasedOrder
    from aedit.launch.data.order import Order, SampleOrder, first_free
    from aedit.launch.data.preflight import check_data
    from aedit.launch.data.prompt_rows import check_source
    from aedit.launch.data.prompts import ProblemSet, load_problems
    from aedit.launch.data.rewards import check_rewards, need_answer, reward_pool
    from aedit.launch.data.samples import Corpus, batch, evaluation_indices, load_corpus
    from aedit.launch.data.supervised import AnswerTokens
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
