"""What measuring costs: time and peak memory of `measure` against the plain SDPA forward passes over the same windows.

    python benchmarks/measure.py                                        # a random model of SmolLM2-135M's shape
    python benchmarks/measure.py --model FOLDER --text FILE --split heading

Times are alternated, plain and measured, and the median of the ratios is given: of the clock, and of processor time,
which other work on the machine disturbs less. Memory is the peak of a process of its own for each case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import smollm2
from transformers import LlamaForCausalLM

import rheoscope
from rheoscope.corpus import Corpus, batches
from rheoscope.models.load import builtin_models
from rheoscope.models.view import ModelView


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub name; a random model of SmolLM2-135M's shape if left out")
    parser.add_argument("--text", default="builtin:manual-all")
    parser.add_argument("--split", default="file")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--instruments", default="loss,routing")
    parser.add_argument("--no-nulls", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory-windows", type=int, nargs="*", default=[16, 160])
    parser.add_argument("--peak-of", choices=["plain", "measure"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(json.dumps(peak_of(arguments)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.model or 'random 135 M'}")
    times(arguments)
    memory(arguments)


def times(arguments: argparse.Namespace) -> None:
    """Plain and measured in turn; the ratio of each pair."""
    view, corpus = opened(arguments, arguments.windows)
    few = corpus.of_windows(slice(0, arguments.batch))  # warm-up of both, imports included
    plain(view, few, arguments.batch)
    names = arguments.instruments.split(",")
    shallow = [name for name in names if name in ("loss", "routing", "steering")]  # fields need more windows
    rheoscope.measure(view, few, instruments=shallow or None, batch_size=arguments.batch, nulls=False)
    ratios = []
    for _ in range(arguments.repeats):
        without = timed(lambda: plain(view, corpus, arguments.batch))
        with_all = timed(lambda: measured(view, corpus, arguments))
        ratios.append([after / before for before, after in zip(without, with_all, strict=True)])
        for clock, before, after in zip(("wall", "processor"), without, with_all, strict=True):
            print(f"{corpus.n_windows} x {corpus.window}: plain {before:.1f} s, measure {after:.1f} s ({clock})")
    wall, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
    nulls = "without nulls" if arguments.no_nulls else "with nulls"
    print(f"measure ({arguments.instruments}; {nulls}) / plain = {wall:.2f}, of processor time {processor:.2f}")


def memory(arguments: argparse.Namespace) -> None:
    """Peak memory of processes of their own."""
    for n_windows in arguments.memory_windows:
        peaks = {}
        for case in ("plain", "measure"):
            command = [sys.executable, __file__, "--peak-of", case, "--windows", str(n_windows)]
            for name in ("text", "split", "window", "batch", "instruments"):
                command += [f"--{name}", str(getattr(arguments, name))]
            command += ["--model", arguments.model] if arguments.model else []
            command += ["--no-nulls"] if arguments.no_nulls else []
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[case] = json.loads(done.stdout.splitlines()[-1])
        over = peaks["measure"] - peaks["plain"]
        print(f"{n_windows} windows: plain peaks at {peaks['plain']:.0f} MB, measure {over:+.0f} MB over it")


def peak_of(arguments: argparse.Namespace) -> float:
    """Peak resident memory of this process in MB, after one case has run."""
    view, corpus = opened(arguments, arguments.windows)
    if arguments.peak_of == "plain":
        plain(view, corpus, arguments.batch)
    else:
        measured(view, corpus, arguments)
    return peak_mb()


def peak_mb() -> float:
    """Peak resident memory of this process alone: `ru_maxrss` also holds that of the process which started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def opened(arguments: argparse.Namespace, n_windows: int) -> tuple[ModelView, Corpus]:
    """The model and its text."""
    view = rheoscope.load(arguments.model) if arguments.model else random_view()
    corpus = rheoscope.read(
        arguments.text, tokenizer=view.tokenizer, window=arguments.window, n_windows=n_windows, split=arguments.split
    )
    return view, corpus


def random_view() -> ModelView:
    """A Llama of SmolLM2-135M's shape with random weights, and the built-in model's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        save_random(folder)
        return rheoscope.load(folder)


def save_random(folder: str) -> None:
    """Write that model and tokenizer to a folder."""
    torch.manual_seed(0)
    config = smollm2()
    tokenizer = rheoscope.load(f"builtin:{next(iter(builtin_models()))}").tokenizer
    LlamaForCausalLM(config).save_pretrained(Path(folder))
    tokenizer.save_pretrained(Path(folder))


@torch.no_grad()
def plain(view: ModelView, corpus: Corpus, batch: int) -> None:
    """Forward passes of the untouched model, logits included."""
    for windows in batches(corpus, batch):
        view.model(input_ids=windows.tokens, use_cache=False)


def measured(view: ModelView, corpus: Corpus, arguments: argparse.Namespace) -> None:
    """What is measured."""
    names, nulls = arguments.instruments.split(","), not arguments.no_nulls
    rheoscope.measure(view, corpus, instruments=names, batch_size=arguments.batch, nulls=nulls)


def timed(work) -> tuple[float, float]:
    """Seconds of the clock, and of processor time of all threads."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


if __name__ == "__main__":
    main()
