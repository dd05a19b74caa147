"""Runs: what is saved comes back equal, files appear whole or not at all, and tables are tidy."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from small_run import small_run

from rheoscope import storage
from rheoscope.errors import RheoscopeError
from rheoscope.run import Run
from rheoscope.tables import readings


def assert_equal_runs(first: Run, second: Run) -> None:
    assert first.instruments == second.instruments
    assert first.provenance == second.provenance
    for instrument in first.instruments:
        xr.testing.assert_identical(first[instrument], second[instrument])


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


# numbers, texts, truth values: everything an instrument may return
_arrays = st.one_of(
    *(
        arrays(dtype, array_shapes(max_dims=3, max_side=5))
        for dtype in (np.float64, np.float32, np.int64, np.int32, np.bool_, np.complex128, np.complex64)
    ),
    arrays(
        object,
        array_shapes(max_dims=2, max_side=4),
        elements=st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
)


@given(values=st.lists(_arrays, min_size=1, max_size=4), note=st.text(max_size=20))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_saved_comes_back_equal(tmp_path, values, note):
    variables = {
        f"v{i}": ([f"d{i}_{axis}" for axis in range(array.ndim)], array, {"units": "1", "n": 3})
        for i, array in enumerate(values)
    }
    run = Run.of({"routing": xr.Dataset(variables), "loss": xr.Dataset({"nll": 1.5})}, {"note": note})
    run.save(tmp_path / "run.nc", overwrite=True)
    back = Run.load(tmp_path / "run.nc")
    assert_equal_runs(run, back)
    numeric = [name for name, v in run["routing"].data_vars.items() if v.dtype != object]
    assert all(back["routing"][name].dtype == run["routing"][name].dtype for name in numeric)


def test_a_text_with_half_a_character_comes_back_equal(tmp_path):
    tokens = np.array(["\ud83d", "é\\n", "plain"])
    run = Run.of({"loss": xr.Dataset({"token": ("document", tokens)})}, {})
    assert Run.load(run.save(tmp_path / "run.nc"))["loss"].token.values.tolist() == tokens.tolist()


def test_a_large_compressed_array_comes_back_bit_equal(tmp_path):
    values = np.random.default_rng(1).standard_normal((30, 9, 64))
    values[0, 0, :3] = np.nan, np.inf, -0.0
    run = Run.of({"routing": xr.Dataset({"x": (("layer", "head", "component"), values)})}, {})
    back = Run.load(run.save(tmp_path / "run.nc"))
    assert back["routing"].x.values.tobytes() == values.tobytes()


def test_complex_numbers_are_stored_as_pairs_that_any_netcdf_reader_understands(tmp_path):
    values = np.array([complex(np.inf, 1), 2 - 3j])
    path = Run.of({"routing": xr.Dataset({"eigenvalues": ("component", values)})}, {}).save(tmp_path / "run.nc")
    with xr.open_datatree(path, engine="h5netcdf") as raw:
        assert set(raw["routing"].data_vars) == {"eigenvalues_re", "eigenvalues_im"}
    assert Run.load(path)["routing"].eigenvalues.values.tolist() == values.tolist()


def test_a_complex_variable_whose_pair_name_is_taken_is_refused(tmp_path):
    dataset = xr.Dataset({"x": ("d", np.array([1j])), "x_re": ("d", np.array([1.0]))})
    with pytest.raises(RheoscopeError, match=r"routing\.x is complex .* x_re exists as well"):
        Run.of({"routing": dataset}, {}).save(tmp_path / "run.nc")


def test_attribute_access_reads_like_the_question(tmp_path):
    run = Run.load(small_run().save(tmp_path / "run.nc"))
    assert run["routing"].routing_share.sel(layer=2).shape == (2,)
    assert "routing" in run
    assert "fields" not in run
    assert repr(run) == "Run of tiny: loss, routing"
    with pytest.raises(RheoscopeError, match="no fields: it holds loss, routing"):
        run["fields"]


def test_provenance_larger_than_an_attribute_of_old_hdf5_is_kept(tmp_path):
    run = Run.of({}, {"left_out": ["x" * 100] * 2000, "count": np.int64(3), "path": Path("a"), "list": np.arange(2)})
    back = Run.load(run.save(tmp_path / "run.nc")).provenance
    assert (len(back["left_out"]), back["count"], back["path"], back["list"]) == (2000, 3, "a", [0, 1])


def test_provenance_that_json_cannot_hold_is_refused():
    with pytest.raises(RheoscopeError, match="set has no JSON form"):
        Run.of({}, {"x": {1, 2}})


def test_the_file_is_not_held_open_after_loading(tmp_path):
    path = small_run().save(tmp_path / "run.nc")
    run = Run.load(path)
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(path) not in held
    path.unlink()
    assert float(run["routing"].routing_share.sum()) > 0


def test_an_existing_output_is_refused_unless_overwrite_is_said(tmp_path):
    path = small_run().save(tmp_path / "run.nc")
    before = path.read_bytes()
    with pytest.raises(RheoscopeError, match="exists already"):
        small_run().save(path)
    assert path.read_bytes() == before
    Run.of({}, {}).save(path, overwrite=True)
    assert Run.load(path).instruments == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent" / "run.nc", "there is no folder .*absent"),
        (lambda folder: folder, "it is a folder"),
        (lambda folder: Path("/dev/null"), "not an ordinary file"),
        (lambda folder: folder / ("n" * 300), "File name too long"),
    ],
)
def test_an_impossible_output_is_refused_in_one_sentence(tmp_path, make, message):
    with pytest.raises(RheoscopeError, match=message) as caught:
        small_run().save(make(tmp_path), overwrite=True)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    def deny(self, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", deny)
    with pytest.raises(RheoscopeError, match="could not be written: Permission denied"):
        small_run().save(tmp_path / "run.nc")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, interruption):
    path = small_run().save(tmp_path / "run.nc")
    before = path.read_bytes()
    monkeypatch.setattr(storage, "_flush_to_disk", lambda part: (_ for _ in ()).throw(interruption))
    with pytest.raises(interruption):
        small_run().save(path, overwrite=True)
    assert path.read_bytes() == before
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    code = f"""
        import resource, signal, numpy as np, xarray as xr
        from rheoscope.errors import RheoscopeError
        from rheoscope.run import Run
        run = Run.of({{"routing": xr.Dataset({{"x": ("lag", np.random.default_rng(0).random(400_000))}})}}, {{}})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            run.save({str(tmp_path / "run.nc")!r})
        except RheoscopeError as error:
            print("refused:", error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("refused:"), done.stderr
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_saved_file_has_the_permissions_of_an_ordinary_file(tmp_path):
    path = small_run().save(tmp_path / "run.nc")
    (tmp_path / "ordinary").touch()
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.nc"
    link.symlink_to(tmp_path / "real" / "run.nc")
    small_run().save(link)
    assert link.is_symlink()
    assert_equal_runs(small_run(), Run.load(tmp_path / "real" / "run.nc"))


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = small_run().save(tmp_path / "run.nc")
    whole = path.read_bytes()
    for length in {0, 1, 100, *range(0, len(whole), len(whole) // 17), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(RheoscopeError, match="not a run file, or it is damaged") as caught:
            Run.load(path)
        assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other.nc"
    xr.Dataset({"x": 1.0}).to_netcdf(other, engine="h5netcdf")
    with pytest.raises(RheoscopeError, match="netCDF file, but not one that rheoscope wrote"):
        Run.load(other)
    other.write_text("a,b\n1,2\n")
    with pytest.raises(RheoscopeError, match="not a run file"):
        Run.load(other)
    with pytest.raises(RheoscopeError, match="is a folder"):
        Run.load(tmp_path)
    with pytest.raises(RheoscopeError, match="There is no file"):
        Run.load(tmp_path / "absent.nc")


def test_a_file_of_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FORMAT_VERSION", 2)
    path = small_run().save(tmp_path / "run.nc")
    monkeypatch.undo()
    with pytest.raises(RheoscopeError, match="run format 2, this rheoscope reads up to 1"):
        Run.load(path)


def test_what_netcdf_cannot_hold_is_refused_in_one_sentence(tmp_path):
    dataset = xr.Dataset({"x": ((), 1.0, {"bad": {"a": 1}})})
    with pytest.raises(RheoscopeError, match="could not be written"):
        Run.of({"routing": dataset}, {}).save(tmp_path / "run.nc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.attrs.update(n=np.zeros(0)), "an array whose n is no number"),
        (lambda data: data.attrs.update(n="many"), "an array whose n is no number"),
        (lambda data: data["share"].attrs.update(n="many"), "an array whose n is no number"),
        (lambda data: data["share"].attrs.update(summary="most"), "summed up by 'most'"),
        (lambda data: data["share"].attrs.update(summary="value"), "summed up by 'value'"),
        (lambda data: data["share"].attrs.update(units=3), "units is no text"),
        (lambda data: data.update({"share_null": ("head", ["a", "b"])}), "share with an error or null that is no"),
        (lambda data: data.update({"share_se": ("head", ["a", "b"])}), "share with an error or null that is no"),
    ],
)
def test_what_no_measurement_writes_is_refused(tmp_path, change, message):
    data = xr.Dataset({"share": ("head", [0.25, 0.5], {"summary": "median"})}, attrs={"n": 2})
    change(data)
    Run.of({"routing": data}, {"seed": 0}).save(tmp_path / "a.nc")
    with pytest.raises(RheoscopeError, match=message):
        Run.load(tmp_path / "a.nc")


def test_an_array_of_records_is_refused(tmp_path):
    Run.of({"routing": xr.Dataset({"share": ("head", [0.25, 0.5])})}, {"seed": 0}).save(tmp_path / "a.nc")
    with h5py.File(tmp_path / "a.nc", "r+") as file:
        del file["routing/share"]
        file["routing"].create_dataset("share", data=np.zeros(2, [("a", "f4"), ("b", "S3")]))
    with pytest.raises(RheoscopeError, match="which no run has"):
        Run.load(tmp_path / "a.nc")


def test_a_share_of_truth_values_can_be_summed_up(tmp_path):
    data = xr.Dataset({"holds": ("head", [True, False, True], {"summary": "median"})})
    Run.of({"routing": data}, {"seed": 0}).save(tmp_path / "a.nc")
    (reading,) = readings(Run.load(tmp_path / "a.nc")["routing"], "routing")
    assert (reading.value, reading.low, reading.high) == (1.0, pytest.approx(0.2), 1.0)
