"""Data sets of the Hugging Face hub → documents, streamed through the optional `datasets` library."""

from collections.abc import Iterator

from rheoscope.corpus.document import Document
from rheoscope.corpus.readers import field_document
from rheoscope.errors import RheoscopeError


def hub_documents(name: str, *, field: str = "text") -> Iterator[Document]:
    """Documents of a hub data set, one for each row; `name` is "NAME", "NAME:SPLIT" or "NAME:CONFIG:SPLIT".

    The split is "train" when none is named. Code that a data set brings along is never run.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RheoscopeError(
            f'the data set "{name}" is read through `datasets`, which is not installed; pip install "rheoscope[hub]".'
        ) from error
    path, *rest = name.split(":")
    if not path or len(rest) > 2:
        raise RheoscopeError(f'"hf:{name}" names no data set; write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.')
    split = rest.pop() if rest else "train"
    try:
        rows = load_dataset(path, *rest, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield from field_document(row, f"hf:{name}, row {number}", field=field)
    except (OSError, ValueError) as error:  # unreachable, not there, gated; no such configuration or split
        raise RheoscopeError(
            f'the data set "{path}", split "{split}", cannot be read ({str(error).splitlines()[0]}); '
            "check its name and the network, or download it and name the files."
        ) from error
