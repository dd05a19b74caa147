"""What steering costs: processor time of its pass, and of `measure` with it, against the plain forward passes.

    python benchmarks/steering.py                                    # a random model of SmolLM2-135M's shape
    python benchmarks/steering.py --model FOLDER --text FILE --split heading

Plain and measured passes alternate; the median of the ratios is given. Processor time, so that a busy machine does not
count as work; run it with OMP_NUM_THREADS=1. `passive` is the shared pass alone, without the nulls.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from measure import opened, plain

import rheoscope
from rheoscope.corpus import Corpus
from rheoscope.instruments.steering.steering import Steering
from rheoscope.models.view import ModelView


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub name; a random model of SmolLM2-135M's shape if left out")
    parser.add_argument("--text", default="builtin:manual-all")
    parser.add_argument("--split", default="file")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    view, corpus = opened(arguments, arguments.windows)
    plain(view, corpus.of_windows(slice(0, arguments.batch)), arguments.batch)  # warm-up
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {corpus.n_windows} x {corpus.window} tokens")
    for name in arguments.cases:
        ratios = []
        for _ in range(arguments.repeats):
            alone = processor_seconds(lambda: plain(view, corpus, arguments.batch))
            measured = processor_seconds(lambda name=name: CASES[name](view, corpus, arguments.batch))
            ratios.append(measured / alone)
        print(f"{name} / plain = {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def passive(view: ModelView, corpus: Corpus, batch: int) -> None:
    options = {"steering": Steering.Options(n_null=0)}
    rheoscope.measure(view, corpus, instruments=["steering"], options=options, batch_size=batch)


def with_loss(view: ModelView, corpus: Corpus, batch: int) -> None:
    options = {"steering": Steering.Options(n_null=0)}
    rheoscope.measure(view, corpus, instruments=["steering", "loss"], options=options, batch_size=batch)


def everything(view: ModelView, corpus: Corpus, batch: int) -> None:
    rheoscope.measure(view, corpus, instruments=["loss", "routing", "steering"], batch_size=batch)


CASES = {"steering, passive": passive, "steering + loss": with_loss, "loss + routing + steering, nulls": everything}


def processor_seconds(work) -> float:
    """Processor time of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    main()
