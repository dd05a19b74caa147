"""What is fuzzed: for each reader a folder of whole files, what may be done to one of them, and how it is read."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import yaml
from hypothesis import strategies as st

from rheoscope.corpus import read as read_corpus
from rheoscope.corpus.readers import SPLITS
from rheoscope.errors import RheoscopeError
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.report.comparison import compared
from rheoscope.report.page import html
from rheoscope.run import Run
from rheoscope.surgery.plan import Plan, completed
from rheoscope.surgery.restructure import refuse_edits
from tests.corpus.small_tokenizers import TEXT, byte_tokenizer
from tests.models.checkpoints import saved
from tests.models.gguf_files import write_llama
from tests.report.synthetic import synthetic_run
from tests.surgery.test_plan import PLAN
from tests.tiny import tiny

from .mutated_runs import mutated_run
from .mutations import mutated_bytes, mutated_json, mutated_value

Change = Callable[[bytes], st.SearchStrategy[bytes]]


@dataclass(frozen=True)
class Reader:
    """One reader. prepare: fills a folder; changes: by file name, what is done to it; read: reads the folder."""

    name: str
    prepare: Callable[[Path], object]
    changes: dict[str, Change]
    read: Callable[[Path, str], object]


tokenizer = cache(byte_tokenizer)


def _read_text(folder: Path, name: str) -> None:
    """All ways to part a text; refused where one of them is."""
    refusals = []
    for split in SPLITS if name.startswith("a.txt") else ("file",):
        try:
            read_corpus(folder / name, tokenizer=tokenizer(), window=11, tail="keep", split=split)
        except RheoscopeError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _texts(folder: Path) -> None:
    text = f"\ufeff = One = \n\n{TEXT}\n\n = = Part = = \r\n\n{TEXT}\n \n = Two = \n\n".encode()
    (folder / "a.txt").write_bytes(text)
    (folder / "a.txt.gz").write_bytes(gzip.compress(text, mtime=0))


def _lines(folder: Path) -> None:
    rows = [
        {"text": TEXT, "id": 1, "of": {"a": [1.5, None]}},
        {"text": "é\ud83d\udc08\n"},
        {"text": " "},
        {"text": TEXT},
    ]
    text = "\n".join(json.dumps(row) for row in rows).encode()
    (folder / "b.jsonl").write_bytes(text)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))


def _mutated_lines(content: bytes) -> st.SearchStrategy[bytes]:
    """One line changed inside, or bytes of the whole."""
    lines = content.splitlines()

    def with_line(number: int) -> st.SearchStrategy[bytes]:
        return mutated_json(lines[number]).map(lambda line: b"\n".join([*lines[:number], line, *lines[number + 1 :]]))

    return st.one_of(*map(with_line, range(len(lines))), mutated_bytes(content))


def _gzipped(change: Change) -> Change:
    """Changes inside, packed again, beside those of the packed bytes."""
    return lambda content: st.one_of(
        change(gzip.decompress(content)).map(lambda text: gzip.compress(text, mtime=0)), mutated_bytes(content)
    )


def _table(folder: Path) -> None:
    texts = [f"{TEXT} {number}" for number in range(30)]
    columns = {"id": list(range(30)), "text": pyarrow.array(texts).dictionary_encode(), "of": [{"a": [1]}] * 30}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "c.parquet", row_group_size=7)
    plain = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(plain, folder / "d.parquet", compression="NONE", use_dictionary=False)


def _at_either_end(content: bytes) -> st.SearchStrategy[bytes]:
    """Parquet describes itself at its end: as many changes there as elsewhere."""
    cut = max(0, len(content) - 1500)
    tail = mutated_bytes(content[cut:], head=1500).map(lambda end: content[:cut] + end)
    return st.one_of(tail, mutated_bytes(content))


def _read_model(folder: Path, name: str) -> None:
    view = load(folder / name if name.endswith(".gguf") else folder)
    if view.context is None or view.context > 5:
        view.forward(torch.arange(3, 8)[None])


def _gguf(folder: Path) -> None:
    write_llama(tiny("llama", dtype=torch.float32), folder / "e.gguf")


def _folder(folder: Path) -> None:
    saved("llama", folder)


def _shards(folder: Path) -> None:
    saved("llama", folder, max_shard_size="20KB")


def _mutated_header(content: bytes) -> st.SearchStrategy[bytes]:
    """A safetensors file with values of its header changed, its length put right or not."""
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + length], content[8 + length :]

    def whole(changed: bytes) -> bytes:
        return struct.pack("<Q", len(changed)) + changed + rest

    return st.one_of(
        mutated_json(header).map(whole), mutated_bytes(content, head=8 + length), mutated_bytes(content, head=16)
    )


@cache
def tiny_view() -> ModelView:
    return ModelView(tiny("llama"))


def _plan(folder: Path) -> None:
    PLAN.save(folder / "plan.yaml")


def _mutated_plan(content: bytes) -> st.SearchStrategy[bytes]:
    whole = mutated_value(yaml.safe_load(content)).map(lambda value: yaml.safe_dump(value).encode())
    return st.one_of(whole, whole, mutated_bytes(content, head=len(content)))


def _read_plan(folder: Path, name: str) -> None:
    """As `rheoscope edit` does before it runs anything."""
    view, plan = tiny_view(), Plan.load(folder / name)
    plan.refuse_other(view)
    refuse_edits(view, completed(plan.edits, np.zeros((view.n_layers, view.n_heads, view.d_value))))


def _run(folder: Path) -> None:
    synthetic_run(2, 3, lags=7).save(folder / "run.nc")


def _read_run(folder: Path, name: str) -> None:
    """Read, compared with itself, and one in four drawn, which takes longest."""
    run = Run.load(folder / name)
    run.to_tables()
    run.summary()
    compared(run, run)
    if zlib.crc32((folder / name).read_bytes()) % 4 == 0:
        html(run)


CONFIGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_BY_NAME: dict[str, tuple[Callable[[Path], object], dict[str, Change], Callable[[Path, str], Any]]] = {
    "text": (_texts, {"a.txt": mutated_bytes, "a.txt.gz": _gzipped(mutated_bytes)}, _read_text),
    "jsonl": (_lines, {"b.jsonl": _mutated_lines, "b.jsonl.gz": _gzipped(_mutated_lines)}, _read_text),
    "parquet": (_table, {"c.parquet": _at_either_end, "d.parquet": _at_either_end}, _read_text),
    "gguf": (_gguf, {"e.gguf": lambda content: mutated_bytes(content, head=3000)}, _read_model),
    "safetensors": (_folder, {"model.safetensors": _mutated_header}, _read_model),
    "shards": (_shards, {"model.safetensors.index.json": mutated_json}, _read_model),
    "config": (_folder, dict.fromkeys(CONFIGS, mutated_json), _read_model),
    "plan": (_plan, {"plan.yaml": _mutated_plan}, _read_plan),
    "run": (_run, {"run.nc": mutated_run}, _read_run),
}
READERS = {name: Reader(name, *parts) for name, parts in _BY_NAME.items()}


@dataclass(frozen=True)
class Damaged:
    """A file and what is put in it; written as its length in messages."""

    name: str
    content: bytes

    def __repr__(self) -> str:
        return f"{self.name} with {len(self.content)} bytes"


def inputs(reader: Reader, folder: Path) -> st.SearchStrategy[Damaged]:
    """Files with other contents."""
    names = [name for name in reader.changes if (folder / name).is_file()]
    changed = {name: reader.changes[name]((folder / name).read_bytes()) for name in names}
    return st.one_of(*(st.builds(Damaged, st.just(name), content) for name, content in changed.items()))
