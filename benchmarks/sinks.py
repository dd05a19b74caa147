"""What the sink readings add to a forward pass, in one run: processor time, windows read in turn with and without.

    python benchmarks/sinks.py MODEL --text FILE [--window 512] [--windows 4] [--repeats 5]

Passive readings are those of every window; full maps, cosines, margins and bounds of sampled windows come apart.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from rheoscope import corpus
from rheoscope.corpus import batches
from rheoscope.instruments.engine import batch_size_for, run_pass
from rheoscope.instruments.instrument import Instrument
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.models.load import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--split", default="heading")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    view = load(options.model)
    text = corpus.read(
        options.text,
        tokenizer=view.tokenizer,
        window=options.window,
        n_windows=options.windows,
        windows_per_document=1,
        split=options.split,
    )
    print(f"{view.ref}: {text.n_windows} windows of {text.window} tokens, 1 thread, processor time")
    passive = SinkReadings.Options(n_sampled=0, n_null=0)
    sampled = SinkReadings.Options(n_sampled=1, n_geometry=0, n_null=0)
    solved = SinkReadings.Options(n_sampled=1, n_geometry=1, n_null=0)
    size = batch_size_for(view, text.window)

    def read(chosen: SinkReadings.Options | None) -> Callable[[], object]:
        def once() -> None:
            readers: list[Instrument] = [] if chosen is None else [SinkReadings(view, text, chosen)]
            run_pass(view, batches(text, size), readers)

        return once

    tasks = {"plain": read(None), "passive": read(passive), "sampled": read(sampled), "solved": read(solved)}
    seconds = in_turn(tasks, options.repeats)
    plain = seconds["plain"]
    row("plain forward pass without the output head", plain, plain)
    row("with passive sink readings", seconds["passive"], plain)
    added = [one / other - 1 for one, other in zip(seconds["passive"], plain, strict=True)]
    low, middle, high = np.quantile(added, [0, 0.5, 1])
    print(f"  passive readings add {middle:.3f} of a plain pass ({low:.3f} to {high:.3f}; bound 0.15)")
    maps, solver = (
        np.median(np.subtract(seconds[name], seconds[before]))
        for name, before in (("sampled", "passive"), ("solved", "sampled"))
    )
    print(f"  one sampled window adds {maps:.2f} s for maps and cosines, {solver:.2f} s for margins and bounds")


def in_turn(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of every task, each run once per round so that the state of the machine is shared."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    tasks["plain"]()
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            seconds[name].append(time.process_time() - start)
    return seconds


def row(name: str, seconds: list[float], plain: list[float]) -> None:
    print(f"  {name:<46} {np.median(seconds):8.2f} s  {np.median(seconds) / np.median(plain):6.3f}")


if __name__ == "__main__":
    main()
