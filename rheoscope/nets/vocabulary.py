"""Tokenizers to train with: bytes, byte pairs learned from the text itself, or any that transformers opens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rheoscope.corpus.sources import documents
from rheoscope.errors import RheoscopeError, first_line

END = "<|endoftext|>"  # begins a window and ends a text, as with GPT-2
N_BYTES = 256


def tokenizer_named(
    name: str, text: Sequence[str], *, split: str = "file", field: str = "text"
) -> PreTrainedTokenizerBase:
    """The tokenizer called `bytes`, `bpe:N` (N tokens learned from the text), or at a hub name or folder.

    Raises RheoscopeError where there is none, or it has no token to join documents by.
    """
    if name == "bytes":
        return _byte_level(Tokenizer(models.BPE(vocab=_byte_tokens(), merges=[])))
    if name.startswith("bpe:"):
        return _byte_pairs(name, text, split, field)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RheoscopeError(
            f"tokenizer {name!r} cannot be opened ({first_line(error)}): give a folder, a hub name that can be "
            "reached, bytes, or bpe:N for N tokens learned from the text"
        ) from None
    if all(token is None for token in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.sep_token_id)):
        raise RheoscopeError(
            f"tokenizer {name!r} asked for; it has no token that ends a text (EOS), by which documents are joined: "
            "give one that has, bytes, or bpe:N for N tokens learned from the text"
        )
    return tokenizer


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over all tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _byte_tokens() -> dict[str, int]:
    """The end of text, then one token per byte."""
    return {END: 0} | {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}


def _byte_pairs(name: str, text: Sequence[str], split: str, field: str) -> PreTrainedTokenizerBase:
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or len(size) > 10 or not N_BYTES < int(size) < 2**31:
        raise RheoscopeError(
            f"tokenizer {name!r} asked for; bpe:N needs a number N of tokens above {N_BYTES} and below 2^31"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.text for source in text for document in documents(source, split=split, field=field))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < int(size):
        raise RheoscopeError(
            f"tokenizer {name!r} asked for; the text yields {tokenizer.get_vocab_size()} tokens at most: ask for fewer"
        )
    return _byte_level(tokenizer)


def _byte_level(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
