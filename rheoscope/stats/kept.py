"""What an object has gathered, as named arrays: given, taken back bit for bit, and merged, by one walk over all of it.

An object names what it gathers in `kept`: attribute → the law by which two plain values of it become one. Lists,
dictionaries, accumulators and objects with `kept` of their own are followed and bring their own laws (`OWN`). What has
a form of its own for its state has `state`, `restore` and `take_in`. Names are paths: "shares/routing_share/3/sums".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.stats.accumulators import Accumulator

Law = Callable[[np.ndarray, np.ndarray], np.ndarray]
Nested = dict[str, Any]  # of arrays, by path


def OWN(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The law of what must bring its own: two plain values of it are a mistake."""
    raise TypeError("two plain values are to be merged, and no law says how")


def filled(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The law of places that are NaN until one process fills them."""
    return np.where(np.isnan(mine), other, mine)


@runtime_checkable
class Keeper(Protocol):
    """What has a form of its own for what it gathers."""

    def state(self) -> dict[str, np.ndarray]: ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...

    def take_in(self, state: Mapping[str, np.ndarray]) -> None: ...


def state_of(holder: object) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of everything that a holder has gathered, one at a time: no copies, valid until it goes on."""
    for name, part in _parts(holder):
        if isinstance(part, np.ndarray | np.generic | Tensor | int | float):
            yield name, np.asarray(part)
        else:
            yield from ((f"{name}/{rest}", array) for rest, array in state_of(part))


def restore(holder: object, state: Mapping[str, np.ndarray]) -> None:
    """Put a state in the place of what a freshly made holder has gathered, ready to go on."""
    _joined(holder, _nested(state), lambda mine, other: other, anew=True)


def take_in(holder: object, state: Mapping[str, np.ndarray]) -> None:
    """Add what another holder, made with the same arguments, has gathered of other windows of the same corpus."""
    _joined(holder, _nested(state), OWN, anew=False)


def _parts(holder: object) -> Iterator[tuple[str, Any]]:
    """What a holder consists of, by name."""
    if isinstance(holder, Accumulator | Keeper):
        yield from holder.state().items()
    elif isinstance(holder, Mapping):
        yield from ((str(name), part) for name, part in holder.items())
    elif isinstance(holder, list):
        yield from ((str(place), part) for place, part in enumerate(holder))
    else:
        yield from ((name, getattr(holder, name)) for name in holder.kept)


def _nested(state: Mapping[str, np.ndarray]) -> Nested:
    """A state with one dictionary per step of its paths."""
    tree: Nested = {}
    for path, array in state.items():
        *steps, last = path.split("/")
        at = tree
        for step in steps:
            at = at.setdefault(step, {})
        at[last] = array
    return tree


def _joined(mine: Any, other: Any, law: Law, *, anew: bool) -> Any:
    """What stands in the place of `mine` once the state `other` is joined to it, or put in its stead (`anew`)."""
    if not isinstance(other, dict):
        return _like(mine, np.asarray(law(np.asarray(mine), other)))
    if isinstance(mine, Accumulator):
        given = type(mine).from_state(other)
        return given if anew else mine.merge(given)
    if isinstance(mine, Keeper):
        (mine.restore if anew else mine.take_in)(other)
    elif isinstance(mine, dict):
        for name, part in other.items():
            key = int(name) if name.isdigit() else name
            mine[key] = _joined(_at(mine, key, part), part, law, anew=anew)
    elif isinstance(mine, list):
        _require(other, [str(place) for place in range(len(mine))], mine)
        mine[:] = [_joined(part, other[str(place)], law, anew=anew) for place, part in enumerate(mine)]
    else:
        _require(other, list(mine.kept), mine)
        for name, own in mine.kept.items():
            if name in other:
                own = law if anew else own
                setattr(mine, name, _joined(getattr(mine, name), other[name], own, anew=anew))
    return mine


def _at(mine: dict, key: int | str, part: Any) -> Any:
    """What a dictionary has under a key; what it would begin with where it has nothing."""
    if key in mine or hasattr(mine, "default_factory"):
        return mine[key]
    return {} if isinstance(part, dict) else np.full_like(part, np.nan)


def _like(mine: Any, array: np.ndarray) -> Any:
    """An array as the kind of value that it takes the place of, with memory of its own."""
    if isinstance(mine, Tensor):
        return torch.from_numpy(np.array(array)).to(mine.device)
    return type(mine)(array) if isinstance(mine, int | float) else np.array(array)


def _require(state: Nested, names: list[str], holder: Any) -> None:
    """Raise RheoscopeError unless a state has what its holder keeps, and no more; a dictionary may be empty."""
    growing = {name for name, part in _parts(holder) if isinstance(part, dict)}
    if not set(names) - growing <= state.keys() <= set(names):
        raise RheoscopeError(
            f"a {type(holder).__name__} was to be resumed from {sorted(state)}; its state consists of {sorted(names)}."
        )
