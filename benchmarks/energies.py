"""Cost of `score_energies` on every layer beside one forward pass of the same model, in one run.

    python benchmarks/energies.py [--threads 1] [--batch 4]

The model has the shape of SmolLM2-135M and random weights. On one thread the clock is processor time.
"""

import argparse
import time
from collections.abc import Callable

import torch
from shapes import smollm2
from transformers import LlamaForCausalLM

from rheoscope import linalg

LAYERS, HEADS, KV_HEADS, D_HEAD, POSITIONS = 30, 9, 3, 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    Q, K = (torch.randn(options.batch, heads, POSITIONS, D_HEAD) for heads in (HEADS, KV_HEADS))
    layer = best(lambda: linalg.score_energies(Q, K, scale=0.125), clock, 10)
    exact = best(lambda: linalg.score_energies(Q.double(), K.double(), scale=0.125), clock, 5)
    forward = forward_seconds(options.batch, clock)
    print(f"batch {options.batch}, N = {POSITIONS}, {LAYERS} layers, {HEADS} heads, {options.threads} thread(s)")
    print(f"  forward pass                       {forward:7.2f} s")
    print(f"  energies, float32 Grams            {LAYERS * layer:7.2f} s = {LAYERS * layer / forward:.3f} of it")
    print(f"  energies, float64 Grams            {LAYERS * exact:7.2f} s = {LAYERS * exact / forward:.3f} of it")


def forward_seconds(batch: int, clock: Callable[[], float]) -> float:
    config = smollm2()
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(config.vocab_size, (batch, POSITIONS))
    with torch.no_grad():
        return best(lambda: model(tokens, use_cache=False), clock, 2)


def best(task: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    """Least seconds of several runs, after one that does not count."""
    task()
    seconds = []
    for _ in range(repeats):
        start = clock()
        task()
        seconds.append(clock() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
