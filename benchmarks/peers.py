"""`measure` beside two notebooks that ask a model the same questions, in one run.

    python benchmarks/peers.py                                          # a random model of SmolLM2-135M's shape
    python benchmarks/peers.py --model FOLDER --text FILE --split heading

Questions: the loss; shares of routing, diagonal and gauge part of the scores of every head; ranks (k90, k95, k99,
entropy, participation) of S, of S without its gauge part, of F and of M, and the stability of M; masses of sink, first
key, diagonal and previous token, switches and value ratio; deficits, radial shares, lengths, turns and diversities; the
defect of running in parallel, which takes an evaluation of the FFN on every 16th position.

    plain            forward passes of the model with SDPA, logits included: no question answered
    rheoscope        `measure` of loss, routing, steering and sinks, spectra of every window, no nulls; it reads weights
                     and, on one window, lags besides, finds a sink by probes, and gives errors over documents
    rheoscope, all   `measure` as it comes: all five instruments, all nulls, all samples, solvers and maps included
    transformer_lens TransformerBridge, `run_with_cache` with a filter of the seven activations that the questions
                     need, then benchmarks/dense.py layer by layer; the extra FFN is the bridge's own
    transformers     eager attention with `output_attentions` and `output_hidden_states`; q, k, v, what attention and
                     the FFN write and the extra FFN are computed again from the hidden states by the modules of Llama

The notebooks work in float32 without gradients, batch after batch, nothing kept from one batch to the next. Dense
spectra cost the same on any text: they take them on `--dense-windows` windows, and the cost is counted once a window;
the ratio without any is given too. Each case has a process of its own, which first answers for one window, not
counted. On one thread the clock is processor time. Largest differences of readings from ours are printed. Peak memory
is that of the process, model included; `over plain` is over that of plain passes in the same batches.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time

import numpy as np
import peer_cases
import torch
from machine import machine
from measure import peak_mb, save_random
from transformers import AutoTokenizer

import rheoscope

NOTEBOOKS = ("transformer_lens", "transformers")


def main() -> None:
    """Parse the command line, run every case in a process of its own, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; a random model of SmolLM2-135M's shape if left out")
    parser.add_argument("--text", default="builtin:manual-all")
    parser.add_argument("--split", default="file")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--all-windows", type=int, default=16, help="windows of `rheoscope, all`; 0 leaves it out")
    parser.add_argument("--dense-windows", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--peer-batch", type=int, default=1, help="of the notebooks; 1 is the leanest")
    parser.add_argument("--peers", nargs="*", default=NOTEBOOKS, choices=NOTEBOOKS)
    parser.add_argument("--case", choices=list(peer_cases.CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(one_case(arguments)))
        return
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            save_random(folder)
            arguments.model = folder
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """All cases, then the table of ratios."""
    ours = {"plain": arguments.batch, "rheoscope": arguments.batch}
    if arguments.all_windows:
        ours["rheoscope, all"] = arguments.batch
    cases = ours | {name: arguments.peer_batch for name in arguments.peers}
    found = {}
    for name, batch in cases.items():
        if name in NOTEBOOKS and importlib.util.find_spec(name) is None:
            print(f"{name} is not installed and is left out: pip install {name.replace('_', '-')}")
            continue
        found[name] = in_process(arguments, name, batch)
        row(name, found[name])
    base = found["plain"]["peak"]
    bases = {arguments.batch: base}
    for batch in {cases[name] for name in found} - set(bases):
        bases[batch] = in_process(arguments, "plain", batch)["peak"]
        print(f"plain passes in batches of {batch} peak at {bases[batch]:.0f} MB")
    for name in NOTEBOOKS:
        if name in found:
            ratios(name, found, over={case: found[case]["peak"] - bases[cases[case]] for case in found})


def in_process(arguments: argparse.Namespace, case: str, batch: int) -> dict:
    """What one case says of itself."""
    command = [sys.executable, __file__, "--case", case, "--batch", str(batch)]
    for name in ("model", "text", "split", "window", "dense_windows"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    n_windows = arguments.all_windows if case == "rheoscope, all" else arguments.windows
    done = subprocess.run([*command, "--windows", str(n_windows)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def one_case(arguments: argparse.Namespace) -> dict:
    """Seconds a window, with and without dense spectra, peak memory in MB, and readings of one case."""
    corpus = rheoscope.read(
        arguments.text,
        tokenizer=AutoTokenizer.from_pretrained(arguments.model),
        window=arguments.window,
        n_windows=arguments.windows,
        split=arguments.split,
        tail="drop",
    )
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    work = peer_cases.CASES[arguments.case](arguments.model, clock)
    loaded = peak_mb()
    work(corpus.of_windows(slice(0, 1)), arguments.batch, 0)
    started = clock(), time.perf_counter()
    readings, dense = work(corpus, arguments.batch, arguments.dense_windows)
    seconds, wall = clock() - started[0], time.perf_counter() - started[1]
    spectra = sum(dense.values()) / arguments.dense_windows
    bare = (seconds - sum(dense.values())) / corpus.n_windows
    return {
        "windows": corpus.n_windows,
        "bare": bare,
        "seconds": bare + spectra,
        "dense": {name: value / arguments.dense_windows for name, value in dense.items()},
        "wall": wall,
        "loaded": loaded,
        "peak": peak_mb(),
        "readings": readings,
    }


def row(name: str, case: dict) -> None:
    """One line of a case, and what its dense spectra cost."""
    spectra = f" ({case['bare']:.2f} without dense spectra)" if case["dense"] else ""
    print(f"{name}: {case['seconds']:.2f} s a window{spectra}, peak {case['peak']:.0f} MB", end="")
    print(f" ({case['loaded']:.0f} MB once the model is open)", end="")
    print(f"; {case['windows']} windows, {case['wall']:.0f} s of wall time", flush=True)
    for part, seconds in case["dense"].items():
        print(f"    {part}: {seconds:.2f} s a window")


def ratios(name: str, found: dict[str, dict], over: dict[str, float]) -> None:
    """How much faster and leaner we are than a notebook, and how far apart the readings are."""
    peer = found[name]
    for case in (case for case in found if case.startswith("rheoscope")):
        ours = found[case]
        print(f"{name} / {case}: time {peer['seconds'] / ours['seconds']:.1f}", end=", ")
        print(f"{peer['bare'] / ours['seconds']:.2f} if it takes no dense spectra", end="; ")
        print(f"peak {peer['peak'] / ours['peak']:.2f}", end=", ")
        print(f"over plain {over[name]:.0f} MB / {over[case]:.0f} MB = {over[name] / over[case]:.1f}")
    differences = apart(found["rheoscope"]["readings"], peer["readings"])
    print("  largest difference, relative to the largest reading: ", end="")
    print(", ".join(f"{reading} {value:.0e}" for reading, value in differences.items()))


def apart(ours: dict, theirs: dict) -> dict[str, float]:
    """Largest difference of each reading that both took on the same windows, over the largest of either; 0 of zeros."""
    common = [name for name in theirs if name in ours]
    pairs = {name: (np.array(ours[name]), np.array(theirs[name])) for name in common}
    largest = {name: max(np.nanmax(abs(a)), np.nanmax(abs(b))) or 1.0 for name, (a, b) in pairs.items()}
    return {name: float(np.nanmax(abs(a - b)) / largest[name]) for name, (a, b) in pairs.items()}


if __name__ == "__main__":
    main()
