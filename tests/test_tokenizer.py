"""Tests byte and Hugging Face tokenizers: same ids in memory and in the files written."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aedit.launch.data.tokenizer import EOS, load_tokenizer, token_dtype
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte")
    load_tokenizer("byte").save(directory)
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
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_the_saved_byte_tokenizer_gives_the_same_ids(saved, text):
    ids = load_tokenizer("byte").encode(text).tolist()
    theirs = AutoTokenizer.from_pretrained(saved)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text


@given(st.lists(st.integers(0, 256), max_size=40))
def test_the_saved_byte_tokenizer_decodes_broken_utf8_alike(saved, ids):
    theirs = _loaded(saved)
    assert load_tokenizer("byte").decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_saved_byte_tokenizer_knows_its_end_of_text(saved):
    theirs, ours = AutoTokenizer.from_pretrained(saved), load_tokenizer("byte")
    assert (theirs.eos_token_id, len(theirs)) == (ours.eos_id, ours.vocab_size) == (256, 257)


def test_a_fingerprint_says_what_and_not_where(saved, trained, tmp_path):
    byte, bpe = load_tokenizer("byte"), load_tokenizer(str(trained))
    bpe.save(tmp_path)
    assert load_tokenizer(str(saved)).fingerprint == byte.fingerprint
    assert load_tokenizer(str(tmp_path)).fingerprint == bpe.fingerprint
    assert bpe.fingerprint != byte.fingerprint


def test_a_fingerprint_sees_a_moved_end_of_text(trained, tmp_path):
    PreTrainedTokenizerFast.from_pretrained(trained, eos_token="<s>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).fingerprint != load_tokenizer(str(trained)).fingerprint


@pytest.mark.parametrize("text", AWKWARD)
def test_a_hugging_face_tokenizer_adds_nothing_and_loses_nothing(trained, text):
    tokenizer = load_tokenizer(str(trained))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint16
    assert (ids < tokenizer.vocab_size).all()
    assert not np.isin([0, tokenizer.eos_id], ids).any()


def test_a_hugging_face_tokenizer_merges(trained):
    assert len(load_tokenizer(str(trained)).encode("the cat")) < 5


def test_sixteen_bits_are_used_while_they_suffice():
    assert [token_dtype(n) for n in (2**16, 2**16 + 1)] == [np.uint16, np.uint32]


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    for name in (str(tmp_path), str(tmp_path / "none"), "no such name!"):
        with pytest.raises(UserError, match=r"data\.tokenizer = ") as error:
            load_tokenizer(name)
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_a_tokenizer_without_an_end_of_text_is_refused(trained, tmp_path):
    fast = Tokenizer.from_file(str(trained / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no eos token"):
        load_tokenizer(str(tmp_path))


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
        return load_tokenizer(str(folder))

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
