"""Tests byte and Hugging Face tokenizers: same ids in memory and in the files written."""

import json
import shutil
from functools import cache
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.full_disk import small_files
from kit.served_models import sentencepiece_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from aedit.launch.config import DataConfig
from aedit.launch.data import AnswerTokens, load_tokenizer
from aedit.launch.data.prompts import prompt_text, prompt_tokens
from aedit.launch.data.tokenizer import _PROBE, EOS, _remove_special_tokens, token_dtype
from aedit.launch.node import StopDecoder
from aedit.spec_rollout import Problem
from aedit.spec_rollout.http import TextCodec
from aedit.spec_rollout.sampling import StopStrings
from aedit.types import UserError

AWKWARD = [
    "",
    " ",
    "a  b\r\n\t",
    "caf\u00e9 \u4e2d\u6587 \U0001f600",
    f"quoted {EOS} text",
    "\x00\x7f\xa0\xad",
    "it's",
]


BYTE = load_tokenizer(DataConfig())


def loaded(place, **options):
    return load_tokenizer(DataConfig(tokenizer=str(place), **options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte")
    BYTE.save(directory)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a real byte-pair tokenizer."""
    directory = tmp_path_factory.mktemp("bpe")
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    fast.train_from_iterator(["the cat sat on the mat", "the dog sat on the log"] * 9, trainer)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.post_processor = begin  # many tokenizers put one in front unless told not to
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", bos_token="<s>").save_pretrained(
        directory
    )
    return directory


@given(st.text())
def test_bytes_are_the_utf8_of_the_text_and_come_back(text):
    tokenizer = BYTE
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_the_saved_byte_tokenizer_gives_the_same_ids(saved, text):
    ids = BYTE.encode(text).tolist()
    theirs = AutoTokenizer.from_pretrained(saved)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text


@given(st.lists(st.integers(0, 256), max_size=40))
def test_the_saved_byte_tokenizer_decodes_broken_utf8_alike(saved, ids):
    theirs = _loaded(saved)
    assert BYTE.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_saved_byte_tokenizer_knows_its_end_of_text(saved):
    theirs, ours = AutoTokenizer.from_pretrained(saved), BYTE
    assert (theirs.eos_token_id, len(theirs)) == (ours.eos_id, ours.vocab_size) == (256, 257)


def test_a_fingerprint_says_what_and_not_where(saved, trained, tmp_path):
    byte, bpe = BYTE, loaded(trained)
    bpe.save(tmp_path)
    assert loaded(saved).fingerprint == byte.fingerprint
    assert loaded(tmp_path).fingerprint == bpe.fingerprint
    assert bpe.fingerprint != byte.fingerprint


def test_a_fingerprint_sees_a_moved_end_of_text(trained, tmp_path):
    PreTrainedTokenizerFast.from_pretrained(trained, eos_token="<s>").save_pretrained(tmp_path)
    assert loaded(tmp_path).fingerprint != loaded(trained).fingerprint


@pytest.mark.parametrize("text", AWKWARD)
def test_a_hugging_face_tokenizer_loses_nothing_and_adds_what_it_adds_in_transformers(trained, text):
    tokenizer = loaded(trained)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint16
    assert (ids < tokenizer.vocab_size).all()
    assert ids.tolist() == AutoTokenizer.from_pretrained(trained)(text)["input_ids"]
    assert ids[0] == 0
    assert not np.isin([0, tokenizer.eos_id], ids[1:]).any()


def test_a_hugging_face_tokenizer_merges(trained):
    assert len(loaded(trained).encode("the cat")) < 5


def test_sixteen_bits_are_used_while_they_suffice():
    assert [token_dtype(n) for n in (2**16, 2**16 + 1)] == [np.uint16, np.uint32]


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    for name in (str(tmp_path), str(tmp_path / "none"), "no such name!"):
        with pytest.raises(UserError, match=r"data\.tokenizer = ") as error:
            loaded(name)
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_a_tokenizer_without_an_end_of_text_is_refused(trained, tmp_path):
    fast = Tokenizer.from_file(str(trained / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no eos token"):
        loaded(tmp_path)


@cache
def _loaded(directory):
    return AutoTokenizer.from_pretrained(directory)


def test_a_tokenizer_whose_files_are_elsewhere_is_refused(saved, tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "tokenizer"
    for each in (outside, folder):
        shutil.copytree(saved, each)
    shutil.copy(saved / "tokenizer.json", outside / "tokenizer.4.0.json")
    config = json.loads((saved / "tokenizer_config.json").read_text())

    def loads(**changes):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
        return loaded(folder)

    for name in ("../outside/tokenizer.4.0.json", str(outside / "tokenizer.4.0.json")):
        with pytest.raises(UserError, match="fast_tokenizer_files names"):
            loads(fast_tokenizer_files=["tokenizer.json", name])
    # Paths of another machine that nothing reads are in many models.
    harmless = {"name_or_path": str(outside), "vocab_file": str(outside / "vocab.json")}
    assert loads(**harmless, auto_map={"AutoTokenizer": [f"{outside}--x.T", None]}).eos_id == 256
    (folder / "tokenizer.json").unlink()
    for key in ("vocab_file", "merges_file", "vocab"):
        with pytest.raises(UserError, match=f"{key} names"):
            loads(tokenizer_class="GPT2Tokenizer", **{key: str(outside / "vocab.json")})


# --- special tokens around texts, with transformers as the oracle

BOS_CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
KINDS = {
    "plain": ("$A", None),
    "bos": ("<s> $A", None),
    "bos and eos": ("<s> $A </s>", None),
    "bos, also of the chat template": ("<s> $A", BOS_CHAT),
    "two before and one behind": ("<s> <x> $A <x>", None),
    "eos": ("$A </s>", None),
}
BEFORE = {"plain": 0, "eos": 0, "two before and one behind": 2}
BEHIND = {"bos and eos": 1, "eos": 1, "two before and one behind": 1}
TEXTS = ["", "the cat", " sat", "<s>the", "mat</s>", "12", "caf\u00e9 \U0001f600"]


@pytest.fixture(scope="module")
def kinds(trained, tmp_path_factory):
    """Return the folder of a tokenizer of each kind."""
    found = {}
    for number, (name, (around, chat)) in enumerate(KINDS.items()):
        fast = Tokenizer.from_file(str(trained / "tokenizer.json"))
        fast.add_special_tokens(["<x>"])
        special = [(each, fast.token_to_id(each)) for each in ("<s>", "</s>", "<x>")]
        fast.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
        wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", bos_token="<s>")
        wrapped.chat_template = chat
        found[name] = tmp_path_factory.mktemp(f"kind{number}")
        wrapped.save_pretrained(found[name])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_that_of_transformers_without_what_ends_a_text(kinds, kind):
    theirs, ours = AutoTokenizer.from_pretrained(kinds[kind]), loaded(kinds[kind])
    codec = TextCodec(theirs)
    for text in TEXTS:
        whole = theirs(text)["input_ids"]
        wanted = whole[: len(whole) - BEHIND.get(kind, 0)]
        assert ours.encode(text).tolist() == wanted
        assert list(codec.encode(text)) == wanted
        assert list(codec.encode(text, special=False)) == theirs(text, add_special_tokens=False)["input_ids"]
        if wanted:
            assert list(prompt_tokens(text, ours, chat_template=False)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_begins_as_a_prompt_and_ends_with_one_end_of_text(kinds, kind):
    theirs, ours = AutoTokenizer.from_pretrained(kinds[kind]), loaded(kinds[kind])
    before = theirs("")["input_ids"][: BEFORE.get(kind, 1)]
    for text in TEXTS:
        alone = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_document(text).tolist() == [*before, *alone, theirs.eos_token_id]


def test_a_chat_has_the_tokens_of_its_template_and_bos_once(kinds):
    place = kinds["bos, also of the chat template"]
    theirs, ours = AutoTokenizer.from_pretrained(place), loaded(place)
    messages = [{"role": "user", "content": "the cat"}]
    ids = prompt_tokens("the cat", ours)
    assert list(ids) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (ids[0], ids.count(0)) == (0, 1)
    assert ids == TextCodec(theirs).chat(messages, {"add_generation_prompt": True}, {})
    assert prompt_text("the cat", ours) == ("<s>[user]the cat[assistant]", True)


@pytest.mark.parametrize("kind", KINDS)
def test_none_means_none_here_and_in_the_saved_files(kinds, kind, tmp_path):
    theirs, ours = AutoTokenizer.from_pretrained(kinds[kind]), loaded(kinds[kind], special_tokens="none")
    ours.save(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        alone = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).tolist() == saved(text)["input_ids"] == alone
    assert loaded(tmp_path).fingerprint == ours.fingerprint


def test_files_that_cannot_leave_special_tokens_out_are_named(tmp_path, capsys):
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5}
    BertTokenizer(vocab=words, eos_token="[SEP]").save_pretrained(tmp_path)
    loaded(tmp_path).save(tmp_path / "as it is")
    assert capsys.readouterr().err == ""
    loaded(tmp_path, special_tokens="none").save(tmp_path / "none")
    assert "BertTokenizer puts special tokens around texts whenever it is loaded" in capsys.readouterr().err


def test_a_fingerprint_sees_what_stands_before_texts_and_is_that_of_older_builds_without(kinds):
    theirs = AutoTokenizer.from_pretrained(kinds["bos"])
    probe = theirs(_PROBE, add_special_tokens=False)["input_ids"]
    older = sha256(repr((sorted(theirs.get_vocab().items()), theirs.eos_token_id, probe)).encode())
    prints = {kind: loaded(place).fingerprint for kind, place in kinds.items()}
    assert prints["plain"] == prints["eos"] == older.hexdigest()[:16]
    assert prints["bos"] == prints["bos and eos"] != prints["plain"]
    assert loaded(kinds["bos"], special_tokens="none").fingerprint == prints["plain"]


def test_a_tokenizer_that_adds_tokens_by_code_cannot_leave_them_out():
    class Stubborn:
        eos_token_id, is_fast = 1, False

        def __call__(self, text, add_special_tokens=True, verbose=False):
            alone = [ord(character) for character in text]
            return {"input_ids": [7, *alone] if add_special_tokens else alone}

    with pytest.raises(UserError, match=r"data\.special_tokens = 'none': the tokenizer 'x' .* \[7\]"):
        _remove_special_tokens(Stubborn(), "x")


def test_an_empty_prompt_is_bos_or_refused(kinds):
    assert prompt_tokens("", loaded(kinds["bos"])) == (0,)
    for kind in ("plain", "eos"):
        with pytest.raises(UserError, match="has an empty prompt, and the tokenizer puts no token before it"):
            prompt_tokens("", loaded(kinds[kind]))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """Return the folder of a tokenizer that puts a space before every text, as of Llama 2."""
    place = tmp_path_factory.mktemp("spaced")
    PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_like(), eos_token="<|end|>", bos_token="<s>"
    ).save_pretrained(place)
    return place


def test_an_answer_of_the_warm_up_continues_the_prompt_as_in_trl(spaced, kinds):
    for place, prompt in ((spaced, "1+2="), (kinds["bos and eos"], "the cat"), (kinds["plain"], "the")):
        theirs, ours = AutoTokenizer.from_pretrained(place), loaded(place)
        tokens = prompt_tokens(prompt, ours)
        problem = Problem(index=0, prompt=prompt, tokens=tokens, columns={"answer": "3 sat"})
        row, num_prompt = AnswerTokens(ours, "answer", 99).row(problem)
        both = theirs(prompt + "3 sat", add_special_tokens=False)["input_ids"]
        assert list(row[num_prompt:-1]) == both[len(theirs(prompt, add_special_tokens=False)["input_ids"]) :]
        assert (row[:num_prompt], row[-1]) == (tokens, theirs.eos_token_id)
        assert ours.decode(row) == prompt + "3 sat"


def test_an_answer_that_shares_a_token_with_the_prompt_keeps_the_tokens_of_the_prompt(kinds):
    ours = loaded(kinds["bos"])
    assert len(ours.encode("the")) < len(ours.encode("t")) + len(ours.encode_answer("", "he", is_chat=False))
    problem = Problem(index=0, prompt="t", tokens=prompt_tokens("t", ours), columns={"answer": "he"})
    row, num_prompt = AnswerTokens(ours, "answer", 99).row(problem)
    assert row[:num_prompt] == problem.tokens
    assert ours.decode(row) == "the"


def test_stop_strings_are_searched_in_the_text_with_special_tokens(kinds):
    ours = loaded(kinds["bos"])
    ids = ours.encode("the<x>").tolist()
    assert ours.decode(ids) == "the"
    assert ours.decode(ids, raw=True) == "<s>the<x>"
    stops = StopStrings(["<x>"], StopDecoder(ours))
    assert [stops.completes(token) for token in ids] == [False] * (len(ids) - 1) + [True]


def test_a_full_disk_is_an_error_of_the_disk_whichever_library_writes(tmp_path):
    """Found: a bare Exception, and a traceback of `aedit export`."""
    for num_bytes in (10, 1000, 4000):
        with small_files(num_bytes), pytest.raises(OSError, match="File too large"):
            BYTE.save(tmp_path)
