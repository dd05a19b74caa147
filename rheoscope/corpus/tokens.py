"""Text → token ids with the bytes that each stands for, and the special tokens that frame a window."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32, Int64
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerBase

from rheoscope.corpus.document import Document
from rheoscope.errors import RheoscopeError

BOS_CHOICES = ("auto", "always", "never")


@dataclass(frozen=True)
class Framing:
    """The special tokens that begin and end every window, and the one that fills it up on the right."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int

    @property
    def n_special(self) -> int:
        """Number of special tokens in every window."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class TokenText:
    """The tokens of a document; `n_bytes` are the UTF-8 bytes that each adds, NaN where the tokenizer does not tell."""

    ids: Int32[np.ndarray, " token"]
    n_bytes: Int64[np.ndarray, " token"] | Float64[np.ndarray, " token"]


def framing(tokenizer: PreTrainedTokenizerBase, *, bos: str = "auto") -> Framing:
    """Special tokens of a window.

    "auto": an encoder's own frame ([CLS] … [SEP]) where the tokenizer adds one; else its BOS exactly once, whether or
    not it adds BOS by itself; else nothing. "always": the same, refused where there is no BOS. "never": nothing.
    A decoder's EOS is never added: it would say that the document ends where the window does.
    """
    if bos not in BOS_CHOICES:
        raise RheoscopeError(f'bos="{bos}" is not known; choose one of {", ".join(BOS_CHOICES)}.')
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    if bos == "never":
        return Framing((), (), pad)
    beginning = tokenizer.bos_token_id
    if bos == "always" and beginning is None:
        raise RheoscopeError('bos="always" was asked, but this tokenizer has no BOS token; use bos="auto" or "never".')
    before, after = _added_by_the_tokenizer(tokenizer)
    if tokenizer.cls_token_id is not None and tokenizer.cls_token_id in before:
        return Framing(before, after, pad)
    if beginning is None:
        return Framing(before, (), pad)
    first = before.index(beginning) if beginning in before else 0
    others = [token for token in before if token != beginning]
    return Framing((*others[:first], beginning, *others[first:]), (), pad)


def _added_by_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    n_added = len(framed) - len(bare)
    if bare:
        n_before = next((i for i in range(n_added + 1) if framed[i : i + len(bare)] == bare), 0)
    else:  # a vocabulary without the letter a
        n_before = sum(token in (tokenizer.bos_token_id, tokenizer.cls_token_id) for token in framed)
    return tuple(framed[:n_before]), tuple(framed[n_before + len(bare) :])


def document_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Document], TokenText]:
    """A function from documents to their tokens, without any special token.

    Text that spells a control token ("<|im_start|>") stays text; where the tokenizer can only read it as the control
    token, the document is refused. The tokenizer itself is left as it was.
    """
    encode = _fast_encoder(tokenizer.backend_tokenizer) if tokenizer.is_fast else _slow_encoder(tokenizer)
    named = {tokenizer.convert_tokens_to_ids(token): token for token in _control_tokens(tokenizer)}

    def encoded(document: Document) -> TokenText:
        tokens = encode(document.text)
        found = [token for i, token in named.items() if token in document.text and (tokens.ids == i).any()]
        if found:
            raise RheoscopeError(
                f'{document.name} contains the text "{found[0]}", which this tokenizer can only read as its control '
                "token; take it out of the text."
            )
        return tokens

    return encoded


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that steer a model. Padding and unknown are left out: some tokenizers spell them with ordinary text."""
    ordinary = {tokenizer.pad_token, tokenizer.unk_token} - {tokenizer.bos_token, tokenizer.eos_token}
    return [token for token in tokenizer.all_special_tokens if token not in ordinary and len(token) > 1]


def _fast_encoder(backend: Tokenizer) -> Callable[[str], TokenText]:
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True  # reads: split them like other text
    copy.post_processor = processors.Sequence([])  # those of GPT-2 cut white space off the offsets

    def encode(text: str) -> TokenText:
        encoding = copy.encode(text, add_special_tokens=False)
        ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(encoding))
        return TokenText(np.array(encoding.ids, dtype=np.int32), _bytes_from_ends(ends, text))

    return encode


def _bytes_from_ends(ends: Int64[np.ndarray, " token"], text: str) -> Int64[np.ndarray, " token"]:
    """Bytes between the end of the token before and a token's own end, so that they add up to the text.

    A character in several tokens counts with the first; what belongs to no token (white space that BERT drops) with
    the next one, at the end of the text with the last.
    """
    if not len(ends):
        return ends
    ends = np.maximum.accumulate(ends)
    ends[-1] = len(text)
    if not text.isascii():
        code = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        width = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)
        ends = np.concatenate([[0], np.cumsum(width)])[ends]
    return np.diff(ends, prepend=0)


def _slow_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], TokenText]:
    def encode(text: str) -> TokenText:
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        pieces = [tokenizer.decode([i]) for i in ids.tolist()]
        if "".join(pieces) != text:
            return TokenText(ids, np.full(len(ids), np.nan))
        return TokenText(ids, np.array([len(piece.encode()) for piece in pieces], dtype=np.int64))

    return encode
