"""Tests corpus, packing and cache: every byte of every document, once, on one side of the split."""

import errno
import hashlib
import json
import os
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aedit.launch.config import DataConfig
from aedit.launch.data import (
    Document,
    batch,
    documents,
    evaluation_indices,
    is_held_out,
    load_corpus,
    load_tokenizer,
)
from aedit.launch.data.corpus import source_files
from aedit.launch.data.samples import RowWriter
from aedit.types import UserError

BYTE = load_tokenizer(DataConfig())
TEXTS = [f"document {i}: " + "word " * (i % 7) for i in range(200)]


def config(source, **changes):
    return DataConfig(**({"source": str(source), "seq_len": 16, "held_out": 0.2} | changes))


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


# --- documents


def test_the_standard_library_is_real_text_without_tests_or_copies():
    found = list(documents(DataConfig()))
    keys = [document.key for document in found]
    assert {"argparse.py", "asyncio/base_events.py", "topics/assert"} <= set(keys)
    assert sum(len(document.text) for document in found) > 5_000_000
    assert keys == [document.key for document in documents(DataConfig())]
    assert len(set(keys)) == len(keys)
    assert not [key for key in keys if {"test", "tests", "site-packages"} & set(key.split("/"))]


def test_files_are_documents_in_the_order_of_their_names(tmp_path):
    for name in ("b.md", "a.txt", "sub/c.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    found = list(documents(config(f"{tmp_path}/**/*.*")))
    assert [document.text for document in found] == ["text of a.txt", "text of b.md", "text of sub/c.rst"]
    assert source_files(config(f"{tmp_path}/*.txt")) == [tmp_path / "a.txt"]


def test_a_python_file_is_read_in_the_coding_it_declares(tmp_path):
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\n# caf\u00e9\n".encode("latin-1"))
    assert next(documents(config(tmp_path / "a.py"))).text.endswith("caf\u00e9\n")


@pytest.mark.parametrize("text", ["line of text\n" * 3000, "no line end at all " * 3000])
def test_a_text_file_alone_is_cut_into_documents(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    found = [document.text for document in documents(config(tmp_path / "a.txt"))]
    assert "".join(found) == text
    assert len(found) > 5
    assert all(4096 <= len(piece) <= 8192 for piece in found[:-1])


def test_jsonl_parquet_and_hugging_face_hold_the_same_documents(tmp_path, jsonl, monkeypatch):
    import datasets  # here, as it takes long: only by the process that runs this test

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"other": range(200), "text": TEXTS}), tmp_path / "set/train.parquet")
    for source in (jsonl, tmp_path / "set/train.parquet", f"hf:{tmp_path}/set"):
        assert [document.text for document in documents(config(source))] == TEXTS
    assert all(path.is_file() for path in source_files(config(f"hf:{tmp_path}/set")))


def test_rows_without_text_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": null}\n{"text": ""}\n{"text": "two"}\n')
    assert [document.text for document in documents(config(tmp_path / "a.jsonl"))] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text", "a.csv has the unknown suffix '.csv'"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8 text"),
        ("a.py", b"# coding: nonsense\n", "a.py is not UTF-8 text"),
        ("a.txt", b"", "contains no text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', "'text' is missing in .*a.jsonl:1"),
        ("a.jsonl", b'{"text": 5}\n', "the field of .*a.jsonl:1 holds int, expected text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1 contains an unpaired surrogate"),
        ("a.parquet", b"not parquet", "cannot read .*a.parquet"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(documents(config(tmp_path / name)))
    assert "\n" not in str(error.value)


def test_a_missing_source_is_named(tmp_path):
    for source in (tmp_path / "none.txt", f"{tmp_path}/*.txt", f"hf:{tmp_path}/none"):
        with pytest.raises(UserError, match=str(tmp_path).replace(".", r"\.")):
            list(documents(config(source)))
    with pytest.raises(UserError, match=r"is a directory: name its files"):
        list(documents(config(tmp_path)))


def test_a_wrong_text_column_is_answered_with_the_right_one(tmp_path):
    pq.write_table(pa.table({"texts": TEXTS}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"data\.text_key = 'text' is missing .* did you mean 'texts'"):
        list(documents(config(tmp_path / "a.parquet")))


def test_a_wrong_key_of_json_lines_is_answered_with_the_right_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(UserError, match=r"'text' is missing in .*a\.jsonl:1; did you mean 'content'"):
        list(documents(config(tmp_path / "a.jsonl")))
    (tmp_path / "a.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match=r"a\.jsonl:1 is not a JSON object"):
        list(documents(config(tmp_path / "a.jsonl")))


def test_a_missing_extra_is_answered_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'aedit\[datasets\]'"):
        list(documents(config("hf:anything")))


# --- held out


def test_the_held_out_share_is_the_share_asked_for():
    share = np.mean([is_held_out(Document(str(i), f"text {i}"), 0.1) for i in range(20_000)])
    assert abs(share - 0.1) < 0.01


def test_copies_of_a_text_stay_on_one_side():
    assert len({is_held_out(Document(str(i), "same"), 0.5) for i in range(50)}) == 1


def test_the_side_of_a_text_never_changes():
    # Pinned: were it to change, a resumed run would train on what it evaluates with.
    sides = [is_held_out(Document("", text), 0.5) for text in "abcdefgh"]
    assert sides == [True, False, True, False, True, True, True, True]


# --- packing


@given(st.lists(st.lists(st.integers(0, 256), max_size=20), max_size=20), st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_rows_hold_the_whole_stream_but_for_an_unfilled_last_one(tmp_path, pieces, width):
    with (tmp_path / "rows.npy").open("wb") as file:
        writer = RowWriter(file, width, np.uint16)
        for piece in pieces:
            writer.append(np.array(piece, dtype=np.uint16))
        writer.finish()
    stream = sum(pieces, start=[])  # noqa: RUF017
    rows = np.load(tmp_path / "rows.npy")
    assert rows.shape == (len(stream) // width, width)
    assert rows.ravel().tolist() == stream[: rows.size]


def test_all_text_is_in_the_samples_and_each_document_on_one_side(jsonl):
    corpus = load_corpus(config(jsonl), BYTE, None)
    found = []
    for held_out, samples in ((False, corpus.train), (True, corpus.held_out)):
        mine = [text for text in TEXTS if is_held_out(Document("", text), 0.2) == held_out]
        stream = b"".join(text.encode() + b"\0" for text in mine)
        packed = bytes(0 if token == 256 else token for token in samples.ravel().tolist())
        assert samples.shape[1] == 17
        assert packed == stream[: len(packed)]
        assert len(stream) - len(packed) < 17
        found += mine
    assert sorted(found) == sorted(TEXTS)
    assert len(corpus.held_out) > 10


def test_too_little_text_says_how_much_there_is_and_how_much_it_takes(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=r"6 tokens in 1 pieces, .* data\.seq_len \+ 1 = 17 each"):
        load_corpus(config(tmp_path / "a.txt"), BYTE, None)
    (tmp_path / "a.txt").write_text("one document, and it is trained on " * 9)
    with pytest.raises(UserError, match="316 tokens in 1 pieces"):
        load_corpus(config(tmp_path / "a.txt", held_out=1e-9), BYTE, None)


def test_there_is_always_a_sample_to_evaluate_on(tmp_path):
    """None of three texts is below the share, so only the one with the smallest hash is held out."""
    texts = ["aa " * 8, "bb " * 8, "cc " * 8]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    found = load_corpus(config(f"{tmp_path}/*.txt", held_out=1e-9), BYTE, None)
    first = min(texts, key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest())
    assert BYTE.decode(found.held_out.flatten()) == first[: found.held_out.size]
    rest = "".join(text for text in texts if text != first)
    assert BYTE.decode(found.train.flatten()) == rest[: len(BYTE.decode(found.train.flatten()))]
    again = load_corpus(config(f"{tmp_path}/*.txt", held_out=1e-9), BYTE, None)
    assert (again.held_out == found.held_out).all()


def test_a_long_document_is_cut_so_that_a_share_of_it_can_be_held_out(tmp_path):
    words = np.random.default_rng(0).integers(0, 10**6, 40_000)
    text = "".join(f"{word}\n" for word in words)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    pieces = [document.text for document in documents(config(tmp_path / "a.jsonl"))]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 8192
    found = load_corpus(config(tmp_path / "a.jsonl", held_out=0.1), BYTE, None)
    assert 0.02 < len(found.held_out) / (len(found.train) + len(found.held_out)) < 0.25


@pytest.mark.parametrize("name", ["json", "csv"])
def test_what_a_loader_of_datasets_raises_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it looks for files of this kind, in all folders below
    with pytest.raises(UserError, match=rf"data\.source = 'hf:{name}': .*") as caught:
        list(documents(config(f"hf:{name}")))
    assert "\n" not in str(caught.value)


# --- cache


def test_a_second_start_reads_what_the_first_one_packed(jsonl, tmp_path, monkeypatch):
    first = load_corpus(config(jsonl), BYTE, tmp_path / "cache")
    monkeypatch.setattr(BYTE, "encode", None)  # packing again would call it
    second = load_corpus(config(jsonl), BYTE, tmp_path / "cache")
    assert isinstance(second.train, np.memmap)
    assert (first.train == second.train).all()
    assert (first.held_out == second.held_out).all()


def test_a_changed_file_or_setting_is_packed_anew(jsonl, tmp_path):
    cache = tmp_path / "cache"
    load_corpus(config(jsonl), BYTE, cache)
    wide = load_corpus(config(jsonl, seq_len=32), BYTE, cache)
    assert wide.train.shape[1] == 33
    other = load_tokenizer(DataConfig())
    other.fingerprint = "another"
    load_corpus(config(jsonl), other, cache)
    assert len(list(cache.iterdir())) == 6
    jsonl.write_text("".join(json.dumps({"text": text.upper()}) + "\n" for text in TEXTS))
    os.utime(jsonl, ns=(1, 1))
    changed = load_corpus(config(jsonl), BYTE, cache)
    assert b"DOCUMENT" in bytes(changed.train[0].astype(np.uint8))


def test_many_who_pack_at_once_all_get_whole_arrays(jsonl, tmp_path):
    ready, answers = threading.Barrier(4, timeout=30), []

    def pack():
        ready.wait()
        corpus = load_corpus(config(jsonl), BYTE, tmp_path / "cache")
        answers.append((corpus.train.tobytes(), corpus.held_out.tobytes()))

    threads = [threading.Thread(target=pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_failure_while_packing_leaves_nothing_behind(jsonl, tmp_path, monkeypatch):
    with jsonl.open("a") as file:
        file.write("torn {")
    with pytest.raises(UserError, match="is not JSON"):
        load_corpus(config(jsonl), BYTE, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_is_one_clear_line_and_no_torn_cache(jsonl, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write the packed samples to .*cache: No space left"):
        load_corpus(config(jsonl), BYTE, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_directory_that_cannot_be_is_named(jsonl):
    with pytest.raises(UserError, match=r"cannot make the cache directory .*texts\.jsonl"):
        load_corpus(config(jsonl), BYTE, jsonl / "cache")


# --- batches


def test_a_batch_is_the_samples_asked_for():
    samples = np.arange(60, dtype=np.uint16).reshape(12, 5)
    found = batch(samples, np.array([3, 0, 3]))
    assert found.dtype == torch.int64
    assert found.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4], [15, 16, 17, 18, 19]]


@given(st.integers(1, 500), st.integers(1, 50))
def test_evaluation_spreads_over_the_held_out_text(num_samples, k):
    found = evaluation_indices(num_samples, k).tolist()
    gaps = np.diff([*found, num_samples])
    assert len(set(found)) == len(found) == min(k, num_samples)
    assert found[0] == 0
    assert max(gaps) - min(gaps) <= 1
