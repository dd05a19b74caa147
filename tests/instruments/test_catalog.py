"""The catalogue: every variable has a unit, a name and plain words, and nothing goes undescribed."""

import numpy as np
import pytest
import xarray as xr

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.catalog import CATALOG, DIMENSIONS, describe, out_of_bounds, quantity_of


def one_of_each(instrument: str) -> xr.Dataset:
    rows = [row for row in CATALOG.values() if row.instrument == instrument]
    sizes = dict(zip(DIMENSIONS, (2, 3, 5, 7, 11, 13), strict=False))
    dims = sorted({dim for row in rows for dim in row.dims})
    return xr.Dataset(
        {row.name: (row.dims, np.full([sizes[dim] for dim in row.dims], 1.0)) for row in rows},
        coords={dim: np.arange(sizes[dim]) for dim in dims},
    )


@pytest.mark.parametrize("row", CATALOG.values(), ids=CATALOG)
def test_every_row_says_what_a_reader_needs(row):
    assert row.unit
    assert row.long_name
    assert row.equation
    assert row.source == "this project" or row.source.startswith("arXiv ")
    assert row.caption.endswith(".")
    assert set(row.dims) <= set(DIMENSIONS)
    assert row.bounds is None or row.bounds[0] < row.bounds[1]


def test_names_and_long_names_are_unique_within_an_instrument():
    for column in ("name", "long_name", "caption"):
        pairs = [(row.instrument, getattr(row, column)) for row in CATALOG.values()]
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("instrument", ["loss", "routing"])
def test_every_variable_gets_unit_and_long_name(instrument):
    described = describe(one_of_each(instrument), instrument)
    for variable in described.variables.values():
        assert variable.attrs["units"]
        assert variable.attrs["long_name"]


def test_describing_leaves_the_given_dataset_and_its_own_attributes_alone():
    dataset = xr.Dataset({"nll_mean": ((), 3.0, {"n": 5})})
    described = describe(dataset, "loss")
    assert dataset.nll_mean.attrs == {"n": 5}
    assert described.nll_mean.attrs["n"] == 5
    assert described.nll_mean.attrs["summary"] == "value"


def test_errors_and_nulls_take_their_description_from_the_quantity_they_stand_beside():
    names = ["routing_share", *(f"routing_share_{role}" for role in ("se", "null", "null_se", "null_gaussian"))]
    dataset = xr.Dataset({name: (("layer", "head"), np.ones((2, 3))) for name in names})
    described = describe(dataset, "routing")
    assert [described[name].attrs["long_name"] for name in names] == [
        "routing share",
        "routing share, standard error over documents",
        "routing share, untrained model",
        "routing share, untrained model, standard error over documents",
        "routing share, unrelated queries and keys",
    ]


def test_a_name_is_matched_whole_before_it_is_read_as_a_sibling():
    assert quantity_of("routing_k90_gauge_removed_se", "routing")[0].name == "routing_k90_gauge_removed"
    assert quantity_of("nll_mean_se", "loss") == (CATALOG["loss.nll_mean"], "se")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (xr.Dataset({"salience": 1.0}), r"routing\.salience has no row"),
        (xr.Dataset({"salience_se": 1.0}), r"routing\.salience_se has no row"),
        (xr.Dataset({"routing_share": ("layer", [0.5])}), r"routing_share has dims .* row says"),
        (xr.Dataset({"minimal_rank_share": 1.0}, coords={"epoch": [1]}), "coordinate 'epoch' without unit"),
    ],
)
def test_what_has_no_row_is_refused(dataset, message):
    with pytest.raises(RheoscopeError, match=message):
        describe(dataset, "routing")


def test_values_that_a_definition_rules_out_are_named():
    share = xr.DataArray([[0.2, 1.5], [np.nan, 0.1]], dims=("layer", "head"))
    assert out_of_bounds(xr.Dataset({"routing_share": share}), "routing") == [
        "routing.routing_share runs from 0.1 to 1.5, outside [0, 1]."
    ]
    fine = xr.Dataset({"routing_share": share.clip(max=1 + 1e-12), "routing_share_se": share * 9})
    assert out_of_bounds(fine, "routing") == []
