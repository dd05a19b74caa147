"""`rheoscope train` as a person runs it."""

import json

import pytest

FEW = ("--steps", 2, "--batch", 4, "--window", 16)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:262"])
def test_the_field_of_a_table_that_holds_the_text_can_be_named(command, text, tmp_path, tokenizer):
    lines = [json.dumps({"content": line}) for line in text.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    arguments = ("train", "sd", "--text", "a.jsonl", "--out", "net", "--tokenizer", tokenizer, *FEW)
    refused = command(*arguments)
    assert refused.code == 2
    assert 'has no field "text", it has content; name the one with the text: --field.' in refused.err
    assert not (tmp_path / "net").exists()
    outcome = command(*arguments, "--field", "content")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "net"
    assert json.loads((tmp_path / "net" / "training.json").read_text())["recipe"]["field"] == "content"
