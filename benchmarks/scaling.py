"""How the time and memory of `measure` grow with documents, layers and length of the windows, in one run.

    python benchmarks/scaling.py [--instruments loss,routing,steering,sinks,fields]

A random Llama (d_model 128, 4 heads of 32) on the built-in text, all instruments with their default samples,
without nulls, which are read on so many windows whatever their number; likewise no solvers. `cost ~ n^slope` is fitted
over logarithms. What is read on a fixed sample adds a constant, so that documents and layers also get a straight line:
seconds of one more, and how far the times are from the line. On one thread the clock is processor time, the least of
several runs. Peak memory is that of a process of its own; fields hold snapshots within a budget, here 200 MiB, and come
apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np
import torch
from machine import machine
from measure import peak_mb
from transformers import LlamaConfig, LlamaForCausalLM

import rheoscope
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.models.view import ModelView

INSTRUMENTS = "loss,routing,steering,sinks,fields"
BATCH = 4
BASE = {"windows": 16, "layers": 4, "length": 256}
AXES = {"windows": (32, 64, 128, 256), "layers": (2, 4, 8, 16), "length": (128, 256, 512, 1024)}
MEMORY_WINDOWS = (32, 256)
BUDGET_MIB = 200  # of snapshots of fields; 193 are the least for windows of 1,024 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruments", default=INSTRUMENTS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.instruments.split(",")
    if arguments.peak_of:
        work(BASE | {"windows": arguments.peak_of}, names)()
        print(json.dumps(peak_mb()))
        return
    print(machine())
    for axis, sizes in AXES.items():
        growth(axis, sizes, [best(work(BASE | {axis: size}, names), arguments.repeats) for size in sizes])
    memory([name for name in names if name != "fields"])
    if "fields" in names:
        memory(names)


def work(shape: dict[str, int], names: list[str]):
    """One measurement of a model and text of that shape."""
    tokenizer = rheoscope.load("builtin:manual").tokenizer
    view = model(shape["layers"], len(tokenizer))
    text = rheoscope.read(
        "builtin:manual-all", tokenizer=tokenizer, window=shape["length"], n_windows=shape["windows"], tail="drop"
    )
    options = {
        "sinks": SinkReadings.Options(n_geometry=0, n_cost_layers=0),
        "fields": Fields.Options(budget_mib=BUDGET_MIB),
    }
    options = {name: chosen for name, chosen in options.items() if name in names}
    return lambda: rheoscope.measure(view, text, instruments=names, options=options, batch_size=BATCH, nulls=False)


def model(n_layers: int, vocabulary: int) -> ModelView:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return ModelView(LlamaForCausalLM(config).eval())


def growth(axis: str, sizes: tuple[int, ...], seconds: list[float]) -> None:
    """The exponent, and the straight line where one is meant."""
    slope = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    cells = ", ".join(f"{size}: {value:.2f}" for size, value in zip(sizes, seconds, strict=True))
    print(f"by {axis}: cost ~ n^{slope:.2f} (seconds at {cells})", end="")
    if axis != "length":
        line = np.polyfit(sizes, seconds, 1)
        away = np.abs(np.polyval(line, sizes) / seconds - 1).max()
        print(f"; {1e3 * line[0]:.1f} ms each and {line[1]:.2f} s besides, off by at most {100 * away:.0f} %", end="")
    print(flush=True)


def memory(names: list[str]) -> None:
    """Peaks of processes of their own."""
    peaks = []
    for n_windows in MEMORY_WINDOWS:
        command = [sys.executable, __file__, "--instruments", ",".join(names), "--peak-of", str(n_windows)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks.append(json.loads(done.stdout.splitlines()[-1]))
    cells = ", ".join(f"{n}: {peak:.0f}" for n, peak in zip(MEMORY_WINDOWS, peaks, strict=True))
    print(f"peak memory of {', '.join(names)} by windows, in MB: {cells}", flush=True)


def best(task, repeats: int) -> float:
    """Least seconds of several runs."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(repeats):
        started = clock()
        task()
        seconds.append(clock() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
