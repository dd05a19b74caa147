"""Data sets of the Hugging Face hub → documents, streamed through the optional `datasets` library."""

from collections.abc import Iterator

from huggingface_hub.errors import HTTPError  # of the library it speaks through, whose name changes

from rheoscope.corpus.document import Document
from rheoscope.corpus.readers import field_document
from rheoscope.errors import RheoscopeError, first_line


def hub_documents(name: str, *, field: str = "text") -> Iterator[Document]:
    """Documents of a hub data set, one for each row; `name` is "NAME", "NAME:SPLIT" or "NAME:CONFIG:SPLIT".

    The split is "train" when none is named. Code that a data set brings along is never run.
    """
    try:
        from datasets import exceptions, load_dataset
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
    except (
        *(OSError, HTTPError),  # unreachable, not there, gated
        *(ValueError, KeyError, TypeError),  # no such configuration or split, files that are not what they should be
        *(
            RuntimeError,
            ImportError,
            exceptions.DatasetsError,
        ),  # code of its own, a package that is missing, no builder
    ) as error:
        raise RheoscopeError(
            f'the data set "{path}", split "{split}", cannot be read ({first_line(error)}); '
            "check its name and the network, or download it and name the files."
        ) from error
