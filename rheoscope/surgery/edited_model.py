"""An edited model as transformers knows it: from_pretrained, save_pretrained, generate, training.

It holds the model of the family, restructured, and forwards to it. Its configuration is that of the original model and
the edits; making it repeats the edits on an empty model, and the weights that are read then fit. Importing this module
registers it with the Auto classes. Without rheoscope transformers does not know the model type and says so.

It is imported when its model type is first looked up, possibly by another module of ours that is not yet whole. So it
imports next to nothing of ours itself; what it works with comes when it is first used, in `_work`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.families import FAMILIES, Family

if TYPE_CHECKING:
    from rheoscope.surgery.edits import Edit
    from rheoscope.surgery.save import save_edited as save_edited

MODEL_TYPE = "rheoscope_edited"
IMPLEMENTATION = "rheoscope_edited"  # of attention


def _work() -> ModuleType:
    """What structures a model."""
    return import_module("rheoscope.surgery.structure")


class EditedConfig(PreTrainedConfig):
    """The configuration of the original model, and what was done to it.

    text_config: the original's, which names its class. rounds: one list of edits, as plain values, for every time the
    model was edited; head numbers in each are those of the model at that time. What it does not have itself is asked
    of text_config.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012  the name and type transformers looks for

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    rounds: list[list[dict[str, Any]]] | None = None

    def __post_init__(self, **kwargs: object) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = _config_of(self.text_config)
        self.rounds = [] if self.rounds is None else self.rounds
        super().__post_init__(**kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("text_config")
        if name.startswith("_") or not isinstance(own, PreTrainedConfig):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(own, name)


def _config_of(values: dict[str, Any]) -> PreTrainedConfig:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind == MODEL_TYPE:
        raise RheoscopeError("the configuration of an edited model names no original model type: save the model again")
    return AutoConfig.for_model(**values)


class EditedForCausalLM(PreTrainedModel, GenerationMixin):
    """A model restructured by edits. `edited` is the model of the family inside it."""

    config: EditedConfig
    config_class = EditedConfig
    base_model_prefix = "edited"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: EditedConfig, original: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.edited = _work().empty(config) if original is None else original
        if original is not None:
            self.generation_config = copy.deepcopy(getattr(original, "generation_config", self.generation_config))
        for edits in config.rounds:
            _work().repeat(self, edits)
        self._settle()
        if original is not None:
            for module in self.modules():
                module._is_hf_initialized = True  # transformers draws the weights of all others anew
        self.post_init()

    @property
    def family(self) -> Family:
        """Where the original's family keeps its parts."""
        own = self.edited.config
        return FAMILIES[own.model_type].resolved(own)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers."""
        return list(self.edited.base_model.get_submodule(self.family.blocks))

    @property
    def base_model(self) -> nn.Module:
        return self.edited.base_model

    def get_input_embeddings(self) -> nn.Module:
        return self.edited.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.edited.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.edited.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.edited.set_output_embeddings(new_embeddings)

    def set_attn_implementation(self, attn_implementation: Any, **_: Any) -> None:
        """Refused for any but its own: linear layers would turn into softmax attention."""
        if attn_implementation != IMPLEMENTATION:
            raise Refused(
                f"attention by {attn_implementation!r} asked for; an edited model attends by its own function, which "
                "calls SDPA for the layers that have a softmax"
            )

    def edit(self, edits: Sequence[Edit]) -> None:
        """One more round of edits, in place."""
        self.config.rounds = [*self.config.rounds, _work().make(self, edits)]
        self._settle()

    def _settle(self) -> None:
        """Attention by our function everywhere; layers that keep no keys noted."""
        self._linear, self._keyless = _work().settle(self)
        self._n_layers = len(self.blocks)
        self._accepted = frozenset(inspect.signature(self.edited.forward).parameters)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "logits_to_keep": logits_to_keep if isinstance(logits_to_keep, Tensor) or logits_to_keep else None,
        }
        if "use_cache" in self._accepted:
            given["use_cache"] = use_cache
        given["cache"] = self._cache(cache, use_cache)
        given = {name: value for name, value in given.items() if value is not None}
        unknown = sorted(given.keys() - self._accepted)
        if unknown:
            raise RheoscopeError(f"{unknown[0]} given; {type(self.edited).__name__} does not take it: leave it out")
        with self._states(given.get("cache")):
            out = self.edited(**given, **kwargs)
        self._count(given.get("cache"), (inputs_embeds if input_ids is None else input_ids).shape[1])
        return out

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache of this call, with places for states. Made here if at all: only we know which layers keep keys."""
        wanted = getattr(self.edited.config, "use_cache", False) if use_cache is None else use_cache
        if cache is None and wanted and self._keyless and not self.training and "cache" in self._accepted:
            cache = DynamicCache(config=self.edited.config)
        if cache is not None and self._keyless:
            _work().fit_cache(cache, self._keyless, self._n_layers)
        return cache

    @contextmanager
    def _states(self, cache: Cache | None) -> Iterator[None]:
        """The linear layers know their states while the block lasts."""
        try:
            for layer, mixing in self._linear.items():
                mixing.kept = None if cache is None else cache.layers[layer]
            yield
        finally:
            for mixing in self._linear.values():
                mixing.kept = None

    def _count(self, cache: Cache | None, n_tokens: int) -> None:
        for layer in self._keyless if cache is not None else ():
            cache.layers[layer].seen += n_tokens


AutoConfig.register(MODEL_TYPE, EditedConfig)
AutoModelForCausalLM.register(EditedConfig, EditedForCausalLM)


def __getattr__(name: str) -> Any:
    if name == "save_edited":
        return import_module("rheoscope.surgery.save").save_edited
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
