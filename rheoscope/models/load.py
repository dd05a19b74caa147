"""Open a model: a hub name, a local folder, a GGUF file, or `builtin:NAME`."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rheoscope.errors import RheoscopeError
from rheoscope.models.checkpoint import (
    Explained,
    first_line,
    model_class,
    refuse_incomplete,
    refuse_pickled,
)
from rheoscope.models.claims import own_numbers, refuse_changed, refuse_claims, refuse_index, stamp, weight_files
from rheoscope.models.gguf_file import correct_positions
from rheoscope.models.placement import refuse_non_finite
from rheoscope.models.view import ModelView, refuse_config

BUILTIN = "builtin:"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("*token*", "vocab*", "*.model")


@dataclass(frozen=True)
class _Place:
    """Where transformers finds a model, and the options that say so."""

    ref: str
    where: str
    options: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # a local folder that holds nothing but this model
    gguf: Path | None = None
    unreachable: bool = False  # on a hub that does not answer: the local cache is all there is


def load(
    ref: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: Mapping[str, str | int] | None = None,
    trust_remote_code: bool = False,
) -> ModelView:
    """The model at `ref`, ready to be measured.

    ref: a hub name (`org/name`, `org/name@revision`), a folder with config.json and safetensors, a .gguf file
    (dequantised, so that it can be saved later), or `builtin:NAME`.
    dtype: float64, float32, bfloat16, float16, or auto: the checkpoint's own on an accelerator, float32 on a CPU.
    device: cpu, cuda, mps, …, or auto: the accelerator there is, else the CPU. `map` spreads over all devices, the CPU
    and, where those do not hold it, the disk; `disk` leaves all weights on disk and reads them as each module runs.
    device_map: accelerate's, module → device, cpu or disk, in the place of `device`.

    Pickled weights are never read. Raises RheoscopeError in one sentence for whatever cannot be opened, and Refused
    for a family that cannot be measured.
    """
    place = _located(str(ref))
    chosen = _device(device)
    placed = dict(device_map) if device_map else {"map": "auto", "disk": {"": "disk"}}.get(device, {"": chosen})
    settings = {"dtype": _dtype(dtype, chosen), "device_map": placed}
    with _quiet(place):
        model = _model(place, settings, trust_remote_code=trust_remote_code)
        tokenizer = _tokenizer(place, trust_remote_code=trust_remote_code)
    refuse_non_finite(place.ref, model)
    return ModelView(model, tokenizer, place.ref)


def builtin_models() -> dict[str, Path]:
    """Name and folder of every model that ships with rheoscope."""
    zoo = Path(str(files("rheoscope") / "nets" / "zoo"))
    return {folder.name: folder for folder in sorted(zoo.iterdir()) if (folder / "config.json").is_file()}


def _located(ref: str) -> _Place:
    """Where a model is. Raises RheoscopeError where there is none, or its folder may not be looked into."""
    if not ref.strip():
        raise RheoscopeError(
            "a model with an empty name asked for: give a hub name, a folder, a .gguf file or builtin:NAME"
        )
    try:
        return _found(ref)
    except OSError as error:
        raise RheoscopeError(f"no model at {ref!r} can be read: {error.strerror}: ask its owner, or copy it") from error


def _found(ref: str) -> _Place:
    if ref.startswith(BUILTIN):
        models = builtin_models()
        name = ref.removeprefix(BUILTIN)
        if name not in models:
            raise RheoscopeError(f"no built-in model is called {name!r}: give one of {', '.join(models)}")
        return _local(ref, models[name])
    path = Path(os.path.expanduser(ref))
    if len(ref) > os.pathconf("/", "PC_NAME_MAX") and not os.path.exists(path):
        raise RheoscopeError(f"no model at {ref[:40]!r}…: the name is too long for a folder or a hub name")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RheoscopeError(f"no GGUF file at {path}: give the path of an existing file")
        options = {"gguf_file": path.name, "local_files_only": True}
        return _Place(ref, str(path.parent), options, gguf=path)
    if path.is_dir():
        return _local(ref, path)
    if path.exists():
        raise RheoscopeError(
            f"{path} is a file but no .gguf: give a model folder, a .gguf file, a hub name or builtin:NAME"
        )
    name, _, revision = ref.partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise RheoscopeError(
            f"no model at {ref!r}: there is no such folder, and it is no hub name: give a folder or org/name"
        )
    reachable = _hub_reachable()
    options = {"revision": revision or "main"} | ({} if reachable else {"local_files_only": True})
    return _Place(ref, name, options, unreachable=not reachable)


def _local(ref: str, folder: Path) -> _Place:
    """A folder with a readable config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise RheoscopeError(f"folder {folder} has no config.json: give the folder of a transformers checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RheoscopeError(f"{path} is no JSON ({first_line(error)}): fetch or save the model again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise RheoscopeError(f"{path} names no model_type: give the folder of a transformers checkpoint")
    return _Place(ref, str(folder), {"local_files_only": True}, folder=folder)


def _hub_reachable() -> bool:
    """Whether the hub's host takes a connection. Asked once, so that an absent network costs no minute of retries."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return True  # the proxy knows
    endpoint = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=5):
            return True
    except OSError:
        return False


def _model(place: _Place, settings: dict[str, Any], *, trust_remote_code: bool) -> PreTrainedModel:
    """The whole model, in the class its checkpoint names."""
    import rheoscope.nets
    import rheoscope.surgery.edited_model  # noqa: F401  so that transformers knows what we train and what we edit

    ref, options = place.ref, place.options | {"trust_remote_code": trust_remote_code}
    explained = partial(Explained, unreachable=place.unreachable)
    with explained(f"the configuration of {ref}", _way_out(place)):
        config = AutoConfig.from_pretrained(place.where, **options)
        if place.gguf:
            correct_positions(place.gguf, config)
    refuse_config(config)
    if place.folder:
        refuse_pickled(place.folder)
        refuse_index(place.folder)
    found = model_class(ref, config, trust_remote_code=trust_remote_code)
    if settings["dtype"] == torch.float64:
        config._experts_implementation = "eager"  # grouped matrix products take no float64
    files = weight_files(place.folder, place.gguf)
    with explained(f"the weights of {ref}", "correct config.json, or fetch or save the checkpoint again"):
        before = stamp(files)
        if files and not (trust_remote_code and getattr(config, "auto_map", None)):
            refuse_claims(ref, found, config, files)
        model, info = found.from_pretrained(
            place.where,
            config=config,
            use_safetensors=None if place.gguf else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **settings,
            **options,
        )
        refuse_changed(ref, before, files)
    refuse_incomplete(ref, model, info)
    own_numbers(model)
    if place.gguf:
        _forget_quantisation(model)
    return model


def _way_out(place: _Place) -> str:
    """What to do about a configuration that cannot be read."""
    if place.gguf:
        return "fetch or convert the file again"
    first = "correct config.json" if place.folder else "check the name, log in to the hub if the model is private"
    return f"{first}, install a newer transformers, or allow code of its own that you trust (trust_remote_code)"


def _tokenizer(place: _Place, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None for a folder that holds none."""
    if place.folder and not any(any(place.folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    way_out = "fetch or save its files again"
    with Explained(f"the tokenizer of {place.ref}", way_out, unreachable=place.unreachable):
        return AutoTokenizer.from_pretrained(place.where, **place.options, trust_remote_code=trust_remote_code)


@contextmanager
def _quiet(place: _Place) -> Iterator[None]:
    """No warnings and bars of transformers while a model is opened; what matters is checked and raised."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        # the bar of a GGUF conversion heeds no setting
        with redirect_stderr(io.StringIO()) if place.gguf else nullcontext():
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _device(device: str) -> str:
    if device not in ("auto", "map", "disk"):
        try:
            if torch.empty(0, device=device).is_meta:
                raise RheoscopeError("device 'meta' asked for; it holds no numbers: give cpu, cuda, mps or auto")
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise RheoscopeError(
                f"device {device!r} asked for and not usable ({first_line(error)}): give cpu, cuda, mps or auto"
            ) from None
        return device
    if device == "disk":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(dtype: str, device: str) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if dtype not in DTYPES:
        raise RheoscopeError(f"dtype {dtype!r} asked for: give auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _forget_quantisation(model: PreTrainedModel) -> None:
    """A GGUF file is dequantised while it is read; without its quantisation record the model is an ordinary one."""
    model.hf_quantizer = None
    model.is_quantized = False
    model.config._pre_quantization_dtype = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
