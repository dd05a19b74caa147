"""Files → documents, read as a stream: .txt, .jsonl (both also gzipped) and .parquet."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from itertools import chain, pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rheoscope.corpus.document import Document
from rheoscope.errors import RheoscopeError

SUFFIXES = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
SPLITS = ("file", "blank", "line", "heading")
# A document is tokenised whole, at some 150 bytes of working memory for each byte of text.
LARGEST_DOCUMENT = 16 * 2**20
# WikiText's level-one heading " = Title = " between blank lines; deeper ones repeat the sign, " = = Section = = ".
_HEADING = re.compile(r" = (?!= ).*(?<! =) = \s*")


def file_documents(path: Path, *, split: str, field: str) -> Iterator[Document]:
    """Documents of one file, by its suffix. Raises RheoscopeError when it cannot be read as what it claims to be."""
    suffix = next((known for known in SUFFIXES if path.name.lower().endswith(known)), None)
    if suffix is None and path.exists():
        raise RheoscopeError(
            f"{path} ends in none of {', '.join(SUFFIXES)}; give it the suffix of what it is, .txt for plain text."
        )
    try:
        if suffix == ".parquet":
            yield from parquet_documents(path, field=field)
            return
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            if suffix in (".jsonl", ".jsonl.gz"):
                yield from jsonl_documents(stream, str(path), field=field)
            else:
                yield from text_documents(stream, str(path), split=split)
    except FileNotFoundError as error:
        raise RheoscopeError(f"there is no file {path}; check the spelling and the folder you are in.") from error
    except PermissionError as error:
        raise RheoscopeError(f"{path} may not be read: permission denied; ask its owner or copy it.") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RheoscopeError(f"{path} is not a whole gzip file ({error}); make it anew.") from error
    except OSError as error:
        reason = " ".join((error.strerror or str(error)).split()).rstrip(". ")  # pyarrow's are of several lines
        raise RheoscopeError(f"{path} cannot be read: {reason}.") from error


def text_documents(stream: BufferedIOBase, name: str, *, split: str = "file") -> Iterator[Document]:
    """Documents of plain UTF-8 text; pieces that are only white space are no documents.

    `split`: "file" (all of it is one document), "blank" (blank lines part documents), "line" (each line is one),
    "heading" (a line like " = Title = " begins one, as in WikiText).
    """
    if split not in SPLITS:
        raise RheoscopeError(f'text cannot be split by "{split}"; choose one of {", ".join(SPLITS)}.')
    lines = _lines(stream, name)
    if split == "file":
        pieces = _grouped(lines, name, lambda line: False)
    elif split == "line":
        pieces = (line.rstrip("\r\n") for line in lines)
    elif split == "blank":
        pieces = _grouped(lines, name, lambda line: not line.strip())
    else:
        pieces = _headed(lines, name)
    filled = (piece for piece in pieces if piece.strip())
    for number, piece in enumerate(filled, start=1):
        yield Document(name if split == "file" else f"{name}, document {number}", piece)


def _lines(stream: BufferedIOBase, name: str) -> Iterator[str]:
    offset = 0
    while line := stream.readline(LARGEST_DOCUMENT + 1):
        _refuse_giant(len(line), name)
        text = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
        try:
            yield text.decode("utf-8")
        except UnicodeDecodeError as error:
            at = offset + len(line) - len(text) + error.start
            raise RheoscopeError(
                f"{name} is not UTF-8: byte {at} is 0x{text[error.start]:02x} ({error.reason}); convert it first, "
                "for example with `iconv -f LATIN1 -t UTF-8`."
            ) from error
        offset += len(line)


def _grouped(lines: Iterator[str], name: str, parts: Callable[[str], bool]) -> Iterator[str]:
    """Runs of lines between those that part documents; a parting line stays with the run it ends."""
    run, size = [], 0
    for line in lines:
        run.append(line)
        size += len(line)
        _refuse_giant(size, name)
        if parts(line):
            yield "".join(run)
            run, size = [], 0
    yield "".join(run)


def _headed(lines: Iterator[str], name: str) -> Iterator[str]:
    """Runs of lines that each begin with a heading; WikiText breaks formulas into lines that only look like one."""
    run, size, found, before = [], 0, False, ""
    for line, after in pairwise(chain(lines, [""])):
        if _HEADING.fullmatch(line) and not before.strip() and not after.strip():
            yield "".join(run)
            run, size, found = [], 0, True
        run.append(line)
        size += len(line)
        _refuse_giant(size, name)
        before = line
    if run and not found:
        raise RheoscopeError(
            f'{name} has no heading, a line like " = Title = "; split it by "file", "blank" or "line".'
        )
    yield "".join(run)


def _refuse_giant(size: int, name: str) -> None:
    if size > LARGEST_DOCUMENT:
        raise RheoscopeError(
            f"{name} has a document of more than {LARGEST_DOCUMENT >> 20} MB, too much to tokenise in one piece; "
            'part it with split="blank", "line" or "heading", or into several files.'
        )


def jsonl_documents(stream: BufferedIOBase, name: str, *, field: str = "text") -> Iterator[Document]:
    """Documents of JSON lines: the string under `field` of the object on each line; blank lines are passed over."""
    for number, line in enumerate(_lines(stream, name), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = f"{error.msg}, character {error.pos}" if isinstance(error, json.JSONDecodeError) else error
                raise RheoscopeError(f"{where} is not valid JSON ({why}); put one object on each line.") from error
            if not isinstance(row, dict):
                raise RheoscopeError(
                    f"{where} holds no JSON object; put one object with a field {field!r} on each line."
                )
            yield from field_document(row, where, field=field)


def parquet_documents(path: Path, *, field: str = "text") -> Iterator[Document]:
    """Documents of a Parquet table: one for each row, from the column `field`."""
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if field not in table.schema_arrow.names:
                raise RheoscopeError(_no_field(str(path), field, table.schema_arrow.names))
            number = 0
            for batch in table.iter_batches(batch_size=64, columns=[field]):
                for value in _values(batch.column(0), path):
                    number += 1
                    yield from field_document({field: value}, f"{path}, row {number}", field=field)
    except pyarrow.ArrowException as error:
        raise RheoscopeError(
            f"{path} cannot be read as Parquet ({' '.join(str(error).split())}); make it anew."
        ) from error


def _values(column: pyarrow.Array, path: Path) -> list:
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        raise RheoscopeError(
            f"{path} has text that is not UTF-8: 0x{error.object[error.start]:02x} ({error.reason}); make it anew."
        ) from error


def field_document(row: dict, where: str, *, field: str) -> Iterator[Document]:
    """The document in one row of a table, or none when its text is only white space."""
    if field not in row:
        raise RheoscopeError(_no_field(where, field, list(row)))
    text = row[field]
    if not isinstance(text, str):
        raise RheoscopeError(
            f"{where}: the field {field!r} holds {type(text).__name__}, not text; leave such rows out."
        )
    try:
        _refuse_giant(len(text.encode()), where)
    except UnicodeEncodeError as error:
        raise RheoscopeError(
            f"{where}: character {error.start} is half a surrogate pair; write it as UTF-8."
        ) from error
    if text.strip():
        yield Document(where, text)


def _no_field(where: str, field: str, fields: list[str]) -> str:
    return f'{where} has no field "{field}", it has {", ".join(fields) or "none"}; name the one with the text: --field.'
