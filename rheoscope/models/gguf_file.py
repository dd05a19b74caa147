"""What a GGUF file says about positions and transformers leaves out: put right, or refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig

from rheoscope.errors import Refused

# Llama 3's own values; a file holds only the frequency factors that follow from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def correct_positions(path: Path, config: PreTrainedConfig) -> None:
    """Give a configuration read from a GGUF file the scaling of its rotary embedding.

    llama.cpp keeps Llama 3's scaling as a table of factors, which transformers does not read: the model would turn its
    queries and keys by wrong angles without a word. Raises Refused for scalings that cannot be told from the file.
    """
    reader = gguf.GGUFReader(path)
    tables = {tensor.name: torch.tensor(tensor.data.copy()) for tensor in reader.tensors if tensor.name in TABLES}
    kind = _scaling(reader)
    known = getattr(config, "rope_parameters", None) or {}
    kinds = {known.get("rope_type")} | {part.get("rope_type") for part in known.values() if isinstance(part, dict)}
    if set(tables) == {"rope_freqs.weight"} and kind is None:
        factors = tables["rope_freqs.weight"].double()
        theta = {"rope_type": "llama3", "rope_theta": known["rope_theta"]}
        parameters = theta | LLAMA3 | {"factor": float(factors.max())}
        if torch.allclose(llama3_factors(parameters, 2 * len(factors)), factors, rtol=1e-4):
            config.rope_parameters = parameters
            return
    if tables or (kind is not None and kind not in kinds):
        raise Refused(
            f"GGUF file {path} scales its rotary embedding ({kind or ', '.join(sorted(tables))}), which transformers "
            "does not read from it: open the original checkpoint"
        )


def llama3_factors(parameters: dict[str, Any], n_turned: int) -> Float[Tensor, " pair"]:
    """What Llama 3's scaling divides each rotary frequency by, of a rotary embedding that turns n_turned coordinates.

    Low frequencies by `factor`, high ones by 1, in between interpolated in the number of turns over the original
    context; convert_hf_to_gguf.py of llama.cpp writes the same.
    """
    frequency = parameters["rope_theta"] ** -(torch.arange(0, n_turned, 2, dtype=torch.float64) / n_turned)
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - kept) / parameters["factor"] + kept)


def _scaling(reader: gguf.GGUFReader) -> str | None:
    """The kind of scaling that the file's metadata names; None for none."""
    values = {}
    for name, field in reader.fields.items():
        _, _, key = name.partition(".rope.scaling.")
        if key in ("type", "factor"):
            values[key] = field.parts[field.data[0]]
    kind = bytes(values.get("type", b"none")).decode()
    return None if kind == "none" or values.get("factor", [0.0])[0] == 1.0 else kind
