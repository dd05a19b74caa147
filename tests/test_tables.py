"""Tables and summaries of a run: every number once, its error and nulls beside it."""

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from small_run import small_run

from rheoscope.errors import RheoscopeError
from rheoscope.run import Run


def test_tables_hold_every_number_once_with_error_and_nulls_beside_it():
    run = small_run()
    tables = run.to_tables()
    assert set(tables) == {"loss.scalars", "routing.layer_head", "routing.layer_lag"}
    table = tables["routing.layer_head"]
    assert list(table) == ["layer", "head", "quantity", "value", "se", "null_gaussian", "n", "unit"]
    assert len(table) == 6
    for row in table.itertuples():
        place = {"layer": row.layer, "head": row.head}
        assert row.value == float(run["routing"].routing_share.sel(place))
        assert row.se == float(run["routing"].routing_share_se.sel(place))
        assert (row.null_gaussian, row.n, row.unit) == (0.5, 5, "1")
    assert tables["loss.scalars"].loc[0, ["quantity", "value", "se"]].tolist() == ["nll_mean", 3.25, 0.5]


def test_texts_and_numbers_are_kept_in_tables_of_their_own_and_labels_come_along():
    dataset = xr.Dataset(
        {"nll": ("document", [1.0, 2.0]), "first": ("document", ["a", "b"])},
        coords={"title": ("document", ["x", "y"])},
    )
    tables = Run.of({"loss": dataset}, {}).to_tables()
    assert tables["loss.document"].value.tolist() == [1.0, 2.0]
    assert tables["loss.document"].title.tolist() == ["x", "y"]
    assert tables["loss.document_text"].value.tolist() == ["a", "b"]


def test_a_null_with_more_dims_than_its_quantity_is_a_quantity_of_its_own():
    dataset = xr.Dataset({"x": ("layer", [1.0, 2.0]), "x_null": (("layer", "seed"), np.ones((2, 3)))})
    tables = Run.of({"routing": dataset}, {}).to_tables()
    assert set(tables["routing.layer_seed"].quantity) == {"x_null"}
    assert "null" not in tables["routing.layer"]


@pytest.mark.parametrize(
    ("format", "read"),
    [("csv", lambda path: pd.read_csv(path, dtype={"unit": str})), ("parquet", pd.read_parquet)],
)
def test_exported_tables_read_back_equal(tmp_path, format, read):
    run = small_run()
    written = run.export(tmp_path / "tables", format)
    for name, table in run.to_tables().items():
        back = read(tmp_path / "tables" / f"{name}.{format}")
        pd.testing.assert_frame_equal(back, table, check_dtype=False)
    assert json.loads((tmp_path / "tables" / "provenance.json").read_text()) == run.provenance
    assert sorted(written) == sorted((tmp_path / "tables").iterdir())
    with pytest.raises(RheoscopeError, match="exists already"):
        run.export(tmp_path / "tables", format)
    run.export(tmp_path / "tables", format, overwrite=True)


def test_overwriting_leaves_no_table_of_an_earlier_run_and_nothing_else_is_touched(tmp_path):
    run = small_run()
    earlier = Run.of(
        {"loss": run["loss"], "steering": run["routing"]}, {"config": {"instruments": ["loss", "steering"]}}
    )
    earlier.export(tmp_path)
    for name in ("notes.csv", "my.table.csv", "loss.scalars.txt"):
        (tmp_path / name).write_text("precious")
    written = run.export(tmp_path, "parquet", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(path.name for path in written), "notes.csv", "my.table.csv", "loss.scalars.txt"]
    )


@pytest.mark.parametrize("said", ["no JSON", "[]", '{"config": 3}', '{"config": {"instruments": [[]]}}', "[" * 10**5])
def test_an_earlier_provenance_that_says_nothing_is_replaced(tmp_path, said):
    (tmp_path / "provenance.json").write_text(said)
    run = small_run()
    run.export(tmp_path, overwrite=True)
    assert json.loads((tmp_path / "provenance.json").read_text()) == run.provenance


def test_an_export_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(RheoscopeError, match="tables as 'xlsx' asked for; there are csv, parquet"):
        small_run().export(tmp_path, "xlsx")
    with pytest.raises(RheoscopeError, match="cannot be made: No such file"):
        small_run().export(tmp_path / "a" / "b")


def test_the_summary_is_the_median_over_places_and_names_its_nulls():
    loss, share = small_run().summary()
    assert (loss.quantity, loss.value, loss.se, loss.how, loss.unit) == ("nll_mean", 3.25, 0.5, "value", "nats/token")
    values = small_run()["routing"].routing_share.values
    assert share.value == np.median(values)
    assert (share.low, share.high) == tuple(np.percentile(values, (10, 90)))
    assert (share.n_places, share.se, share.nulls) == (6, None, {"null_gaussian": 0.5})


def test_places_where_a_quantity_is_not_defined_are_left_out_of_the_summary():
    attrs = {"summary": "median"}
    dataset = xr.Dataset({"x": ("layer", [1.0, np.nan, 3.0], attrs), "y": ("layer", [np.nan] * 3, attrs)})
    x, y = Run.of({"routing": dataset}, {}).summary()
    assert x.value == 2.0
    assert np.isnan(y.value)
