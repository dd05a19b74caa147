"""Tokenizers small enough to write down: what real ones add by themselves, in every combination that matters."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the cat sat on the mat. thé çat — 🐈 sat\n\n  on  the mat " * 3


def byte_tokenizer(*, adds_bos: int = 0, adds_eos: bool = False, **names: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges; it puts `adds_bos` times BOS before a text, and EOS behind if asked."""
    names = {"bos_token": "<s>", "eos_token": "</s>"} | names
    specials = sorted(set(names.values()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if adds_bos or adds_eos:
        bos, eos = names["bos_token"], names["eos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([bos] * adds_bos + ["$A"] + [eos] * adds_eos),
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in {bos, eos}],
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def tokenizer_without_specials() -> PreTrainedTokenizerFast:
    """The 256 bytes and nothing else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece in lower case with BERT's frame, and with the truncation and padding that such files often carry."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", ".", "c", "##at", "s"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words between spaces, among them "<s>": the text and the control token cannot be told apart."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "cat": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
