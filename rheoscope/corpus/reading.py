"""Sources and a tokenizer → a corpus."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rheoscope.corpus.document import Document
from rheoscope.corpus.sources import documents
from rheoscope.corpus.tokens import TokenText, document_encoder, framing
from rheoscope.corpus.windows import Corpus, Filled, document_pieces, filled_windows, packed_pieces
from rheoscope.errors import RheoscopeError

N_FIRST_TOKENS = 12
LARGEST = 2**31 - 1  # tokens of a window, and windows


def read(
    source: str | Path | Iterable[str | Path],
    *,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    n_windows: int | None = None,
    windows_per_document: int | None = None,
    split: str = "file",
    field: str = "text",
    tail: str = "drop",
    pack: bool = False,
    bos: str = "auto",
) -> Corpus:
    """Token windows of one or more sources.

    A source is a .txt, .jsonl (both also .gz) or .parquet file, a folder of them, "-" (standard input),
    "hf:NAME[:SPLIT]" or "builtin:manual". `split` parts plain text into documents: "file", "blank", "line" or
    "heading"; `field` names the text in tables. `window` counts special tokens in; how windows begin is `bos`, see
    `framing`. `tail`: "drop" leaves out what does not fill a window, "keep" pads it on the right. `pack` joins
    documents by the tokenizer's EOS and lets windows cross them. Reading stops after `n_windows`; a spread over more
    documents comes from `windows_per_document`. Raises RheoscopeError.
    """
    names = (str(source),) if isinstance(source, str | Path) else tuple(map(str, source))
    _check(window=window, n_windows=n_windows, windows_per_document=windows_per_document, tail=tail, pack=pack)
    frame = framing(tokenizer, bos=bos)
    room = window - frame.n_special
    if room < 1:
        raise RheoscopeError(
            f"a window of {window} tokens has no room for text: this tokenizer puts {frame.n_special} special tokens "
            f"into each; ask for at least {frame.n_special + 1}."
        )
    seen: list[tuple[str, int]] = []
    left_out = Counter(tokens=0, documents=0)
    texts = _encoded(_all_documents(names, split=split, field=field), tokenizer, seen)
    separator = _separator(tokenizer) if pack else None
    if pack:
        pieces = packed_pieces(texts, room, separator=separator, tail=tail, left_out=left_out)
    else:
        pieces = document_pieces(texts, room, tail=tail, most=windows_per_document, left_out=left_out)
    filled = filled_windows(pieces, frame, window, n_windows)
    if not len(filled.tokens):
        raise RheoscopeError(_nothing(names, seen, window=window, room=room))
    return Corpus(
        tokens=filled.tokens,
        lengths=filled.lengths,
        documents=filled.documents,
        starts=filled.starts,
        n_bytes=filled.n_bytes,
        framing=frame,
        bos_id=tokenizer.bos_token_id,
        sources=names,
        document_names=tuple(seen[number][0] for number in filled.document_numbers),
        first_tokens=_first_tokens(filled, tokenizer),
        tail=tail,
        packed=pack,
        n_windows_asked=n_windows,
        left_out=dict(left_out),
        separator=separator,
        split=split,
        field=field,
    )


def _check(*, window: int, n_windows: int | None, windows_per_document: int | None, tail: str, pack: bool) -> None:
    if window < 2:
        raise RheoscopeError(f"a window of {window} tokens was asked; a loss needs at least 2.")
    for name, number in (("window", window), ("n_windows", n_windows), ("windows_per_document", windows_per_document)):
        if number is not None and number > LARGEST:
            raise RheoscopeError(f"{name}={number} was asked, more than any text has; ask for at most {LARGEST}.")
    for name, number in (("n_windows", n_windows), ("windows_per_document", windows_per_document)):
        if number is not None and number < 1:
            raise RheoscopeError(f"{name}={number} was asked; leave it out for all, or ask for at least 1.")
    if tail not in ("drop", "keep"):
        raise RheoscopeError(f'tail="{tail}" is not known; choose "drop" or "keep".')
    if pack and windows_per_document is not None:
        raise RheoscopeError("packed windows cross documents, so windows_per_document has no meaning; leave one out.")


def _all_documents(names: tuple[str, ...], *, split: str, field: str) -> Iterator[Document]:
    for name in names:
        yield from documents(name, split=split, field=field)


def _encoded(
    sources: Iterator[Document], tokenizer: PreTrainedTokenizerBase, seen: list[tuple[str, int]]
) -> Iterator[TokenText]:
    """Tokens of each document that has any; `seen` keeps their names and lengths."""
    encode = document_encoder(tokenizer)
    for document in sources:
        text = encode(document)
        if len(text.ids):
            seen.append((document.name, len(text.ids)))
            yield text


def _separator(tokenizer: PreTrainedTokenizerBase) -> int:
    choices = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.sep_token_id)
    separator = next((token for token in choices if token is not None), None)
    if separator is None:
        raise RheoscopeError("packing joins documents by EOS, which this tokenizer lacks; leave pack=True out.")
    return separator


def _nothing(names: tuple[str, ...], seen: list[tuple[str, int]], *, window: int, room: int) -> str:
    what = ", ".join(names) or "the empty list of sources"
    if not seen:
        return f"{what} holds no text; name a source that has some."
    name, longest = max(seen, key=lambda entry: entry[1])
    return (
        f"no window of {window} tokens fits into {what}: its longest document, {name}, has {longest} tokens and {room} "
        'are needed; ask for a shorter window, keep short ones with tail="keep", or join documents with pack=True.'
    )


def _first_tokens(filled: Filled, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    first = filled.tokens[0, : min(N_FIRST_TOKENS, filled.lengths[0])]
    return tuple(tokenizer.convert_ids_to_tokens(first.tolist()))
