import sys

import pytest

from rheoscope.corpus import manual as module
from rheoscope.corpus.manual import manual
from rheoscope.errors import RheoscopeError


def test_the_built_in_text_is_the_same_each_time():
    first = manual("all")
    module._documents.cache_clear()
    assert manual("all") == first


def test_documents_are_sorted_topics_and_modules():
    names = [document.name for document in manual("all")]
    assert names == sorted(set(names))
    assert "topics/if" in names
    assert "modules/heapq" in names


def test_a_module_is_told_as_help_tells_it():
    text = next(document.text for document in manual("all") if document.name == "modules/heapq")
    assert text.startswith("heapq\n\nHeap queue algorithm")
    assert "heappush(heap, item)\n    Push item onto heap" in text


def test_training_and_held_out_documents_are_disjoint_and_complete():
    train, held_out, everything = ({d.name for d in manual(split)} for split in ("train", "held-out", "all"))
    assert not train & held_out
    assert train | held_out == everything
    assert 0.05 < len(held_out) / len(everything) < 0.25


def test_no_long_paragraph_of_the_held_out_text_is_in_the_training_text():
    held_out = {" ".join(p.split()) for d in manual("held-out") for p in d.text.split("\n\n")}
    train = {" ".join(p.split()) for d in manual("train") for p in d.text.split("\n\n")}
    assert not {paragraph for paragraph in held_out & train if len(paragraph) >= module.SHARED_PARAGRAPH}


def test_the_manual_does_repeat_itself_so_that_taking_paragraphs_out_is_needed():
    whole = {document.name: document.text for document in manual("all")}
    assert any(document.text != whole[document.name] for document in manual("train"))


def test_an_unknown_split_is_refused():
    with pytest.raises(RheoscopeError, match='no split "test"'):
        manual("test")


def test_a_python_without_its_manual_is_told_apart(monkeypatch):
    module._documents.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RheoscopeError, match="pydoc_data, which this Python was packaged without"):
        manual()
