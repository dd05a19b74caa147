import gzip
import io
import json
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest

from rheoscope.corpus import readers
from rheoscope.corpus.document import Document
from rheoscope.corpus.sources import documents
from rheoscope.errors import RheoscopeError


def texts(source, *, split="file", field="text"):
    return [document.text for document in documents(source, split=split, field=field)]


def refusal(source, **options):
    with pytest.raises(RheoscopeError) as caught:
        texts(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_is_one_document_to_the_last_byte(tmp_path):
    content = "thé cat\r\n\n  sat 🐈 "
    assert texts(written(tmp_path / "a.txt", content)) == [content]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert texts(written(tmp_path / "a.txt", b"\xef\xbb\xbfcat")) == ["cat"]


def test_blank_lines_part_documents(tmp_path):
    path = written(tmp_path / "a.txt", "one\ntwo\n \n\n\nthree\n")
    assert [text.split() for text in texts(path, split="blank")] == [["one", "two"], ["three"]]


def test_each_line_is_a_document(tmp_path):
    assert texts(written(tmp_path / "a.txt", "one\r\n\ntwo\nthree"), split="line") == ["one", "two", "three"]


def test_first_level_headings_begin_documents(tmp_path):
    wiki = " \n = One = \n \n text \n \n = = Section = = \n \n more \n \n = Two = \n \n text \n"
    assert [text.split("\n")[0] for text in texts(written(tmp_path / "a.txt", wiki), split="heading")] == [
        " = One = ",
        " = Two = ",
    ]


def test_a_formula_broken_into_lines_is_no_heading(tmp_path):
    wiki = " = One = \n\n inductance L \n = 1 henry and capacitance C = \n 1 farad \n"
    assert len(texts(written(tmp_path / "a.txt", wiki), split="heading")) == 1


def test_text_before_the_first_heading_is_a_document(tmp_path):
    assert len(texts(written(tmp_path / "a.txt", "foreword\n\n = One = \n\n text\n"), split="heading")) == 2


def test_a_text_without_any_heading_is_not_split_by_heading(tmp_path):
    assert "has no heading" in refusal(written(tmp_path / "a.txt", "one\n= two =\n"), split="heading")


def test_an_unknown_split_is_refused(tmp_path):
    assert 'split by "page"' in refusal(written(tmp_path / "a.txt", "one"), split="page")


def test_json_lines_give_one_document_each(tmp_path):
    rows = [{"text": "one", "id": 1}, {"text": "  "}, {"text": "twö"}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert texts(path) == ["one", "twö"]


def test_another_field_can_be_read(tmp_path):
    assert texts(written(tmp_path / "a.jsonl", '{"content": "one"}'), field="content") == ["one"]


@pytest.mark.parametrize("name", ["a.txt.gz", "A.TXT.GZ"])
def test_gzipped_text_is_read(tmp_path, name):
    assert texts(written(tmp_path / name, gzip.compress(b"cat"))) == ["cat"]


def test_gzipped_json_lines_are_read(tmp_path):
    assert texts(written(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "cat"}'))) == ["cat"]


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_rows_are_documents(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=["one", "", "two"], n=[1, 2, 3])
    assert list(documents(path, split="file", field="text")) == [
        Document(f"{path}, row 1", "one"),
        Document(f"{path}, row 3", "two"),
    ]


def test_a_folder_is_read_in_order_and_to_its_depth(tmp_path):
    (tmp_path / "b").mkdir()
    written(tmp_path / "c.txt", "three")
    written(tmp_path / "b" / "a.jsonl", '{"text": "two"}')
    written(tmp_path / "a.txt", "one")
    written(tmp_path / "notes.md", "ignored")
    assert texts(tmp_path) == ["one", "two", "three"]


def test_links_do_not_lead_out_of_a_folder(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    written(outside / "a.txt", "secret")
    written(inside / "b.txt", "open")
    (inside / "c.txt").symlink_to(outside / "a.txt")
    (inside / "d").symlink_to(outside)
    (inside / "e.txt").symlink_to(inside / "b.txt")
    assert texts(inside) == ["open", "open"]


def test_standard_input_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo")))
    assert texts("-", split="line") == ["one", "two"]


def test_a_missing_file_is_told(tmp_path):
    assert "there is no file" in refusal(tmp_path / "a.txt")
    assert "there is no file" in refusal(tmp_path / "a")


def test_a_forbidden_file_is_told(tmp_path, monkeypatch):
    path = written(tmp_path / "a.txt", "cat")

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", forbidden)
    assert "permission denied" in refusal(path)


def test_a_forbidden_folder_is_told(tmp_path, monkeypatch):
    def forbidden(_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "scandir", forbidden)
    assert "cannot be listed: Permission denied" in refusal(tmp_path)


def test_a_file_that_fails_while_it_is_read_is_told(tmp_path, monkeypatch):
    path = written(tmp_path / "a.txt", "cat")

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(path), "open", broken)
    assert "Input/output error" in refusal(path)


def test_text_in_the_place_of_a_name_is_told():
    assert "File name too long" in refusal("the cat sat on the mat " * 300)


def test_text_that_is_not_utf8_is_told_with_its_place(tmp_path):
    message = refusal(written(tmp_path / "a.txt", b"\xef\xbb\xbfcat\nth\xe9 cat"))
    assert "byte 9 is 0xe9" in message
    assert "iconv" in message


def test_a_half_character_at_the_end_is_told(tmp_path):
    assert "byte 3 is 0xc3" in refusal(written(tmp_path / "a.txt", b"cat\xc3"))


def test_a_bad_json_line_is_told_with_its_number(tmp_path):
    assert "line 2 is not valid JSON" in refusal(written(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": \n'))


def test_json_nested_too_deep_is_told(tmp_path):
    assert "line 1 is not valid JSON" in refusal(written(tmp_path / "a.jsonl", "[" * 100_000))


def test_a_json_line_without_an_object_is_told(tmp_path):
    assert "line 1 holds no JSON object" in refusal(written(tmp_path / "a.jsonl", '"cat"'))


def test_a_missing_field_is_told_with_those_there_are(tmp_path):
    message = refusal(written(tmp_path / "a.jsonl", '{"content": "one", "id": 3}'))
    assert 'line 1 has no field "text", it has content, id' in message
    assert 'no field "text", it has words' in refusal(parquet(tmp_path / "a.parquet", words=["one"]))


def test_a_field_that_holds_no_text_is_told(tmp_path):
    assert "holds NoneType, not text" in refusal(written(tmp_path / "a.jsonl", '{"text": null}'))
    assert "row 2: the field 'text' holds NoneType" in refusal(parquet(tmp_path / "a.parquet", text=["one", None]))


def test_half_a_surrogate_pair_is_told(tmp_path):
    assert "character 1 is half a surrogate pair" in refusal(written(tmp_path / "a.jsonl", r'{"text": "a\ud83d"}'))


def test_a_broken_parquet_file_is_told(tmp_path):
    assert "cannot be read as Parquet" in refusal(written(tmp_path / "a.parquet", b"not a table"))
    path = parquet(tmp_path / "b.parquet", text=[f"document {i}" * 50 for i in range(200)])
    content = bytearray(path.read_bytes())
    content[100:-2000] = bytes(len(content) - 2100)
    assert "b.parquet" in refusal(written(path, bytes(content)))


WHOLE = gzip.compress(b"cat" * 1000, mtime=0)  # the time of day would give a test another name in every process


@pytest.mark.parametrize("content", [b"cat", WHOLE[:-12], WHOLE[:10] + b"cat"], ids=["plain", "short", "mixed"])
def test_a_broken_gzip_file_is_told(tmp_path, content):
    assert "not a whole gzip file" in refusal(written(tmp_path / "a.txt.gz", content))


def test_a_folder_without_text_is_told(tmp_path):
    written(tmp_path / "notes.md", "ignored")
    assert "holds no text" in refusal(tmp_path)


def test_a_file_of_an_unknown_kind_is_told(tmp_path):
    assert "ends in none of .txt" in refusal(written(tmp_path / "a.md", "cat"))


@pytest.mark.parametrize("source", ["s3://bucket/text", "https://example.org/a.txt", "hub:wikitext"])
def test_an_unknown_kind_of_source_is_told(source):
    assert "is not a kind of source" in refusal(source)


def test_an_unknown_built_in_text_is_told():
    assert 'no built-in text "builtin:poems"' in refusal("builtin:poems")


@pytest.mark.parametrize("split", ["file", "blank", "heading"])
def test_a_document_too_large_to_tokenise_is_told(tmp_path, monkeypatch, split):
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 1000)
    assert "too much to tokenise" in refusal(written(tmp_path / "a.txt", " = a = \n\n" + "cat\n" * 300), split=split)


def test_a_giant_line_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 1000)
    assert "too much to tokenise" in refusal(written(tmp_path / "a.txt", "cat " * 300), split="line")
