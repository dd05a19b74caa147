"""Ratios for the networks, each taken in one run: python benchmarks/nets.py [--threads 1]

S-D against softmax: one training step (forward, backward, AdamW) of the same decoder at d 256, 6 layers, 256 tokens,
steps of the two in turn. The least time of several counts, as what disturbs only adds. A vocabulary of 50,257 makes it
the 18M preset; with 257 attention has its largest share.
Linear attention: time and memory of forward and backward at N = 4,096 and 8,192; size of its state in decoding.
"""

from __future__ import annotations

import argparse
import time
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.linear import elu_attention
from rheoscope.nets.presets import preset_config

LENGTH, BATCH = 256, 8


def seconds(call):
    """CPU seconds, so that other work on the machine is not counted."""
    start = time.process_time()
    call()
    return time.process_time() - start


def training_step(kind, vocabulary, n_heads, *, bf16=False):
    """A function that takes one step."""
    torch.manual_seed(0)
    model = RheoscopeForCausalLM(preset_config("18M", kind, vocab_size=vocabulary, num_attention_heads=n_heads)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, vocabulary, (BATCH, LENGTH))

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()

    return step


def least_times(steps, repeats):
    """Least seconds of each step, taken in turn."""
    times = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            taken = seconds(step)
            if turn:  # the first turn allocates
                times[name].append(taken)
    return {name: min(taken) for name, taken in times.items()}


def linear_pass(length):
    """Seconds of one forward and backward pass of causal linear attention over that many tokens."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3))
    return seconds(lambda: elu_attention(q, k, v)[0].sum().backward())


def peak_memory(length):
    """MiB of tensors that the pass holds at its peak, its inputs included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        linear_pass(length)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(sizes)) / 2**20


def state_bytes(kind, n_tokens):
    """Bytes in the cache after that many tokens."""
    model = RheoscopeForCausalLM(preset_config("micro", kind, max_position_embeddings=1024)).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, n_tokens, dtype=torch.long), use_cache=True).cache
    tensors = []
    for layer in cache.layers:
        states = getattr(layer, "recurrent_states", None)
        tensors += [layer.keys, layer.values] if states is None else list(states.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for vocabulary, n_heads in ((50257, 4), (257, 4), (257, 8)):
        steps = {kind: training_step(kind, vocabulary, n_heads) for kind in ("softmax", "sd")}
        least = least_times(steps, options.repeats if vocabulary > 257 else 3 * options.repeats)
        print(
            f"S-D step / softmax step, d 256, 6 layers, {n_heads} heads, L {LENGTH}, vocabulary {vocabulary}: "
            f"{least['sd'] / least['softmax']:.3f} ({least['sd']:.3f} s / {least['softmax']:.3f} s; target 1.25)"
        )
    least = least_times({bf16: training_step("sd", 257, 4, bf16=bf16) for bf16 in (False, True)}, options.repeats)
    print(f"float32 step / bf16 step, S-D, vocabulary 257: {least[False] / least[True]:.2f}")
    linear_pass(8192)
    times = {length: min(linear_pass(length) for _ in range(5 * options.repeats)) for length in (4096, 8192)}
    print(f"linear attention, time at N 8192 / 4096: {times[8192] / times[4096]:.2f} (target 2.2)")
    memory = {length: peak_memory(length) for length in (4096, 8192)}
    print(f"linear attention, memory at N 8192 / 4096: {memory[8192] / memory[4096]:.2f} ({memory[8192]:.0f} MiB)")
    for kind in ("elu", "sd_linear", "softmax"):
        sizes = [state_bytes(kind, n) for n in (16, 1024)]
        print(f"cache of {kind} after 16 and 1,024 tokens: {sizes[0]:,} and {sizes[1]:,} bytes")


if __name__ == "__main__":
    main()
