"""What instruments gather, as named arrays: taken back bit for bit, merged in any order, and nothing else accepted."""

import numpy as np
import pytest
import torch

from rheoscope.corpus import batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.fields.snapshots import LeadingSubspace
from rheoscope.instruments.measure import INSTRUMENTS
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.models.view import ModelView
from rheoscope.stats import restore, state_of, take_in
from tests.tiny import Float64Throughout, tiny

from .texts import random_corpus

CORPUS = random_corpus(lengths=(29,) * 12)  # whole windows, for fields
CASES = {name: (kind, kind.Options()) for name, kind in INSTRUMENTS.items()} | {
    "fields of each head": (Fields, Fields.Options(heads="each")),
    "sinks of three windows": (SinkReadings, SinkReadings.Options(n_sampled=3)),
}
PARTS = list(batches(CORPUS, 2))


@pytest.fixture(scope="module")
def view():
    return ModelView(tiny("llama"))


def copied(instrument):
    return {name: array.copy() for name, array in state_of(instrument)}


def after(view, case, parts, state=None):
    kind, options = CASES[case]
    instrument = kind(view, CORPUS, options)
    if state is not None:
        restore(instrument, state)
    with Float64Throughout():
        run_pass(view, parts, [instrument])
    return instrument


def assert_bit_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_an_instrument_goes_on_from_its_state_bit_for_bit(view, case):
    whole = after(view, case, PARTS)
    state = copied(after(view, case, PARTS[:4]))
    resumed = after(view, case, PARTS[4:], state)
    assert_bit_equal(copied(resumed), copied(whole))
    assert_bit_equal(state, copied(after(view, case, [], state)))  # what was taken back is what was given


@pytest.mark.parametrize("case", CASES)
def test_states_of_parts_merge_to_the_whole_in_any_order(view, case):
    whole = after(view, case, PARTS).finalize()
    states = [copied(after(view, case, PARTS[place::3])) for place in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = after(view, case, [])
        for place in order:
            take_in(merged, states[place])
        found = merged.finalize()
        assert set(found) == set(whole)
        for name in whole:
            scale = np.nanmax(np.abs(whole[name].values.astype(float)), initial=0) if whole[name].dtype != object else 0
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-10, atol=1e-10 * scale, err_msg=str(name))


@pytest.mark.parametrize("case", CASES)
def test_a_state_is_numbers_alone(view, case):
    for name, array in state_of(after(view, case, PARTS[:1])):
        assert array.dtype.kind in "biufc", name
        assert "//" not in name


def test_leading_directions_go_on_from_their_state_bit_for_bit():
    fields, windows = torch.rand(40, 19, generator=torch.Generator().manual_seed(0)), np.arange(40)
    whole, half, resumed = (LeadingSubspace(40, 19, rank=3) for _ in range(3))
    for place in range(0, 40, 4):
        whole.update(windows[place : place + 4], fields[place : place + 4])
        reader = half if place < 20 else resumed
        reader.update(windows[place : place + 4], fields[place : place + 4])
        if place == 16:
            restore([resumed], copied([half]))
    assert_bit_equal(resumed.state(), whole.state())


def test_everything_that_changes_while_a_text_is_read_is_in_the_state(view):
    for case in CASES:
        fresh, read = after(view, case, []), after(view, case, PARTS)
        changed = {
            name
            for name in vars(read)
            if not unchanged(getattr(fresh, name), getattr(read, name), aside=(view, CORPUS))
        }
        caches = {"values", "entries"}  # of factors of the weights and places in a map
        assert changed - caches <= set(read.kept), case


def unchanged(one, other, aside=()):
    """Whether two attributes look alike: arrays and numbers by value, everything else by what it consists of."""
    if any(one is thing for thing in aside) or one is other:
        return True
    if isinstance(one, np.ndarray | torch.Tensor):
        return np.array_equal(one, other, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(unchanged(one[key], other[key], aside) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(unchanged(*pair, aside) for pair in zip(one, other, strict=True))
    if hasattr(one, "__dict__"):
        return unchanged(vars(one), vars(other), aside)
    return one == other


def test_a_state_of_something_else_is_refused(view):
    state = copied(after(view, "loss", PARTS[:1]))
    with pytest.raises(RheoscopeError, match=r"a Routing was to be resumed from"):
        restore(after(view, "routing", []), state)
    del state["window_nll"]
    with pytest.raises(RheoscopeError, match=r"a Loss was to be resumed from"):
        restore(after(view, "loss", []), state)


def test_windows_that_two_processes_both_saw_do_not_merge(view):
    state = copied(after(view, "routing", PARTS[:2]))
    with pytest.raises(RheoscopeError, match="counted twice"):
        take_in(after(view, "routing", PARTS[1:3]), state)
