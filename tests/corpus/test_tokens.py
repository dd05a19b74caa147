import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rheoscope.corpus.document import Document
from rheoscope.corpus.tokens import document_encoder, framing
from rheoscope.errors import RheoscopeError

from .small_tokenizers import byte_tokenizer, encoder_tokenizer, tokenizer_without_specials, word_tokenizer

BYTES = byte_tokenizer(adds_bos=1)


def tokens_of(tokenizer, text):
    return document_encoder(tokenizer)(Document("a document", text))


@pytest.mark.parametrize("adds_bos", [0, 1, 2])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("bos", ["auto", "always"])
def test_bos_begins_a_window_once_whatever_the_tokenizer_adds_by_itself(adds_bos, adds_eos, bos):
    tokenizer = byte_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    frame = framing(tokenizer, bos=bos)
    assert frame.prefix == (tokenizer.bos_token_id,)
    assert frame.suffix == ()  # an EOS would say that the document ends with the window


def test_a_tokenizer_without_bos_begins_windows_with_text():
    assert framing(tokenizer_without_specials()).n_special == 0


def test_bos_is_left_out_when_that_is_asked():
    assert framing(byte_tokenizer(adds_bos=1), bos="never").n_special == 0


def test_bos_is_refused_where_there_is_none():
    with pytest.raises(RheoscopeError, match="no BOS token"):
        framing(tokenizer_without_specials(), bos="always")


def test_an_unknown_wish_for_bos_is_refused():
    with pytest.raises(RheoscopeError, match="bos="):
        framing(byte_tokenizer(), bos="yes")


def test_an_encoder_frames_each_window_in_its_own_way():
    tokenizer = encoder_tokenizer()
    frame = framing(tokenizer)
    assert frame.prefix == (tokenizer.cls_token_id,)
    assert frame.suffix == (tokenizer.sep_token_id,)
    assert frame.pad == tokenizer.pad_token_id


def test_the_frame_of_a_vocabulary_without_the_probed_letter_is_found_too():
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "b": 1}, []))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    assert wrapped("a")["input_ids"] == [0]
    assert framing(wrapped).prefix == (0,)


def test_text_that_spells_a_control_token_stays_text():
    tokenizer = byte_tokenizer(bos_token="<|im_start|>", eos_token="<|im_end|>")
    text = "a <|im_start|>system<|im_end|> b"
    ids = tokens_of(tokenizer, text).ids
    assert tokenizer.bos_token_id in tokenizer(text)["input_ids"]  # what must not happen, does by default
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids.tolist())
    assert tokenizer.decode(ids.tolist()) == text


def test_text_that_can_only_be_read_as_a_control_token_is_refused():
    tokenizer = word_tokenizer()
    assert tokens_of(tokenizer, "cat dog").ids.tolist() == [2, 1]
    with pytest.raises(RheoscopeError, match='contains the text "<s>"'):
        tokens_of(tokenizer, "cat <s>")


def test_encoding_leaves_the_tokenizer_as_it_was():
    tokenizer = encoder_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    assert len(tokens_of(tokenizer, "the cat sat on the mat").ids) == 6  # its own truncation is at 4
    assert tokenizer.backend_tokenizer.to_str() == before
    assert not tokenizer.backend_tokenizer.encode_special_tokens


@given(text=st.text())
def test_tokens_are_those_of_the_tokenizer_itself(text):
    expected = BYTES(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokens_of(BYTES, text).ids.tolist() == expected


@given(text=st.text(min_size=1))
def test_the_bytes_of_all_tokens_add_up_to_the_text(text):
    n_bytes = tokens_of(BYTES, text).n_bytes
    assert n_bytes.sum() == len(text.encode())
    assert (n_bytes >= 0).all()


def test_a_character_in_several_tokens_is_counted_once_with_the_first():
    n_bytes = tokens_of(tokenizer_without_specials(), "a🐈é.").n_bytes
    assert n_bytes.tolist() == [1, 4, 0, 0, 0, 2, 0, 1]


def test_bytes_that_belong_to_no_token_count_with_the_next_one():
    tokens = tokens_of(encoder_tokenizer(), "  the\n\ncat ")
    assert tokens.n_bytes.tolist() == [5, 6]


def test_offsets_that_leave_white_space_out_are_not_believed():
    tokenizer = byte_tokenizer()
    plain = tokens_of(tokenizer, "the cat \n\n  sat").n_bytes
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    np.testing.assert_array_equal(tokens_of(tokenizer, "the cat \n\n  sat").n_bytes, plain)


def test_bytes_of_a_slow_tokenizer_are_counted_or_unknown():
    tokenizer = ByT5Tokenizer()
    assert tokens_of(tokenizer, "cat").n_bytes.tolist() == [1, 1, 1]
    assert np.isnan(tokens_of(tokenizer, "é").n_bytes).all()
