"""Float64 all the way: for telling a wrong formula from rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """A block of code in which models keep float64: their casts of float64 down to float32 do nothing.

    Most norms, eager softmaxes and some rotations are written in float32, so that a float64 model is otherwise good to
    1e-7 only. Cosines and sines of positions still come from float32 angles.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, softmax):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return func(*args, **kwargs)
