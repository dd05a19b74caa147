"""What fields cost, beside named peers, in one run.

    python benchmarks/fields.py pod            # all scales at once, and scikit-learn's full-SVD PCA scale by scale
    python benchmarks/fields.py wavelets       # scalograms of rows, and PyWavelets row by row and in batches
    python benchmarks/fields.py measure [--model FOLDER --text FILE --split heading]

One thread; the clock is processor time, the least of several runs. `measure` compares one plain SDPA pass over 150
windows of 256 tokens with what `measure` takes more when fields are added to the loss; a model of SmolLM2-135M's shape
with random weights where none is named.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import pywt
import torch
from shapes import smollm2
from sklearn.decomposition import PCA
from transformers import LlamaForCausalLM

import rheoscope
from rheoscope.corpus import Corpus, batches
from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.pod import lag_grams, lag_window, spectrum
from rheoscope.instruments.fields.wavelets import Morlet, RowEnergies, default_scales
from rheoscope.models.view import ModelView

N, WINDOW, BANDS = 150, 256, (4.0, 8.0, 16.0, 32.0)
LOOPED_SNAPSHOTS = 2  # of the row-by-row loop, which is then scaled up


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["pod", "wavelets", "measure"])
    parser.add_argument("--model", help="a folder or a hub name; a random model of SmolLM2-135M's shape if left out")
    parser.add_argument("--text", default="builtin:manual-all")
    parser.add_argument("--split", default="file")
    parser.add_argument("--windows", type=int, default=N)
    parser.add_argument("--windows-per-document", type=int, default=3)
    parser.add_argument("--save", help="keep the run of loss and fields in this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"pod": pod, "wavelets": wavelets, "measure": measure}[arguments.part](arguments)


def maps() -> torch.Tensor:
    """Softmax maps of random scores: [snapshot, query, key], float32."""
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(N, WINDOW, WINDOW, generator=generator)
    return scores.masked_fill(torch.ones(WINDOW, WINDOW).triu(1).bool(), -torch.inf).softmax(-1)


def pod(_: argparse.Namespace) -> None:
    """POD of all windows on lag, in float64, from packed float32 snapshots; PCA from windowed float64 snapshots."""
    entries = Entries(WINDOW, causal=True, skip_rows=8, sink="separate")
    packed = entries.packed(maps())
    weights = np.stack([lag_window("band", band, entries.lags) for band in BANDS])

    def ours() -> np.ndarray:
        X = packed.double()
        X -= X.mean(0)
        X *= torch.from_numpy(entries.kept)
        return spectrum(
            lag_grams(X, entries.bounds.tolist(), torch.from_numpy(weights)).windowed, N
        ).eigenvalues.numpy()

    kept = packed[:, torch.from_numpy(entries.kept)].double().numpy()
    windowed = [kept * weight[entries.lag[entries.kept]] for weight in weights]

    def theirs() -> np.ndarray:
        return np.stack([PCA(svd_solver="full").fit(x).explained_variance_[: N - 1] * (N - 1) / N for x in windowed])

    difference = np.abs(ours() / theirs() - 1).max()
    fast, slow = best(ours, 5), best(theirs, 3)
    print(f"POD, N = {N}, L = {WINDOW}, {len(BANDS)} scales: {fast:.3f} s; scikit-learn PCA {slow:.2f} s")
    print(f"  {slow / fast:.0f} times; largest relative difference of an eigenvalue {difference:.1e}")


def wavelets(_: argparse.Namespace) -> None:
    """Energies of 150 x 256 rows at 20 scales; PyWavelets gives coefficients and does not square or mask them."""
    entries = Entries(WINDOW, causal=True)
    scales = default_scales(WINDOW)
    energies = RowEnergies(Morlet(scales, WINDOW), entries.support)
    rows = entries.rows(entries.packed(maps()))
    arrays = rows.numpy()
    wavelet = f"cmor2.0-{6 / (2 * math.pi):.6f}"

    def batched() -> None:
        for window in arrays:
            pywt.cwt(window, np.array(scales), wavelet, method="fft", axis=-1)

    def looped() -> None:
        for row in arrays[:LOOPED_SNAPSHOTS].reshape(-1, WINDOW):
            pywt.cwt(row, np.array(scales), wavelet, method="fft")

    fast, slow = best(lambda: energies(rows), 2), best(batched, 1)
    slowest = best(looped, 1) * N / LOOPED_SNAPSHOTS
    print(f"scalogram of {N} x {WINDOW} rows, {len(scales)} scales: {fast:.2f} s")
    print(f"  PyWavelets in batches of {WINDOW} rows: {slow:.1f} s = {slow / fast:.1f} times")
    print(
        f"  PyWavelets row by row: {slowest:.0f} s = {slowest / fast:.0f} times ({LOOPED_SNAPSHOTS} of {N} scaled up)"
    )


def measure(arguments: argparse.Namespace) -> None:
    """A plain pass, measure of the loss, and measure of loss and fields, nulls of fields included."""
    view, corpus = opened(arguments)
    size = 8
    started = time.process_time()
    with torch.no_grad():
        for batch in batches(corpus, size):
            view.model(batch.tokens, use_cache=False)
    plain = time.process_time() - started
    print(f"{corpus.n_windows} windows of {corpus.window}: plain {plain:.1f} s", flush=True)
    seconds = {}
    for names in (["loss", "fields"], ["loss"]):
        started = time.process_time()
        run = rheoscope.measure(view, corpus, instruments=names, batch_size=size)
        seconds[len(names)] = time.process_time() - started
        print(f"  measure of {' and '.join(names)}: {seconds[len(names)]:.1f} s", flush=True)
        if arguments.save and "fields" in names:
            run.save(arguments.save)
    more = seconds[2] - seconds[1]
    print(f"  fields add {more:.1f} s = {more / plain:.2f} of a plain pass")


def opened(arguments: argparse.Namespace) -> tuple[ModelView, Corpus]:
    """The model and so many windows of the text; random tokens for the random model."""
    if arguments.model:
        view = rheoscope.load(arguments.model)
        corpus = rheoscope.read(
            arguments.text,
            tokenizer=view.tokenizer,
            window=WINDOW,
            n_windows=arguments.windows,
            windows_per_document=arguments.windows_per_document,
            split=arguments.split,
        )
        return view, corpus
    config = smollm2()
    torch.manual_seed(0)
    view = ModelView(LlamaForCausalLM(config))
    reference = rheoscope.load("builtin:manual")
    corpus = rheoscope.read(
        arguments.text, tokenizer=reference.tokenizer, window=WINDOW, n_windows=arguments.windows, split="file"
    )
    return view, corpus


def best(task: Callable[[], object], repeats: int) -> float:
    """Least seconds of processor time of several runs."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        task()
        seconds.append(time.process_time() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
