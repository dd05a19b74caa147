"""What can be wrong with a checkpoint, said in one sentence."""

from __future__ import annotations

import re
import struct
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import transformers
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rheoscope.errors import LONGEST_QUOTED, RheoscopeError, first_line

# What transformers and the readers beneath it raise for files they cannot make sense of.
UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, ArithmeticError),
    *(AssertionError, HTTPError),  # the latter of a connection that breaks off while a model is fetched
    *(struct.error, SafetensorError, StrictDataclassError),
)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Buffers that older checkpoints hold and newer models compute.
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.(attn|attention)\.bias)$")


class Explained(AbstractContextManager):
    """A block that reads one part of a model; what is raised in it for unreadable files becomes one sentence.

    subject: what is read; way_out: what to do. A hub name whose host is out of reach gets its own way out.
    """

    def __init__(self, subject: str, way_out: str, *, unreachable: bool = False):
        self.subject, self.way_out, self.unreachable = subject, way_out, unreachable

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # tokenizers raises plain Exception
        if kind is None or not (kind is Exception or issubclass(kind, UNREADABLE)):
            return
        if self.unreachable and issubclass(kind, OSError):
            raise RheoscopeError(
                f"{self.subject} cannot be read: the hub cannot be reached and the model is not in the local cache: "
                "give a local folder, or go online"
            ) from error
        raise RheoscopeError(f"{self.subject} cannot be read ({first_line(error)}): {self.way_out}") from error


def model_class(ref: str, config: PreTrainedConfig, *, trust_remote_code: bool) -> Any:
    """The class the checkpoint names, so that a head is neither lost nor invented.

    Where it names none: the causal one, or the bare one for encoders. Raises RheoscopeError for a class that
    transformers does not know: a neighbour would compute something else.
    """
    own = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and auto_map:
        return AutoModelForCausalLM if "AutoModelForCausalLM" in auto_map else AutoModel
    names = config.architectures or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise RheoscopeError(
            f"{ref} has architectures {str(names)[:LONGEST_QUOTED]}, which name no class: correct config.json"
        )
    for name in names:
        found = own if own is not None and own.__name__ == name else getattr(transformers, name, None)
        if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
            raise RheoscopeError(
                f"{ref} names the architecture {name!r}, which transformers {transformers.__version__} does not have: "
                "correct config.json, or install a newer transformers"
            )
        if not isinstance(config, found.config_class):
            raise RheoscopeError(
                f"{ref} has the model type {config.model_type!r} and names the architecture {name!r}, which do not "
                "belong together: correct config.json"
            )
        return found
    encoder = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    return AutoModel if own is None or encoder else AutoModelForCausalLM


def refuse_pickled(folder: Path) -> None:
    """Raise RheoscopeError for a folder without safetensors, before anything is read."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    raise RheoscopeError(
        f"folder {folder} holds pickled weights only ({pickled[0]}), which are never read because they can run code: "
        "save it again as safetensors"
        if pickled
        else f"folder {folder} holds no safetensors: give the folder of a whole checkpoint"
    )


def refuse_incomplete(ref: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise RheoscopeError where the weights do not fit the architecture, which transformers passes over.

    It fills missing weights with random ones (harmless for an unused pooler alone) and drops those it has no place
    for: layers beyond the configuration's number, biases it says are not there, or the head.
    """
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise RheoscopeError(
            f"checkpoint {ref} lacks {len(missing)} weights of {type(model).__name__}, the first {missing[0]}: "
            "save it again whole"
        )
    if info["mismatched_keys"]:
        key, has, wants = min(info["mismatched_keys"])
        raise RheoscopeError(
            f"checkpoint {ref} has {key} of shape {tuple(has)} where its config.json makes it {tuple(wants)}: "
            "correct config.json, or save it again whole"
        )
    homeless = sorted(key for key in info["unexpected_keys"] if _has_no_place(model, key))
    if homeless:
        raise RheoscopeError(
            f"checkpoint {ref} has {homeless[0]}, for which {type(model).__name__} with its config.json has no place: "
            "correct config.json, or what is measured is another model"
        )


def _has_no_place(model: PreTrainedModel, key: str) -> bool:
    """Whether a weight that was not loaded belongs to the layers or the head, and is no mere buffer."""
    if key.startswith("lm_head."):
        return model.get_output_embeddings() is None
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    starts = {part for name in lists for part in (name, name.removeprefix(f"{model.base_model_prefix}."))}
    inside = any(re.match(rf"{re.escape(start)}\.\d+\.", key) for start in starts)
    return inside and not BUFFERS.search(key)
