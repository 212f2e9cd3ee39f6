"""Public data sets have the stated form, and a file that is missing or broken is named."""

import gzip
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl import datasets

DATA_DIR = os.environ.get("TFDPFL_DATA_DIR")


def test_digits_are_the_same_split_every_time():
    data, again = datasets.load_digits(), datasets.load_digits()
    assert (data.name, data.num_classes) == ("digits", 10)
    assert data.x_train.shape == (1437, 8, 8, 1) and data.x_test.shape == (360, 8, 8, 1)
    assert data.x_train.dtype == np.float32 and data.x_train.min() == 0 and data.x_train.max() == 1
    assert set(data.y_train) == set(data.y_test) == set(range(10))
    np.testing.assert_array_equal(data.x_train, again.x_train)


def test_without_folder_and_network_the_digits_stand_in_and_one_line_says_so(monkeypatch, capsys):
    def no_network():
        raise Exception("URL fetch failure\nat length")

    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(tf.keras.datasets.mnist, "load_data", no_network)
    assert datasets.load_image_data().name == "digits"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_or_broken_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz is neither in"):
        datasets.load_image_data(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ValueError, match="not an idx file"):
        datasets.load_mnist(tmp_path)
    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError, match="set TFDPFL_DATA_DIR"):
        datasets.load_adult()


needs_data = pytest.mark.skipif(not DATA_DIR, reason="TFDPFL_DATA_DIR names no folder with the data")


@needs_data
def test_mnist_is_read_from_its_files():
    data = datasets.load_image_data(DATA_DIR)
    assert data.x_train.shape == (60_000, 28, 28, 1) and data.x_test.shape == (10_000, 28, 28, 1)
    assert data.x_train.dtype == np.float32 and data.x_train.max() == 1
    assert list(data.y_train[:5]) == [5, 0, 4, 1, 9]


@needs_data
@pytest.mark.one_stack
def test_adult_is_numbers_only():
    x_train, y_train, x_test, y_test = datasets.load_adult(DATA_DIR)
    assert x_train.shape == (32_561, 108) and x_test.shape == (16_281, 108)
    assert np.isfinite(x_train).all() and np.isfinite(x_test).all()
    assert (y_train.sum(), y_test.sum()) == (7841, 3846)
    np.testing.assert_allclose(x_train[:, 0].std(), 1, rtol=1e-4)


def check_census(table):
    assert (len(table.y_train), len(table.y_test)) == (32_561, 16_281)
    assert 0.2 < table.y_train.mean() < 0.3 and set(table.y_test) == {0, 1}
    for columns, labels in ((table.train, table.y_train), (table.test, table.y_test)):
        assert {len(values) for values in columns.values()} == {len(labels)}
        assert [name for name, values in columns.items() if values.dtype != np.float32] == [*datasets.CENSUS_VALUES]
        for name, known in datasets.CENSUS_VALUES.items():
            assert set(columns[name]) <= set(known)


def test_a_generated_census_stands_in_where_no_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    table, again = datasets.load_census(), datasets.load_census()
    check_census(table)
    np.testing.assert_array_equal(table.train["age"], again.train["age"])
    with pytest.raises(FileNotFoundError, match=r"adult\.data is neither in"):
        datasets.load_census(tmp_path)


@needs_data
@pytest.mark.one_stack
@pytest.mark.slow
def test_the_census_of_the_files_has_the_same_form():
    table = datasets.load_census(DATA_DIR)
    check_census(table)
    assert table.name == "UCI Adult" and (table.y_train.sum(), table.y_test.sum()) == (7841, 3846)


@needs_data
def test_every_speaker_of_shakespeare_says_something():
    speakers = datasets.load_shakespeare(DATA_DIR)
    assert len(speakers) > 250 and all(speakers.values())
    assert speakers["First Citizen"].startswith("Before we proceed any further, hear me speak.")
