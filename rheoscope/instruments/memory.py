"""How much memory a measurement will take: weights, what one batch makes, and what the instruments keep.

The estimate is made before the run, of sizes alone; docs/scale.md says how it compares with what was then taken. The
memory of the process as it is, model and text included, is read from the system.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.instrument import Instrument
from rheoscope.models.view import ModelView

# Tensors of a batch that are alive at a time, calibrated on what runs took (docs/scale.md).
STREAMS = 20  # [position d_model]: stream, norms, queries, keys, values, sites, and copies of the instruments
HIDDEN = 4  # [position d_ffn]: gate, up, their product, and what it is made of
MAPS = 1.5  # [head query key] of one window: where maps are read whole, or the model needs them for its output
LOGITS = 1.3  # [position vocabulary]
SLACK = 192 * 2**20  # of libraries, and memory that the allocator does not hand back
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are taken for."""

    before: int  # the process as it is: program, weights, text
    kept: int
    spare: int  # a second copy of the largest part of the model, for the untrained null; slack
    per_window: int
    batch_size: int

    @property
    def peak(self) -> int:
        return self.before + self.kept + self.spare + self.per_window * self.batch_size

    @property
    def least(self) -> int:
        """The peak with one window at a time."""
        return self.peak - self.per_window * (self.batch_size - 1)

    def __str__(self) -> str:
        parts = f"model and program {written(self.before)}, {written(self.per_window)} per window of a batch of "
        parts += f"{self.batch_size}, kept by the instruments {written(self.kept)}, other {written(self.spare)}"
        return f"memory: about {written(self.peak)} at most ({parts})"


def estimate(
    view: ModelView, instruments: Sequence[Instrument], *, window: int, batch_size: int, nulls: bool
) -> Memory:
    """What a measurement will take at its peak."""
    head = any(instrument.reads_output for instrument in instruments)
    kept = sum(instrument.kept_bytes() for instrument in instruments)
    spare = _largest_part(view) if nulls else 0
    per_window = window_bytes(view, instruments, window, head=head)
    return Memory(in_use(view), kept, spare + SLACK, per_window, batch_size)


def window_bytes(view: ModelView, instruments: Sequence[Instrument], window: int, *, head: bool) -> int:
    """Bytes of what one window makes on its way through a layer, and of its logits."""
    item = max(view.dtype.itemsize, 4)
    widest = max(
        (max(p.shape) for p in view.blocks[0].parameters() if p.dim() == 2 and p.is_floating_point()),
        default=4 * view.d_model,
    )
    in_layer = window * (STREAMS * view.d_model + HIDDEN * widest)
    if view.needs_maps or any("attn_probs" in instrument.sites for instrument in instruments):
        in_layer += MAPS * view.n_heads * window**2
    output = view.model.get_output_embeddings()
    logits = LOGITS * window * output.weight.shape[0] if head and output is not None else 0
    return int(item * (in_layer + logits))


def fitting(needed: Memory, most: int | None) -> int:
    """The batch size with which a measurement stays within `most` bytes; as asked for where there is no bound.

    Raises RheoscopeError where one window at a time is too much, naming the least that would do.
    """
    if most is None or needed.peak <= most:
        return needed.batch_size
    if needed.least > most:
        raise RheoscopeError(
            f"at most {written(most)} of memory asked for; this takes about {written(needed.least)} with one window at "
            "a time: give so much, measure fewer instruments, or take shorter windows"
        )
    return 1 + (most - needed.least) // needed.per_window


def in_use(view: ModelView) -> int:
    """Bytes that the process takes at the moment, on its accelerator if the model is on one."""
    if view.device.type == "cuda":
        return torch.cuda.memory_allocated(view.device)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # no Linux: weights alone
        return sum(p.numel() * p.element_size() for p in view.model.parameters() if not p.is_meta)
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def parsed(text: str) -> int:
    """Bytes of a size such as 4GiB, 500MB or 2e9. Raises RheoscopeError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(found[2].upper() or "B") if found else None
    size = float(found[1]) * unit if unit else 0.0
    if not 0 < size < math.inf:
        raise RheoscopeError(f"memory {text!r} asked for; write a size such as 4GiB or 500MB")
    return int(size)


def written(size: int) -> str:
    """A size as people read it."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _largest_part(view: ModelView) -> int:
    """Bytes of the largest block or embedding, which the untrained null holds twice."""
    blocks = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in view.blocks]
    words = view.model.get_input_embeddings().weight
    return max(*blocks, words.numel() * words.element_size())
