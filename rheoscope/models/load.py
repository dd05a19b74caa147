"""Open a model: a hub name, a local folder, a GGUF file, or `builtin:NAME`."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import RheoscopeError
from .view import ModelView, refuse_config

BUILTIN = "builtin:"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(ref: str | Path, *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False) -> ModelView:
    """The model at `ref`, ready to be measured.

    ref: a hub name (`org/name`, `org/name@revision`), a folder with config.json and safetensors, a .gguf file
    (dequantised, so that it can be saved later), or `builtin:NAME`.
    dtype: float64, float32, bfloat16, float16, or auto: the checkpoint's own on an accelerator, float32 on a CPU.
    device: cpu, cuda, mps, …, or auto: the accelerator there is, else the CPU; `map` spreads over all devices.

    Pickled weights are never read. Raises RheoscopeError in one sentence for whatever cannot be opened, and Refused
    for a family that cannot be measured.
    """
    ref = str(ref)
    where, options = _located(ref)
    chosen = _device(device)
    options |= {"trust_remote_code": trust_remote_code}
    with _explained(ref), _quiet():
        config = AutoConfig.from_pretrained(where, **options)
        refuse_config(config)
        placement = {"device_map": "auto" if device == "map" else {"": chosen}}
        model, info = _model_class(config).from_pretrained(
            where,
            dtype=_dtype(dtype, chosen),
            use_safetensors=None if "gguf_file" in options else True,
            output_loading_info=True,
            **placement,
            **options,
        )
        tokenizer = _tokenizer(where, options)
    _refuse_incomplete(ref, info)
    _refuse_non_finite(ref, model)
    if "gguf_file" in options:
        _forget_quantisation(model)
    return ModelView(model, tokenizer, ref)


def builtin_models() -> dict[str, Path]:
    """Name and folder of every model that ships with rheoscope."""
    zoo = Path(str(files("rheoscope") / "nets" / "zoo"))
    return {folder.name: folder for folder in sorted(zoo.iterdir()) if (folder / "config.json").is_file()}


def _located(ref: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a model, and the options that say so."""
    if ref.startswith(BUILTIN):
        models = builtin_models()
        name = ref.removeprefix(BUILTIN)
        if name not in models:
            raise RheoscopeError(f"built-in model {name!r} asked for; there are {', '.join(models)}")
        return str(models[name]), {"local_files_only": True}
    path = Path(ref).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RheoscopeError(f"no GGUF file at {path}: give the path of an existing file")
        return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RheoscopeError(f"folder {path} has no config.json: give the folder of a transformers checkpoint")
        return str(path), {"local_files_only": True}
    if path.exists():
        raise RheoscopeError(
            f"{path} is a file but no .gguf: give a model folder, a .gguf file, a hub name or builtin:NAME"
        )
    name, _, revision = ref.partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise RheoscopeError(f"no model at {ref!r}: there is no such folder, and it is no hub name (org/name)")
    return _on_hub(name, revision or None)


def _on_hub(name: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """A hub name: from the hub, or from the local cache alone where the hub cannot be reached."""
    options = {"revision": revision or "main"}
    return name, options if _hub_reachable() else options | {"local_files_only": True}


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


@contextmanager
def _explained(ref: str) -> Iterator[None]:
    """Turn what transformers raises for a model that cannot be opened into one sentence."""
    try:
        yield
    except SafetensorError as error:
        raise RheoscopeError(
            f"weights of {ref} are corrupt ({_first_line(error)}): fetch or save the file again"
        ) from None
    except json.JSONDecodeError as error:
        raise RheoscopeError(f"a JSON file of {ref} is corrupt ({error}): fetch or save the model again") from None
    except (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError) as error:
        text = _first_line(error)
        if "connect" in text or "cached files" in str(error) or "offline" in text.lower():
            text = (
                "the hub cannot be reached and the model is not in the local cache: give a local folder, or go online"
            )
        raise RheoscopeError(f"model {ref} cannot be opened: {text}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers while a model is opened; what matters is checked and raised."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _model_class(config: Any) -> Any:
    """The class the checkpoint names, so that a head is neither lost nor invented; AutoModel where it names none."""
    for name in config.architectures or []:
        found = getattr(transformers, name, None)
        if found is not None and issubclass(found, PreTrainedModel):
            return found
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return AutoModel


def _tokenizer(where: str, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer; None for a folder that holds none."""
    folder = Path(where)
    if (
        folder.is_dir()
        and "gguf_file" not in options
        and not any(folder.glob("*token*"))
        and not any(folder.glob("vocab*"))
    ):
        return None
    return AutoTokenizer.from_pretrained(where, **options)


def _device(device: str) -> str:
    if device not in ("auto", "map"):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise RheoscopeError(f"device {device!r} asked for and not usable: {_first_line(error)}") from None
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(dtype: str, device: str) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if dtype not in DTYPES:
        raise RheoscopeError(f"dtype {dtype!r} asked for; it must be auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _refuse_incomplete(ref: str, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random ones: refuse, unless only an unused pooler is missing."""
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    wrong = sorted(str(key) for key in info["mismatched_keys"])
    if missing or wrong:
        kind, keys = ("lacks", missing) if missing else ("has other shapes for", wrong)
        raise RheoscopeError(
            f"checkpoint {ref} {kind} {len(keys)} weights of its architecture, the first {keys[0]}: save it again whole"
        )


def _refuse_non_finite(ref: str, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise RheoscopeError(f"model {ref} has NaN or infinite numbers in {name}: it cannot be measured")


def _forget_quantisation(model: PreTrainedModel) -> None:
    """A GGUF file is dequantised while it is read; without its quantisation record the model is an ordinary one."""
    model.hf_quantizer = None
    model.is_quantized = False
    model.config._pre_quantization_dtype = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
