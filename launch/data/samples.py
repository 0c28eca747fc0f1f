"""Samples of a corpus as arrays on disk: packed once as rows of equal length, read by all processes."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from aedit.launch.config import DataConfig
from aedit.launch.data.corpus import documents, is_held_out, position, source_files
from aedit.launch.data.readers import LONG_CHARS, PIECE_CHARS
from aedit.launch.data.tokenizer import CorpusTokenizer, token_dtype
from aedit.system import atomic_file
from aedit.types import UserError

_LAYOUT = 2
"""Version of the packing; a change invalidates caches."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents, cut into samples.

    Each document begins with the tokens that the tokenizer puts before a text, such as BOS, and ends with one
    end-of-document token.

    Both arrays have shape (num_samples, seq_len + 1), are read-only, and are memory-mapped if cached. No
    document contributes to both.
    """

    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]


def load_corpus(config: DataConfig, tokenizer: CorpusTokenizer, cache_dir: Path | None) -> Corpus:
    """Return the samples of `config.source` from `cache_dir`; pack them there first if they are missing.

    Several processes may call this at once. Raises UserError for an unusable source or cache directory, and
    for too little text to fill one training and one held-out sample.
    """
    name = _cache_name(config, tokenizer)
    with _directory(cache_dir) as directory:
        train, held_out = directory / f"{name}.train.npy", directory / f"{name}.held_out.npy"
        if not (train.exists() and held_out.exists()):
            _pack(config, tokenizer, train, held_out)
        mode = None if cache_dir is None else "r"
        return Corpus(_load(train, mode), _load(held_out, mode))


def batch(samples: NDArray[np.unsignedinteger], indices: NDArray[np.int64]) -> torch.Tensor:
    """Return the samples `indices` as int64 of shape (len(indices), seq_len + 1), on CPU."""
    return torch.from_numpy(samples[indices].astype(np.int64))


def evaluation_indices(num_samples: int, k: int) -> NDArray[np.int64]:
    """Return at most k sample indices, evenly spaced over all documents and always the same."""
    k = min(k, num_samples)
    return np.arange(k, dtype=np.int64) * num_samples // k


class _TooLittle(Exception):
    """Too little text to fill one sample of the training or the held-out part."""


def _pack(config: DataConfig, tokenizer: CorpusTokenizer, train: Path, held_out: Path) -> None:
    """Write the samples.

    Use a larger held-out share if the configured one leaves no sample to evaluate on.
    """
    try:
        try:
            _write(config, tokenizer, train, held_out)
        except _TooLittle:
            enough = replace(config, held_out=_least_share(config, tokenizer))
            _write(enough, tokenizer, train, held_out, longest=PIECE_CHARS)
    except OSError as error:
        raise UserError(f"cannot write the packed samples to {train.parent}: {error.strerror}") from error


def _write(
    config: DataConfig, tokenizer: CorpusTokenizer, train: Path, held_out: Path, longest: int = LONG_CHARS
) -> None:
    dtype, width = token_dtype(tokenizer.vocab_size), config.seq_len + 1
    with atomic_file(train) as train_file, atomic_file(held_out) as held_out_file:
        rows = {False: RowWriter(train_file, width, dtype), True: RowWriter(held_out_file, width, dtype)}
        for document in documents(config, longest):
            side = rows[is_held_out(document, config.held_out)]
            side.append(tokenizer.encode_document(document.text))
        for side in rows.values():
            side.finish()
        if not all(side.num_rows for side in rows.values()):
            raise _TooLittle


def _least_share(config: DataConfig, tokenizer: CorpusTokenizer) -> float:
    """Return the smallest held-out share that leaves a sample in either part, in pieces of documents.

    It depends on the texts only, so that all nodes compute the same one. Raises UserError if there is none.
    """
    cut = documents(config, PIECE_CHARS)
    ordered = sorted((position(one), len(tokenizer.encode_document(one.text))) for one in cut)
    total, need, held, below = sum(tokens for _, tokens in ordered), config.seq_len + 1, 0, 0.0
    for place, tokens in ordered:
        if place > below and held >= need:
            break
        held, below = held + tokens, float(np.nextafter(place, 1.0))
    if held >= need and total - held >= need:
        return below
    raise UserError(
        f"data.source = {config.source!r} has too little text: {total:,} tokens in {len(ordered)} pieces, and"
        f" training and evaluation need data.seq_len + 1 = {need} each; add text, or lower data.seq_len"
    )


def _cache_name(config: DataConfig, tokenizer: CorpusTokenizer) -> str:
    files: list[tuple[str, int, int]] = []
    for path in source_files(config):
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error
        files.append((str(path.absolute()), stat.st_size, stat.st_mtime_ns))
    # The fingerprint covers the vocabulary, but not the tokenizer's name, which is only a location.
    key = (_LAYOUT, config.source, config.text_key, config.split, config.seq_len, config.held_out)
    return sha256(repr((key, tokenizer.fingerprint, files)).encode()).hexdigest()[:24]


@contextmanager
def _directory(cache_dir: Path | None) -> Iterator[Path]:
    if cache_dir is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the cache directory {cache_dir}: {error.strerror}") from error
    yield cache_dir


def _load(path: Path, mode: str | None) -> NDArray[np.unsignedinteger]:
    samples: NDArray[np.unsignedinteger] = np.load(path, mmap_mode=mode)  # type: ignore[arg-type]
    samples.flags.writeable = False
    return samples


class RowWriter:
    """Writer that cuts a stream of tokens into rows of `width` in a .npy file.

    Holds one document in memory.
    """

    def __init__(self, file: IO[bytes], width: int, dtype: DTypeLike) -> None:
        self.num_rows = 0
        self._file = file
        self._width = width
        self._rest = np.empty(0, dtype=dtype)
        self._write_header()

    def append(self, tokens: NDArray[np.unsignedinteger]) -> None:
        """Append tokens to the stream; an incomplete row is kept until the next call."""
        stream = np.concatenate([self._rest, tokens.astype(self._rest.dtype, copy=False)])
        end = len(stream) - len(stream) % self._width
        self._file.write(stream[:end].tobytes())
        self._rest = stream[end:].copy()
        self.num_rows += end // self._width

    def finish(self) -> None:
        """Write the number of rows to the header. An incomplete last row is dropped."""
        self._file.seek(0)
        self._write_header()
        self._file.seek(0, os.SEEK_END)

    def _write_header(self) -> None:
        # NumPy pads headers so that the first axis can grow in place: both headers have the same length.
        descr = npy.dtype_to_descr(self._rest.dtype)
        shape = (self.num_rows, self._width)
        npy.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})
