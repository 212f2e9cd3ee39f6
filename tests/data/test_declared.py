"""By which words a data set's transformation is known."""

import pytest
import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryDataset

from tfdpfl.data import declared
from tfdpfl.data.declared import made_by, passed_through

NUMBERS = tf.data.Dataset.range(8)
# What changes neither the elements nor their order, or each element by itself.
HARMLESS = {"AssertNext", "AssertPrev", "CopyToDevice", "DenseToRagged", "NonSerializable", "ParseExample",
            "Restructured", "Sleep", "Unary", "UnaryUnchangedStructure"}  # fmt: skip


@pytest.mark.parametrize("dataset, is_, is_not", [
    (NUMBERS.take(2), "take", "takewhile"),
    (NUMBERS.take_while(lambda i: i < 2), "takewhile", "take"),
    (NUMBERS.batch(2), "batch", "unbatch"),
    (NUMBERS.batch(2).unbatch(), "unbatch", "batch"),
    (NUMBERS.batch(2, num_parallel_calls=2), "batch", "padded"),
    (NUMBERS.padded_batch(2), "padded", "unbatch"),
    (NUMBERS.padded_batch(2), "batch", "unbatch"),
    (NUMBERS.map(lambda i: i, num_parallel_calls=2), "map", "flatmap"),
    (NUMBERS.flat_map(tf.data.Dataset.range), "flatmap", "map"),
    (NUMBERS.group_by_window(lambda i: i % 2, lambda _, d: d.batch(2), 2), "groupby", "batch"),
    (tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS]), "directed", "map"),
    (tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS]), "interleave", "map"),
    (tf.data.Dataset.from_tensors(0), "tensor", "tensorslice"),
])  # fmt: skip
def test_a_transformation_is_not_taken_for_one_whose_name_is_a_part_of_its_own(dataset, is_, is_not):
    assert made_by(dataset, (is_not, is_)) == is_
    assert made_by(dataset, (is_not,)) is None


def test_a_word_that_no_transformation_has_is_an_error():
    with pytest.raises(AssertionError, match="shufle"):
        made_by(NUMBERS, ("shufle",))


def test_every_transformation_of_tensorflow_has_a_word_or_is_harmless():
    kinds = [UnaryDataset]
    for kind in kinds:
        kinds += kind.__subclasses__()
    names = {kind.__name__.strip("_").removesuffix("Dataset") for kind in kinds}
    assert len(names) >= 25
    assert {name for name in names if not declared._TRANSFORMATION.search(name.lower())} <= HARMLESS


ONE, ZIP = tf.data.Dataset.from_tensors([1, 2]).repeat(), tf.data.Dataset.zip


@pytest.mark.parametrize("dataset, again", [
    (ZIP((ONE, NUMBERS)), False), (ZIP((ONE, NUMBERS)).map(lambda one, i: i).batch(4), False),
    (tf.keras.utils.timeseries_dataset_from_array(range(9), range(9), 3, batch_size=2, shuffle=True), False),
    (ONE, True), (ZIP((ONE, ONE)), True), (ZIP((ONE, NUMBERS.repeat(2))), True), (ZIP((ONE, NUMBERS)).repeat(), True),
    (ZIP((NUMBERS.repeat(), NUMBERS)), True),
    (ZIP((tf.data.Dataset.from_tensors(0).repeat(8), NUMBERS)), True),
])  # fmt: skip
def test_one_element_that_goes_with_each_of_others_repeats_none_of_them(dataset, again):
    assert (passed_through(dataset, ("repeat",)) is not None) is again
