"""What a view is built on: two short passes that find the attention calls, the blocks and the stream between them.

The first pass goes through the tapped attention, the second through the model's own. Where the two disagree, the
attention we read is not the model's own, and the model is refused.
"""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import ExitStack

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rheoscope.errors import Refused
from rheoscope.models.attention import Attention
from rheoscope.models.checkpoint import first_line
from rheoscope.models.interface import LayerTaps, attention_by, attention_tapped
from rheoscope.models.placement import execution_device

N_TOKENS = 4
WAY_OUT = "use a family of docs/families.md"
# Largest relative change of a position's last hidden state that may still be rounding, in full and in half precision.
ROUNDING, HALF_ROUNDING = 1e-3, 0.2


@torch.no_grad()
def attention_calls(model: PreTrainedModel, *, needed: bool = True) -> list[tuple[nn.Module, Attention]]:
    """Every module that calls the attention interface, in order, with each call. Refused where `needed` is none."""
    kind = model.config.model_type
    own = _last_hidden_state(model, "does not run on a few token ids", "rheoscope reads models of text only")
    calls: list[tuple[nn.Module, Attention]] = []
    with ExitStack() as undo:
        for module in model.modules():
            keep = {"attention": lambda _, attention, module=module: calls.append((module, copy.copy(attention)))}
            undo.enter_context(attention_tapped(module, LayerTaps(-1, keep)))
        undo.enter_context(attention_by(model))
        tapped = _last_hidden_state(model, "does not attend through transformers' attention interface", WAY_OUT)
    if needed and not calls:
        raise Refused(
            f"{kind} makes no call of transformers' attention interface, so there is no attention to read: it is "
            f"recurrent, or it computes attention inside its own module; {WAY_OUT}"
        )
    size = own.norm(dim=-1).clamp(min=torch.finfo(own.dtype).tiny)  # where a state is zero, it may not change at all
    change = float(((tapped - own).norm(dim=-1) / size).max())
    if not change <= (HALF_ROUNDING if own.dtype in (torch.float16, torch.bfloat16) else ROUNDING):
        raise Refused(
            f"{kind} does more in attention than its call of transformers' interface says (outputs change by "
            f"{change:.0%} when it is read there): it cannot be read exactly; {WAY_OUT}"
        )
    return calls


def numbered_blocks(model: PreTrainedModel, attentions: list[nn.Module]) -> tuple[list[nn.Module], int]:
    """The numbered modules that hold the attention modules, and how many modules stand in the same list."""
    names = {id(module): name for name, module in model.named_modules()}
    paths = [_block_name(names[id(module)]) for module in attentions]
    blocks = [model.get_submodule(path) for path in paths]
    return blocks, len(list(model.get_submodule(paths[0].rpartition(".")[0]).children()))


@torch.no_grad()
def one_stream(model: PreTrainedModel, blocks: list[nn.Module]) -> bool:
    """Whether each block hands its output, a stream [batch position d_model], to the next as its first input."""
    given: list[Tensor | None] = []
    written: list[Tensor | None] = []

    def keep(kept: list[Tensor | None], x: object) -> None:
        kept.append(x.clone() if isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] == N_TOKENS else None)

    def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        keep(given, args[0] if args else kwargs.get("hidden_states"))

    def leave(_module: nn.Module, _args: tuple, output: object) -> None:
        keep(written, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            undo.callback(block.register_forward_hook(leave).remove)
        _last_hidden_state(model)
    if len(given) != len(blocks) or any(x is None for x in (*given, *written)):
        return False
    return all(torch.equal(before.cpu(), after.cpu()) for before, after in zip(written, given[1:], strict=False))


def sees_the_future(attention: Attention) -> bool:
    """Whether some query of a call may attend to a later key: measured, whatever the configuration says."""
    return attention.allowed is None or bool(attention.allowed.triu(1).any())


def probe_tokens(n_words: int, config: PreTrainedConfig) -> Int[Tensor, "1 token"]:
    """A few different tokens, without those for padding: their embeddings may be zero, of which norms make nothing."""
    padding = {getattr(one, "pad_token_id", None) for one in (config, config.get_text_config())}
    words = [word for word in range(1, min(n_words, N_TOKENS + len(padding) + 1)) if word not in padding]
    return torch.tensor([((words or [0]) * N_TOKENS)[:N_TOKENS]])


def _last_hidden_state(model: PreTrainedModel, fault: str = "", way_out: str = "") -> Tensor:
    """Last hidden state of a few different tokens. Refused, for the fault given, where the model cannot make it."""
    takes = inspect.signature(model.base_model.forward).parameters
    try:
        embeddings = model.get_input_embeddings()
        device = execution_device(embeddings, embeddings.weight)
        tokens = probe_tokens(embeddings.weight.shape[0], model.config).to(device)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return model.base_model(**inputs, **({"use_cache": False} if "use_cache" in takes else {})).last_hidden_state
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Refused(f"{model.config.model_type} {fault} ({first_line(error)}): {way_out}") from error


def _block_name(attention: str) -> str:
    """The name of the block that holds an attention module: up to the last number in its path."""
    found = re.match(r"(.*\.\d+|\d+)(\.|$)", attention)
    if found is None:
        raise Refused(f"attention module {attention!r} stands in no numbered block: the layers cannot be told apart")
    return found.group(1)
