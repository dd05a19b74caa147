"""Where a model's numbers are: on a device, on disk until a module runs (accelerate), or packed in few bits.

A module whose numbers lie elsewhere is asked: what a linear map does with unit vectors is its weight, whoever keeps it
and however it is packed. Everything else is read from where accelerate would fetch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.checkpoint import first_line


def execution_device(module: nn.Module, parameter: Tensor) -> torch.device:
    """The device a module computes on, which is not where its parameter lies if that is offloaded."""
    if not parameter.is_meta:
        return parameter.device
    device = getattr(_hook(module), "execution_device", None)
    if device is None:
        raise Refused(f"the numbers of {type(module).__name__} are on no device and in no file: load the model whole")
    return torch.device(device)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor holds floating-point numbers as they are."""
    return not tensor.is_meta and tensor.is_floating_point() and type(tensor) in (nn.Parameter, Tensor)


def has_numbers(model: nn.Module) -> bool:
    """Whether every parameter holds plain floating-point numbers, at hand or where accelerate keeps them."""
    for name, parameter in model.named_parameters():
        kept = parameter.is_meta and hasattr(_hook(model.get_submodule(name.rpartition(".")[0])), "weights_map")
        if not (is_plain(parameter) or (kept and parameter.is_floating_point())):
            return False
    return True


def numbers(module: nn.Module, name: str) -> Tensor | None:
    """A gain or bias of a module; None where it has none. Refused where it is neither plain nor offloaded."""
    parameter = getattr(module, name, None)
    if parameter is None or is_plain(parameter):
        return parameter
    if parameter.is_meta:
        return _fetched(module, name).to(execution_device(module, parameter))
    raise Refused(
        f"{name} of {type(module).__name__} asked for; it is stored as {_kind(parameter)}: load the model dequantised"
    )


@torch.no_grad()
def linear_map(module: nn.Module, *, transposed: bool) -> Float[Tensor, "inputs outputs"]:
    """The weight of a projection as [in, out], from what it does with unit vectors where it is offloaded or packed.

    transposed: it is kept as [in, out] already. Refused where the module does not run on plain vectors.
    """
    weight = module.weight
    if is_plain(weight):
        return weight.detach() if transposed else weight.detach().T
    if weight.is_meta and weight.is_floating_point():
        whole = numbers(module, "weight")
        return whole if transposed else whole.T
    try:
        device = execution_device(module, weight)
        unit = torch.eye(module.in_features, dtype=_computed_in(module), device=device)
        return module.forward(unit) - module.forward(torch.zeros_like(unit[:1]))
    except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise Refused(
            f"weights of {type(module).__name__} asked for; they are stored as {_kind(weight)} and cannot be read "
            f"through it ({first_line(error)}): load the model dequantised"
        ) from error


@contextmanager
def at_hand(*modules: nn.Module) -> Iterator[None]:
    """Modules with their offloaded numbers in place while the block lasts, and run without fetching them.

    Fetching as they run fails where something looks through their arithmetic, such as forward differentiation.
    """
    away = {part for module in modules for part in module.modules() if getattr(_hook(part), "offload", False)}
    with ExitStack() as undo:
        for part in away:
            _hook(part).pre_forward(part)
            undo.callback(_hook(part).post_forward, part, None)
            undo.callback(setattr, part, "forward", part.forward)
            part.forward = part._old_forward
        yield


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name as it is stored, offloaded ones fetched one at a time, packed ones as their parts."""
    twins = getattr(model, "all_tied_weights_keys", None) or {}
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta and name in twins:  # of a weight that comes under its own name
            continue
        path, _, last = name.rpartition(".")
        whole = _fetched(model.get_submodule(path), last) if parameter.is_meta else parameter
        yield from _flat(name, whole)


def refuse_non_finite(ref: str, model: nn.Module) -> None:
    """Raise RheoscopeError naming a weight that is NaN or infinite, wherever it is kept."""
    for name, tensor in stored(model):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RheoscopeError(
                f"model {ref} has NaN or infinite numbers in {name} and cannot be measured: fetch or save it again"
            )


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the plain tensors that a packed one is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (nn.Parameter, Tensor):
        yield name, tensor.detach()
        return
    for part in flatten()[0]:
        yield from _flat(f"{name}.{part}", getattr(tensor, part))


def _fetched(module: nn.Module, name: str) -> Tensor:
    """An offloaded parameter from the file or memory that it is kept in."""
    kept = getattr(_hook(module), "weights_map", None)
    if kept is None:
        raise Refused(f"{name} of {type(module).__name__} asked for; it has no numbers: load the model whole")
    return torch.as_tensor(kept[name])


def _hook(module: nn.Module) -> Any:
    """The hook of accelerate that places a module's numbers; the last of several."""
    hook = getattr(module, "_hf_hook", None)
    return hook.hooks[-1] if hasattr(hook, "hooks") else hook


def _computed_in(module: nn.Module) -> torch.dtype:
    """The dtype that a packed module takes its inputs in."""
    named = getattr(module, "compute_dtype", None)
    weight = module.weight
    if isinstance(named, torch.dtype):
        return named
    return weight.dtype if weight.is_floating_point() else torch.get_default_dtype()


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype if type(tensor) in (nn.Parameter, Tensor) else f"{type(tensor).__name__} ({dtype})"
