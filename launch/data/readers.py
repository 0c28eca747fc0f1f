"""Read documents from text files, JSON lines, parquet files and Hugging Face datasets. Imports no torch."""

import glob
import importlib
import json
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from aedit.launch.config import DataConfig
from aedit.types import UserError, first_line

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
PIECE_CHARS = 4096
LONG_CHARS = 16 * PIECE_CHARS
"""Longer documents are cut into pieces: a few long ones could not be split by the held-out share."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `key` names its source in messages."""

    key: str
    text: str


def matching_files(source: str, key: str = "data.source") -> list[Path]:
    """Return the sorted files of a path or glob, in which `**` matches folders of any depth.

    key: configuration key of the source, for messages.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        raise UserError(f'{key} = {source!r} is a directory: name its files, as in "{source}/**/*.txt"')
    names = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
    files = sorted(found for found in map(Path, names) if found.is_file())
    if not files:
        raise UserError(f"{key} = {source!r}: no such file or glob match")
    return files


def file_documents(files: list[Path], text_key: str) -> Iterator[Document]:
    """Yield each text file as one document, and each row of jsonl and parquet files as one."""
    for path in files:
        match path.suffix.lower():
            case suffix if suffix in TEXT_SUFFIXES and len(files) == 1:
                yield from pieces(Document(str(path), read_text(path)))
            case suffix if suffix in TEXT_SUFFIXES:
                yield Document(str(path), read_text(path))
            case ".jsonl":
                for key, row in json_lines(path):
                    if not isinstance(row, dict):
                        raise UserError(
                            f"data.source: {key} is not a JSON object, so it has no key {text_key!r}"
                        )
                    _check_column(text_key, list(row), key)
                    yield Document(key, _text(row[text_key], key))
            case ".parquet":
                yield from _parquet(path, text_key)
            case suffix:
                known = " ".join(sorted({*TEXT_SUFFIXES, ".jsonl", ".parquet"}))
                raise UserError(f"data.source: {path} has the unknown suffix {suffix!r}; known are {known}")


def read_text(path: Path) -> str:
    """Return the text of one file, read as UTF-8, or in the encoding that a Python source declares."""
    try:
        if path.suffix == ".py":
            with tokenize.open(path) as source:  # reads the encoding that the file declares
                return source.read()
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"data.source: {path} is not UTF-8 text ({error})") from error
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error


def pieces(document: Document) -> Iterator[Document]:
    """Yield a document in pieces of 4096 to 8192 characters, cut at line ends if it has any."""
    text, start = document.text, 0
    while start < len(text):
        end = start + PIECE_CHARS
        line_end = text.find("\n", end, end + PIECE_CHARS) + 1
        end = line_end or end
        yield Document(f"{document.key}:{start}", text[start:end])
        start = end


def json_lines(path: Path, key: str = "data.source", expected: str = "") -> Iterator[tuple[str, Any]]:
    """Yield place and value of each line of a file that is not blank.

    key: configuration key of the source, for messages, which `expected` ends.
    """
    # Decode line by line: the file may exceed memory, and an error names its line.
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        value = json.loads(line)
                    except ValueError as error:
                        message = f"{key}: {path}:{number} is not JSON ({error}){expected}"
                        raise UserError(message) from error
                    yield f"{path}:{number}", value
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror}") from error


def _parquet(path: Path, text_key: str) -> Iterator[Document]:
    parquet = _extra("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(text_key, file.schema_arrow.names, str(path))
            batches = file.iter_batches(columns=[text_key])
            values = (value for batch in batches for value in batch.column(0).to_pylist())
            yield from row_documents(values, str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"data.source: cannot read {path}: {first_line(error)}") from error


def dataset(name: str, config: DataConfig) -> Any:
    """Return the Hugging Face dataset NAME or NAME:SUBSET. Raises UserError if it lacks the text column."""
    rows = load_dataset(name, config.split, f"data.source = {config.source!r}")
    _check_column(config.text_key, rows.column_names, config.source)
    return rows


def load_dataset(name: str, split: str, setting: str) -> Any:
    """Return the Hugging Face dataset NAME or NAME:SUBSET; `setting` begins the messages of UserError."""
    datasets = _extra("datasets", setting.partition(" ")[0])
    path, _, subset = name.partition(":")
    try:
        return datasets.load_dataset(path, subset or None, split=split)
    except Exception as error:  # the exception type depends on the loader; only the setting can cause it
        raise UserError(f"{setting}: {first_line(error)}") from error


def _extra(module: str, key: str = "data.source") -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "pip install 'aedit[datasets]'"
        raise UserError(f"{key} needs the package {error.name!r}: {hint}") from error


def row_documents(values: Iterable[object], origin: str) -> Iterator[Document]:
    """Yield one document per value; a missing value (null) is a document without text."""
    for number, value in enumerate(values):
        key = f"{origin}:{number}"
        yield Document(key, _text(value, key))


def _text(value: object, key: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"data.text_key: the field of {key} holds {type(value).__name__}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"data.source: {key} contains an unpaired surrogate, which is not valid text"
        ) from error
    return value


def _check_column(text_key: str, columns: list[str], origin: str) -> None:
    if text_key not in columns:
        close = get_close_matches(text_key, columns, n=1) or columns[:1]
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"data.text_key = {text_key!r} is missing in {origin}{hint}")
