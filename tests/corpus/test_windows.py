import dataclasses
import hashlib
import json
import struct
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from rheoscope import corpus
from rheoscope.corpus.tokens import document_encoder
from rheoscope.errors import RheoscopeError

from .small_tokenizers import byte_tokenizer, encoder_tokenizer, tokenizer_without_specials

TOKENIZER = byte_tokenizer(adds_bos=1)
BARE = tokenizer_without_specials()
SHORT_TEXTS = st.lists(st.text(min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function that writes texts as a JSON-lines file and gives its path."""
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"

    def written(texts):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return written


def text_tokens(read):
    """Token ids of the text in each window."""
    before, after = len(read.framing.prefix), len(read.framing.suffix)
    return [row[before : n - after].tolist() for row, n in zip(read.tokens, read.lengths, strict=True)]


@given(texts=SHORT_TEXTS, window=st.integers(2, 11))
def test_every_text_token_is_scored_exactly_once_when_tails_are_kept(write, texts, window):
    read = corpus.read(write(texts), tokenizer=TOKENIZER, window=window, tail="keep")
    encode = document_encoder(TOKENIZER)
    for number, text in enumerate(texts):
        ids = encode(corpus.Document("", text)).ids.tolist()
        scored = Counter()
        for window_number in np.flatnonzero(read.documents == number):
            scored.update(read.starts[window_number] + i for i in range(read.lengths[window_number] - 1))
        assert scored == Counter(range(len(ids)))


@given(texts=SHORT_TEXTS, window=st.integers(2, 11))
def test_windows_put_together_are_the_documents(write, texts, window):
    read = corpus.read(write(texts), tokenizer=TOKENIZER, window=window, tail="keep")
    for number, text in enumerate(texts):
        ids = [
            token
            for tokens, d in zip(text_tokens(read), read.documents, strict=True)
            if d == number
            for token in tokens
        ]
        assert TOKENIZER.decode(ids) == text


@given(texts=SHORT_TEXTS, window=st.integers(2, 11))
def test_bytes_of_kept_windows_add_up_to_the_text(write, texts, window):
    read = corpus.read(write(texts), tokenizer=TOKENIZER, window=window, tail="keep")
    assert read.n_bytes.sum() == sum(len(text.encode()) for text in texts)


@given(texts=SHORT_TEXTS, window=st.integers(2, 7), place=st.integers(0, 10**6), change=st.integers(1, 255))
def test_the_hash_changes_with_any_token(write, texts, window, place, change):
    read = corpus.read(write(texts), tokenizer=TOKENIZER, window=window, tail="keep")
    row = place % read.n_windows
    column = place % read.lengths[row]
    tokens = read.tokens.copy()
    tokens[row, column] += change
    assert dataclasses.replace(read, tokens=tokens).hash != read.hash
    tokens[row, column] -= change
    assert dataclasses.replace(read, tokens=tokens).hash == read.hash


def test_the_hash_does_not_depend_on_the_padding(write):
    read = corpus.read(write(["cat"]), tokenizer=BARE, window=7, tail="keep")
    tokens = read.tokens.copy()
    tokens[:, 3:] = 17
    assert dataclasses.replace(read, tokens=tokens).hash == read.hash


def test_the_hash_depends_on_where_documents_end(write):
    one = corpus.read(write(["abcdef"]), tokenizer=BARE, window=3)
    two = corpus.read(write(["abc", "def"]), tokenizer=BARE, window=3)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert one.hash != two.hash


def test_the_hash_is_the_same_on_every_machine(write):
    read = corpus.read(write(["cat", "s"]), tokenizer=BARE, window=2, tail="keep")
    c, a, t, s = BARE.convert_tokens_to_ids(["c", "a", "t", "s"])
    lengths, documents, tokens = (2, 1, 1), (0, 0, 1), (c, a, t, s)
    assert read.hash == hashlib.sha256(b"2 3" + struct.pack("<10q", *lengths, *documents, *tokens)).hexdigest()


@given(texts=SHORT_TEXTS, batch_size=st.integers(1, 13))
def test_batches_of_any_size_give_the_same_windows(write, texts, batch_size):
    read = corpus.read(write(texts), tokenizer=TOKENIZER, window=5, tail="keep")
    batches = list(corpus.batches(read, batch_size))
    assert all(len(batch.tokens) == batch_size for batch in batches[:-1])
    np.testing.assert_array_equal(torch.cat([batch.tokens for batch in batches]), read.tokens)
    np.testing.assert_array_equal(torch.cat([batch.valid for batch in batches]).sum(1), read.lengths)
    np.testing.assert_array_equal(torch.cat([batch.documents for batch in batches]), read.documents)
    np.testing.assert_array_equal(torch.cat([batch.windows for batch in batches]), np.arange(read.n_windows))


def test_a_batch_does_not_share_memory_with_the_corpus(write):
    read = corpus.read(write(["abcdef"]), tokenizer=BARE, window=3)
    next(corpus.batches(read, 2)).tokens.zero_()
    assert (read.tokens != 0).all()


def test_an_empty_batch_is_refused(write):
    read = corpus.read(write(["abcdef"]), tokenizer=BARE, window=3)
    with pytest.raises(RheoscopeError, match="a batch of 0 windows"):
        next(corpus.batches(read, 0))


def test_padding_is_on_the_right_and_not_valid(write):
    read = corpus.read(write(["abcde"]), tokenizer=BARE, window=3, tail="keep")
    batch = next(corpus.batches(read, 2))
    assert batch.valid.tolist() == [[True, True, True], [True, True, False]]


def test_no_window_crosses_a_document(write):
    read = corpus.read(write(["aaaaaaa", "bbbbb", "c", "ddd"]), tokenizer=BARE, window=3)
    assert all(len(set(row)) == 1 for row in read.tokens.tolist())
    assert read.documents.tolist() == [0, 0, 1, 2]
    assert read.starts.tolist() == [0, 3, 0, 0]
    assert [name.split()[-1] for name in read.document_names] == ["1", "2", "4"]


def test_what_is_left_out_is_counted(write):
    read = corpus.read(write(["aaaaaaa", "bbbbb", "c", "ddd"]), tokenizer=BARE, window=3)
    assert read.left_out == {"tokens": 1 + 2 + 1, "documents": 1}
    kept = corpus.read(write(["aaaaaaa", "bbbbb", "c", "ddd"]), tokenizer=BARE, window=3, tail="keep")
    assert kept.left_out == {"tokens": 0, "documents": 0}


def test_the_first_token_of_a_window_without_bos_is_not_scored_and_its_bytes_not_counted(write):
    # é is two tokens; its bytes count with the first of them
    assert corpus.read(write(["éabcdé"]), tokenizer=BARE, window=4).n_bytes.tolist() == [2, 3]
    with_bos = corpus.read(write(["éabcdé"]), tokenizer=TOKENIZER, window=4, tail="keep")
    assert with_bos.n_bytes.sum() == 8


def test_bos_is_once_at_the_start_of_every_window(write):
    read = corpus.read(write(["the <s> cat sat" * 5]), tokenizer=TOKENIZER, window=7)
    assert (read.tokens[:, 0] == read.bos_id).all()
    assert (read.tokens == read.bos_id).sum() == read.n_windows
    assert read.first_tokens[0] == "<s>"


def test_an_encoder_sees_its_frame_around_every_window(write):
    tokenizer = encoder_tokenizer()
    read = corpus.read(write(["the cat sat on the mat ."]), tokenizer=tokenizer, window=5, tail="keep")
    assert [tokenizer.convert_ids_to_tokens(row) for row in read.tokens.tolist()] == [
        ["[CLS]", "the", "cat", "sat", "[SEP]"],
        ["[CLS]", "on", "the", "mat", "[SEP]"],
        ["[CLS]", ".", "[SEP]", "[PAD]", "[PAD]"],
    ]
    assert read.lengths.tolist() == [5, 5, 3]


def test_reading_stops_at_the_number_of_windows_asked(write):
    path = write(["abcdef", "ghijkl"])
    path.write_text(path.read_text() + "this line is not JSON and is never reached\n")
    read = corpus.read(path, tokenizer=BARE, window=3, n_windows=3)
    assert read.n_windows == 3
    assert read.documents.tolist() == [0, 0, 1]
    assert read.left_out == {"tokens": 0, "documents": 0}


def test_more_windows_than_there_are_gives_those_there_are(write):
    read = corpus.read(write(["abcdef"]), tokenizer=BARE, window=3, n_windows=100)
    assert (read.n_windows, read.n_windows_asked) == (2, 100)


def test_windows_can_be_spread_over_documents(write):
    texts = ["aaaaaaaaa", "bbbbbbb", "ccccc"]
    read = corpus.read(write(texts), tokenizer=BARE, window=3, windows_per_document=1, n_windows=3)
    assert read.documents.tolist() == [0, 1, 2]
    every = corpus.read(write(texts), tokenizer=BARE, window=3, windows_per_document=2)
    assert every.left_out["tokens"] == 3 + 1 + 2


def test_packed_windows_cross_documents_and_join_them_by_eos(write):
    tokenizer = byte_tokenizer()
    read = corpus.read(write(["ab", "c", "defgh"]), tokenizer=tokenizer, window=5, pack=True, tail="keep")
    rows = [tokenizer.convert_ids_to_tokens(row[:n]) for row, n in zip(read.tokens.tolist(), read.lengths, strict=True)]
    assert rows == [["<s>", "a", "b", "</s>", "c"], ["<s>", "</s>", "d", "e", "f"], ["<s>", "g", "h"]]
    assert read.n_bytes.tolist() == [3, 3, 2]
    assert read.starts.tolist() == [0, 1, 3]
    assert [name.split()[-1] for name in read.document_names] == ["1", "2", "3"]
    assert read.provenance()["packed"]


def test_packed_windows_drop_the_last_short_one(write):
    read = corpus.read(write(["ab", "c", "defgh"]), tokenizer=byte_tokenizer(), window=5, pack=True)
    assert read.n_windows == 2
    assert read.left_out["tokens"] == 2


def test_packing_without_a_token_to_join_by_is_refused(write):
    with pytest.raises(RheoscopeError, match="lacks"):
        corpus.read(write(["ab"]), tokenizer=BARE, window=2, pack=True)


def test_packing_and_a_limit_for_each_document_exclude_each_other(write):
    with pytest.raises(RheoscopeError, match="has no meaning"):
        corpus.read(write(["ab"]), tokenizer=TOKENIZER, window=2, pack=True, windows_per_document=1)


def test_bytes_unknown_to_a_slow_tokenizer_are_nan_and_the_rest_stands(write):
    for pack in (False, True):
        read = corpus.read(write(["abcd", "éa"]), tokenizer=ByT5Tokenizer(), window=3, pack=pack)
        assert read.n_bytes[0] == 2
        assert np.isnan(read.n_bytes[-1])


def test_several_sources_follow_one_another(write, tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    read = corpus.read([tmp_path / "a.txt", write(["def"])], tokenizer=BARE, window=3)
    assert read.n_documents == 2
    assert read.sources[0].endswith("a.txt")


def test_text_shorter_than_a_window_is_refused_with_its_length(write):
    with pytest.raises(RheoscopeError, match=r"longest document, .*line 2, has 5 tokens and 6 are needed"):
        corpus.read(write(["abc", "abcde"]), tokenizer=BARE, window=6)


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_text_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(RheoscopeError, match="holds no text"):
        corpus.read(tmp_path / "a.txt", tokenizer=BARE, window=3)


def test_no_source_at_all_is_refused():
    with pytest.raises(RheoscopeError, match="empty list of sources"):
        corpus.read([], tokenizer=BARE, window=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "a window of 1 tokens"),
        ({"window": 3, "n_windows": 0}, "n_windows=0"),
        ({"window": 3, "windows_per_document": 0}, "windows_per_document=0"),
        ({"window": 3, "tail": "cut"}, 'tail="cut"'),
    ],
)
def test_numbers_without_a_meaning_are_refused(write, options, message):
    with pytest.raises(RheoscopeError, match=message):
        corpus.read(write(["abcdef"]), tokenizer=BARE, **options)


def test_a_window_with_no_room_for_text_is_refused(write):
    with pytest.raises(RheoscopeError, match="puts 2 special tokens into each; ask for at least 3"):
        corpus.read(write(["the cat"]), tokenizer=encoder_tokenizer(), window=2)


def test_provenance_goes_into_json(write):
    read = corpus.read(write(["abcdef"]), tokenizer=BARE, window=3)
    assert json.loads(json.dumps(read.provenance()))["tokens"] == 6
