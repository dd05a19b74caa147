"""What a checkpoint says of its size, against what its files can hold, before memory is taken or a layer is made."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig

from rheoscope.errors import RheoscopeError

NUMBERS_PER_BYTE = 8  # of the coarsest quantisation there can be
INDEX = "model.safetensors.index.json"
Stamp = tuple[tuple[str, int, int], ...]


def weight_files(folder: Path | None, file: Path | None) -> list[Path]:
    """The files that hold weights, of a folder or one GGUF file; none for a model of the hub."""
    if file is not None:
        return [file]
    return sorted(folder.glob("*.safetensors")) if folder is not None else []


def refuse_index(folder: Path | None) -> None:
    """Raise RheoscopeError where the index of a checkpoint in several files names one outside its folder."""
    path = folder / INDEX if folder is not None else None
    if path is None or not path.is_file():
        return
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        names = {None}
    if not names or not all(isinstance(name, str) for name in names):
        raise RheoscopeError(
            f"the weights of {folder} cannot be read ({INDEX} is no index of weights by file): fetch or save them again"
        )
    strange = sorted(name for name in names if Path(name).name != name or name in ("", ".."))
    if strange:
        raise RheoscopeError(
            f"{path} names the file {strange[0]!r}, which leads out of the folder: fetch or save the checkpoint again"
        )


def refuse_claims(ref: str, kind: Any, config: PreTrainedConfig, files: Sequence[Path]) -> None:
    """Raise RheoscopeError where a configuration describes more layers or parameters than the files can hold.

    A few digits in a configuration would else take hours, or all memory there is. kind: the class to be made.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
    n_tensors = sum(map(_n_tensors, files))
    if layers > n_tensors:
        raise RheoscopeError(
            f"checkpoint {ref} speaks of {layers} layers and holds {n_tensors} tensors: correct its configuration, or "
            "fetch it again"
        )
    room = NUMBERS_PER_BYTE * sum(path.stat().st_size for path in files)
    described = _n_parameters(kind, copy.deepcopy(config))
    if described > room:
        raise RheoscopeError(
            f"checkpoint {ref} describes {described:.3g} parameters, and its files can hold {room:.3g} at most: "
            "correct its configuration, or fetch it again"
        )


def _n_tensors(path: Path) -> int:
    if path.suffix == ".gguf":
        return len(gguf.GGUFReader(path).tensors)
    with safe_open(path, framework="pt") as file:
        return len(file.keys())


def _n_parameters(kind: Any, config: PreTrainedConfig) -> int:
    """Parameters of a model of that class, which is made without its numbers."""
    with torch.device("meta"):
        model: nn.Module = kind._from_config(config) if hasattr(kind, "_from_config") else kind.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def stamp(files: Sequence[Path]) -> Stamp:
    """Name, size and time of change of every file."""
    return tuple((str(path), status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()])


def refuse_changed(ref: str, before: Stamp, files: Sequence[Path]) -> None:
    """Raise RheoscopeError where a file has changed since its stamp was taken."""
    changed = sorted({name for name, *_ in set(before) ^ set(stamp(files))})
    if changed:
        raise RheoscopeError(f"{changed[0]} changed while {ref} was read: wait until it is whole, and open it again")


def own_numbers(model: nn.Module) -> None:
    """Give every weight that is mapped from a file memory of its own.

    A mapped checkpoint that is written anew would change the model while it is measured, and one that is cut short
    would end the process.
    """
    mapped = _mapped()
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.device.type != "cpu":
            continue
        if mapped is None or any(first <= tensor.data_ptr() < last for first, last in mapped):
            tensor.data = tensor.data.clone()


def _mapped() -> list[tuple[int, int]] | None:
    """Addresses of memory that is a file's; None where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    lines = [line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines()]
    ranges = [line[0].split("-") for line in lines if len(line) == 6 and line[5].startswith("/")]
    return [(int(first, 16), int(last, 16)) for first, last in ranges]
