"""Yield the text of a source, one document at a time and always in the same order. Imports no torch.

`check_data` looks at the source before anything else is loaded: it reads at most the text of two samples,
which takes a fraction of a second for any corpus.
"""

import codecs
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from aedit.launch.config import DataConfig
from aedit.launch.data.readers import (
    LONG_CHARS,
    TEXT_SUFFIXES,
    Document,
    dataset,
    file_documents,
    matching_files,
    pieces,
    read_text,
    row_documents,
)
from aedit.types import UserError

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_NEAR_COPIES = {"encodings"}  # near-duplicate tables: a held-out one would be memorized from the others
_TOPICS = "pydoc_data"


def documents(config: DataConfig, longest: int = LONG_CHARS) -> Iterator[Document]:
    """Yield all documents of `config.source` that hold text, in an order that depends on their names only.

    Documents longer than `longest` characters are cut into pieces; files of Python's own library are not.
    Raises UserError for a source that is missing, unreadable, of an unknown kind, or without any text.
    """
    empty = True
    for document in _every_document(config):
        if document.text:
            empty = False
            cut = len(document.text) > longest and (config.source != "stdlib" or longest < LONG_CHARS)
            yield from pieces(document) if cut else (document,)
    if empty:
        raise UserError(f"data.source = {config.source!r} contains no text; name files with text")


def source_files(config: DataConfig) -> list[Path]:
    """Return the files that `documents` reads, from which a cache can detect changes."""
    if config.source == "stdlib":
        return [_stdlib_root() / _TOPICS / "topics.py", *_stdlib_files()]
    if name := _dataset_name(config):
        return [Path(file["filename"]) for file in dataset(name, config).cache_files]
    return matching_files(config.source)


def is_held_out(document: Document, share: float) -> bool:
    """Return whether this document belongs to the `share` that is held out for evaluation.

    The decision depends on its text only: it is equal on all machines and in any order, and copies of a text
    fall on the same side.
    """
    return position(document) < share


def position(document: Document) -> float:
    """Return the hash of the document's text as a number in [0, 1).

    Documents below the held-out share are held out.
    """
    digest = blake2b(document.text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _every_document(config: DataConfig) -> Iterator[Document]:
    if config.source == "stdlib":
        return _stdlib()
    if name := _dataset_name(config):
        rows = dataset(name, config).select_columns([config.text_key])
        return row_documents((row[config.text_key] for row in rows), f"hf:{name}")
    return file_documents(matching_files(config.source), config.text_key)


def _dataset_name(config: DataConfig) -> str:
    return config.source.removeprefix("hf:") if config.source.startswith("hf:") else ""


def _stdlib() -> Iterator[Document]:
    root = _stdlib_root()
    for path in _stdlib_files():
        yield Document(path.relative_to(root).as_posix(), read_text(path))
    # One dict literal in one file holds all topics: as separate documents they can be split and held out.
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib_files() -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(_stdlib_root()):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY - _NEAR_COPIES - {_TOPICS}
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


_PROBE_BYTES = 65_536
_LOADERS = {"arrow", "csv", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml"}
"""Names of file formats that `datasets` accepts in place of a data set."""


def check_data(config: DataConfig) -> None:
    """Raise UserError if `config.source` is missing, unreadable, of an unknown kind, or certainly too short.

    A dataset on the Hugging Face hub is checked when the run starts.
    """
    if config.source == "stdlib":
        return
    if config.source.startswith("hf:"):
        _needs("datasets")
        name = config.source.removeprefix("hf:").partition(":")[0]
        if name in _LOADERS and not Path(name).exists():
            hint = "name the files themselves, as in data.source = 'texts/*.jsonl'"
            raise UserError(f"data.source = {config.source!r} names a file format, not a dataset; {hint}")
        return
    need, found = 2 * (config.seq_len + 1), 0
    for num_bytes in _sizes(matching_files(config.source), config.text_key):
        found += num_bytes
        if found >= need:
            return
    raise UserError(
        f"data.source = {config.source!r} has too little text: at most {found:,} tokens, and training and"
        f" evaluation need data.seq_len + 1 = {config.seq_len + 1} each; add text, or lower data.seq_len"
    )


def _sizes(files: list[Path], text_key: str) -> Iterator[int]:
    """Yield the bytes of each file or document, which are an upper bound of its tokens."""
    for path in files:
        if not os.access(path, os.R_OK):
            raise UserError(f"data.source: cannot read {path}: Permission denied")
        match path.suffix.lower():
            case ".py":
                yield path.stat().st_size + 1  # in any encoding
            case suffix if suffix in TEXT_SUFFIXES:
                try:
                    with path.open("rb") as file:
                        codecs.getincrementaldecoder("utf-8")().decode(file.read(_PROBE_BYTES))
                except UnicodeDecodeError as error:
                    raise UserError(f"data.source: {path} is not UTF-8 text ({error})") from error
                except OSError as error:
                    raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error
                yield path.stat().st_size + 1
            case ".parquet":
                _needs("pyarrow")
                yield path.stat().st_size  # compressed, with other columns: an estimate, not a bound
            case _:
                yield from (len(each.text.encode()) + 1 for each in file_documents([path], text_key))


def _needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"data.source needs the package {module!r}: pip install 'aedit[datasets]'")
