"""Where text comes from: a source as the user names it → documents, in a fixed order and one at a time."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rheoscope.corpus.document import Document
from rheoscope.corpus.hub import hub_documents
from rheoscope.corpus.manual import manual
from rheoscope.corpus.readers import SUFFIXES, file_documents, text_documents
from rheoscope.errors import RheoscopeError

BUILT_IN = {"builtin:manual": "held-out", "builtin:manual-train": "train", "builtin:manual-all": "all"}


def documents(source: str | Path, *, split: str, field: str) -> Iterator[Document]:
    """Documents of one source: a file, a folder of files, "-" (standard input), "hf:NAME[:SPLIT]" or "builtin:manual".

    `split` says what a document is in plain text ("file", "blank", "line", "heading"); `field` names the text in
    .jsonl, .parquet and hub data sets. Raises RheoscopeError.
    """
    name = os.fspath(source)
    if not name.strip():
        raise RheoscopeError('a text with an empty name was asked for; name a file, a folder (such as "."), or "-".')
    if name == "-":
        if sys.stdin is None:
            raise RheoscopeError(
                "standard input was asked for and is closed; give it something to read, or name a file."
            )
        return text_documents(sys.stdin.buffer, "standard input", split=split)
    if name.startswith("builtin:"):
        return _built_in(name)
    if name.startswith("hf:"):
        return hub_documents(name.removeprefix("hf:"), field=field)
    path = Path(os.path.expanduser(name))  # which leaves the home of nobody as it is
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise RheoscopeError(f'"{name[:80]}" cannot be read: {error.strerror}; name a file or a folder.') from error
    if is_folder:
        return _folder_documents(path, split=split, field=field)
    if not exists and (scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", name)):
        raise RheoscopeError(
            f'"{name}" begins with "{scheme[1]}:", which is not a kind of source; '
            'name a file, a folder, "-", "hf:NAME[:SPLIT]" or "builtin:manual".'
        )
    return file_documents(path, split=split, field=field)


def _built_in(name: str) -> Iterator[Document]:
    if name not in BUILT_IN:
        raise RheoscopeError(f'there is no built-in text "{name}"; there are {", ".join(BUILT_IN)}.')
    return iter(manual(BUILT_IN[name]))


def _folder_documents(folder: Path, *, split: str, field: str) -> Iterator[Document]:
    files = sorted(_text_files(folder), key=lambda path: path.relative_to(folder).parts)
    if not files:
        raise RheoscopeError(
            f"{folder} holds no text: no file below it ends in {', '.join(SUFFIXES)} "
            "(links that lead out of the folder are not followed); name a folder that has one."
        )
    for path in files:
        yield from file_documents(path, split=split, field=field)


def _text_files(folder: Path) -> Iterator[Path]:
    root = folder.resolve()

    def refuse(error: OSError) -> None:
        raise RheoscopeError(f"the folder {error.filename} cannot be listed: {error.strerror}.") from error

    for directory, _, names in os.walk(folder, onerror=refuse):
        for path in (Path(directory, name) for name in names):
            if path.name.lower().endswith(SUFFIXES) and path.is_file() and path.resolve().is_relative_to(root):
                yield path
