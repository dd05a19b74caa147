"""The text of a finished network: the windows that were held out of its training, and what counting predicts there."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from rheoscope.corpus import Corpus, read
from rheoscope.nets.folder import RECORD, write_text
from rheoscope.nets.recipe import Recipe
from rheoscope.nets.train import divided

SMOOTHING = 0.1  # added to every count; for bytes the bigram baseline is best near it


def record_in(folder: Path) -> dict:
    """What a run wrote beside its weights."""
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def finished(runs: Path) -> dict[str, dict]:
    """Record of every finished network in a folder, by NAME-SEED."""
    records = {path.parent.name: record_in(path.parent) for path in sorted(runs.glob(f"*/{RECORD}"))}
    return {name: record for name, record in records.items() if "finished" in record}


def each_finished(description: str, reading: Callable[[Path, dict, argparse.Namespace], dict | None]) -> None:
    """The command line of a reading: one JSON file of every finished network that it reads and that has none yet."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, record in finished(arguments.runs).items():
        path = arguments.out / f"{name}.json"
        found = None if path.exists() else reading(arguments.runs / name, record, arguments)
        if found is not None:
            write_text(path, json.dumps(found) + "\n")
            print(name, flush=True)


def parted(folder: Path, text: str) -> tuple[Corpus, Corpus]:
    """The windows that a network was trained on, and those held out."""
    plan = dataclasses.replace(Recipe(**record_in(folder)["recipe"]), text=[text])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    corpus = read(text, tokenizer=tokenizer, window=plan.window, split=plan.split, pack=True)
    n_training = len(divided(corpus, plan)[0])
    return corpus.of_windows(np.arange(n_training)), corpus.of_windows(np.arange(n_training, corpus.n_windows))


def baselines(training: Corpus, held_out: Corpus) -> dict[str, float]:
    """Held-out loss of the token frequencies and of the token pairs counted in the training windows, nats per token."""
    vocabulary = int(max(training.tokens.max(), held_out.tokens.max())) + 1
    pairs = np.full((vocabulary, vocabulary), SMOOTHING)
    np.add.at(pairs, (training.tokens[:, :-1], training.tokens[:, 1:]), 1)
    single = pairs.sum(0) / pairs.sum()
    double = pairs / pairs.sum(1, keepdims=True)
    before, after = held_out.tokens[:, :-1], held_out.tokens[:, 1:]
    return {"unigram": float(-np.log(single[after]).mean()), "bigram": float(-np.log(double[before, after]).mean())}
