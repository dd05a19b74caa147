"""What a training run is: everything that decides its numbers, and the record of it beside the weights."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from rheoscope.errors import RheoscopeError
from rheoscope.nets.config import RheoscopeConfig
from rheoscope.nets.presets import Preset, preset, preset_config

PRECISIONS = ("auto", "float32", "bf16")
ADAM_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
# A window of one token has no next one.
LEAST = {"steps": 1, "batch": 1, "window": 2, "n_heads": 1, "log_every": 1, "save_every": 1}
POSITIVE = ("learning_rate", "initializer_range")


@dataclass(frozen=True)
class Recipe:
    """A training run. `None` takes the preset's value; AdamW, clipping and cosine are the published ones.

    kind: one attention kind, or one per layer.
    batch: windows per step over all processes; warmup: share of the steps; held_out: share of the windows, the last
    ones, that are never trained on and give the held-out loss.
    tokenizer: "bytes", "bpe:N", a hub name or folder; the preset's by default.
    precision: float32, bf16 (autocast), or auto: bf16 where the hardware has it.
    """

    kind: str | list[str]
    text: list[str]
    size: str = "micro"
    seed: int = 0
    steps: int | None = None
    batch: int | None = None
    window: int | None = None
    learning_rate: float | None = None
    warmup: float = 0.05
    held_out: float = 0.1
    tokenizer: str | None = None
    split: str = "file"
    field: str = "text"
    use_norm: bool = True
    positions: str = "learned"
    n_heads: int | None = None
    head_dims: int | list[int] | None = None
    dropout: float = 0.0
    initializer_range: float | None = None
    precision: str = "auto"
    gradient_checkpointing: bool = False
    log_every: int = 10
    save_every: int = 200

    def __post_init__(self) -> None:
        self._refuse_numbers()
        if "-" in self.text:
            raise RheoscopeError("text from standard input was asked for; a resumed run reads it again: give a file")
        if self.save_every % self.log_every:
            raise RheoscopeError(
                f"save_every {self.save_every} is not a multiple of log_every {self.log_every}: the loss curve of a "
                "resumed run would differ; choose a multiple"
            )
        if self.precision not in PRECISIONS:
            raise RheoscopeError(f"no precision is called {self.precision!r}; there are {', '.join(PRECISIONS)}")

    def _refuse_numbers(self) -> None:
        """Raise RheoscopeError for a number out of its range; NaN is in none."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise RheoscopeError(f"{name} {value} asked for; it must be at least {least}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RheoscopeError(f"{name} {value} asked for; it must be a finite number above 0")
        for name in ("dropout", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise RheoscopeError(f"{name} {getattr(self, name)} asked for; it must be at least 0 and below 1")
        if not 0 < self.held_out < 1:
            raise RheoscopeError(f"held_out {self.held_out} asked for; it must lie between 0 and 1")
        if not 0 <= self.seed < 2**32:
            raise RheoscopeError(f"seed {self.seed} asked for; it must be from 0 to {2**32 - 1}")

    @property
    def preset(self) -> Preset:
        return preset(self.size)

    def filled(self) -> Recipe:
        """The recipe with the preset's values in place of None, and the precision decided for this hardware."""
        shape = self.preset
        wanted = {
            "steps": shape.steps,
            "batch": shape.batch,
            "window": shape.window,
            "learning_rate": shape.learning_rate,
            "tokenizer": shape.tokenizer,
            "n_heads": shape.n_heads,
        }
        changes = {name: value for name, value in wanted.items() if getattr(self, name) is None}
        steps = self.steps or shape.steps
        if steps < self.log_every:
            changes |= {"log_every": steps, "save_every": steps}
        if self.precision == "auto":
            changes["precision"] = "bf16" if has_bf16() else "float32"
        return dataclasses.replace(self, **changes)

    def config(self, *, vocabulary: int, end: int | None) -> RheoscopeConfig:
        """The model's configuration; `end` is the token that begins windows and ends texts."""
        return preset_config(
            self.size,
            self.kind,
            vocab_size=vocabulary,
            num_attention_heads=self.n_heads,
            max_position_embeddings=self.window,
            use_norm=self.use_norm,
            positions=self.positions,
            head_dims=self.head_dims,
            dropout=self.dropout,
            initializer_range=self.initializer_range,
            bos_token_id=end,
            eos_token_id=end,
        )


def has_bf16() -> bool:
    """Whether this machine computes in bfloat16 by itself, rather than by emulation."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
