"""A file of passes is gone on with, and nobody else's file is ever touched."""

import json

import pytest

from rheoscope.errors import RheoscopeError
from rheoscope.surgery.pass_file import add, passes_in

A_PASS = {"key": "ab", "edits": "()", "nll": [1.5, 2.0], "tokens": [3, 4], "seconds": 0.1}
WHOLE = json.dumps(A_PASS) + "\n"
FOREIGN = {
    "a mapping of one line": '{"my":"precious"}\n',
    "one line without an end": '{"my":"precious"}',
    "prose": "hello",
    "a line after passes": WHOLE + "hello\n",
    "a mapping with a key": '{"key": "x"}\n',
    "a pass without numbers": json.dumps(A_PASS | {"nll": ["a"]}) + "\n",
    "a list": "[1]\n",
    "an empty line": "\n",
    "not UTF-8": b"\xff\xfe\n",
    "binary without an end": b"\x89HDF\r\x1a",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_somebody_elses_is_refused_and_left_as_it_is(tmp_path, name):
    content = FOREIGN[name] if isinstance(FOREIGN[name], bytes) else FOREIGN[name].encode()
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(RheoscopeError, match=r"its line \d is no pass: name another file, or delete it"):
        passes_in(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("before", ["", WHOLE])
@pytest.mark.parametrize("length", [1, 5, 30, len(WHOLE) - 1])
def test_a_line_that_was_cut_off_is_taken_out_and_written_anew(tmp_path, before, length):
    path = tmp_path / "passes.jsonl"
    path.write_text(before + WHOLE[:length])
    assert len(passes_in(path)) == len(before.splitlines())
    assert path.read_text() == before
    add(path, A_PASS | {"key": "cd"})
    assert passes_in(path)["cd"]["nll"] == A_PASS["nll"]


def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path):
    assert passes_in(tmp_path / "new") == {}
    with pytest.raises(RheoscopeError, match="it cannot be read and written \\(Is a directory\\): name another file"):
        passes_in(tmp_path)
    with pytest.raises(RheoscopeError, match="No such file or directory"):
        add(tmp_path / "gone" / "passes", A_PASS)
