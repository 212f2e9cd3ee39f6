"""Label privacy where the data are read: a Keras layer for tf.data maps."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import tensorflow as tf

from tfdpfl._frames import callers
from tfdpfl._types import Arrays, Dataset, DpEvent, Json
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.events import composed
from tfdpfl.accounting.promises import Promise
from tfdpfl.data.functions import changes_each_pass, have_same_values, number_apart, numbering
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp._datasets import with_labels
from tfdpfl.label_dp._events import check_epsilon, label_promise, pure_event
from tfdpfl.label_dp._top_k import RARE, lie_probability, response_matrix

__all__ = ["LabelPrivacy"]

# 2^53 steps fill the mantissa of a float64; a power of two takes a hash's bits evenly.
_STEPS = 1 << 53

# By layer and graph: the labels that were released, and by what ids.
_RELEASED: weakref.WeakKeyDictionary[
    LabelPrivacy, weakref.WeakKeyDictionary[tf.Graph, list[tuple[tf.Tensor, tf.Tensor]]]
] = weakref.WeakKeyDictionary()
# By layer: what was numbered by the ids that it was given, as `numbering` states it.
_NUMBERED: weakref.WeakKeyDictionary[LabelPrivacy, list[tuple[int, Dataset]]] = weakref.WeakKeyDictionary()


_IDS = (
    "Labels keep their noise by ids, and ε counts one release of each id. It holds if each example has one id in all "
    "files and programs, and no two examples share one. Only numbers that enumerate() gives in one program are "
    "compared."
)


@tf.keras.utils.register_keras_serializable(package="tfdpfl")
class LabelPrivacy(tf.keras.layers.Layer):
    """Randomized response inside a tf.data map, where every label keeps its noise however often it is read.

        private = LabelPrivacy(epsilon=1.0, num_classes=10)
        dataset = dataset.map(lambda id, x, y: (x, private(y, ids=id)))      # ids are unique and stable
        dataset = private.cached(dataset)                                    # no ids: elements are labels or (x, y)

    Noise that is drawn anew in every epoch is a release in every epoch, and ε grows with them. So there are two ways.
    With `ids` the noise is a keyed hash (SipHash-2-4) of the example's id and label, the same in every pass, every
    shuffle and every worker that holds this layer. Without, `cached` reads the dataset once and keeps it in memory.

    Promise: what is released for one id is ε-DP when its label is replaced, provided no two examples share an id. An id
    whose label changes is a new release, and so is an example with a second id: give it the same one in all files. The
    key is the operating system's and is not saved. A layer loaded from a config has another one. Labels that go through
    both have been released twice.

    Args:
        epsilon: ε > 0.
        num_classes: K; labels are integers 0..K-1.
        seed: None takes the operating system's entropy for the key; a seed is for tests.

    Call arguments:
        labels: Integers of any shape.
        ids: Integers or strings of the same shape, one for each label.

    Raises:
        ValueError: for arguments out of range, or a call without ids.
        PrivacyError: ids that number the examples after a shuffle, or those of two data sets so that an example has two
            numbers, or a number two examples; or two columns of labels with the same ids.
        tf.errors.InvalidArgumentError: when run, a label outside 0..K-1, or two labels with one id in one call.
    """

    def __init__(self, epsilon: float, num_classes: int, seed: int | None = None, **kwargs: object):
        super().__init__(**kwargs)
        self.epsilon = check_epsilon(epsilon, "give the ε of one release")
        self.num_classes = _checks.whole("num_classes", num_classes, 2, "count the classes")
        self.seed = seed
        self._cached, self._by_id = 0, False
        self._key = [int(word) for word in np.random.SeedSequence(seed).generate_state(2, np.uint64) >> np.uint64(1)]

    def call(self, labels: Arrays, ids: Arrays = None) -> tf.Tensor:
        """The released labels, in the shape and dtype of `labels`."""
        if ids is None:
            raise ValueError(
                "ids=None: without an id, each pass would draw new noise and cost ε again. Give every example's stable "
                "id (a key column, or enumerate() before any shuffle), or use LabelPrivacy.cached(dataset)"
            )
        labels, ids = tf.convert_to_tensor(labels), tf.convert_to_tensor(ids)
        if labels.dtype.is_integer and labels.dtype.max < self.num_classes - 1:
            raise ValueError(f"labels of {labels.dtype.name} cannot hold {self.num_classes} classes: cast to int32")
        if labels.dtype.is_floating or labels.dtype == tf.string:
            raise ValueError(f"labels must be integers 0..{self.num_classes - 1}, got {labels.dtype.name}: cast them")
        if not (ids.dtype.is_integer or ids.dtype == tf.string):
            raise ValueError(f"ids must be integers or strings, got {ids.dtype.name}: rounded numbers are not unique")
        if not ids.shape.is_compatible_with(labels.shape):
            raise ValueError(
                f"ids must have the shape of labels, {labels.shape}, got {ids.shape}: give each label its own id "
                "(enumerate() before batch(), not after it), because labels with one id share their noise"
            )
        _check_columns(self, labels, ids)
        _check_numbers(self, ids)
        self._by_id = True
        alike = tf.debugging.assert_equal(tf.shape(ids), tf.shape(labels), "ids must have the shape of labels")
        with tf.control_dependencies([] if alike is None else [alike]):
            ids = _with_one_label_each(ids, labels)
        code = tf.cast(labels, tf.int64)
        inside = tf.reduce_all((code >= 0) & (code < self.num_classes))
        with tf.control_dependencies(
            [tf.debugging.Assert(inside, [f"labels must be in 0..{self.num_classes - 1}, got", labels])]
        ):
            code = tf.identity(code)
        name = ids if ids.dtype == tf.string else tf.strings.as_string(ids)
        name = tf.strings.join([tf.strings.as_string(code), name], ":")
        uniform = self._uniform(name)
        liar, lies = float(lie_probability(self.epsilon, self.num_classes)), self.num_classes - 1
        share = uniform / liar if liar >= RARE else self._uniform(tf.strings.join([name, "which"], ":"))
        turn = 1 + tf.clip_by_value(tf.cast(tf.floor(share * lies), tf.int64), 0, lies - 1)
        said = tf.where(uniform < liar, (code + turn) % self.num_classes, code)
        return tf.cast(said, labels.dtype)

    def _uniform(self, name: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.strings.to_hash_bucket_strong(name, _STEPS, self._key), tf.float64) / _STEPS

    def cached(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Reads the dataset once and returns it with its labels replaced, the same in every epoch.

        Args:
            dataset: Finite; elements are labels, (x, y) or (x, y, sample_weight), batched or not. It and its order are
                kept in memory: shuffle what comes out.
        """
        from tfdpfl.label_dp.classification import RandomizedResponse  # it loads scikit-learn, 60 MB, and most need not

        # One release by the transformer: no ids, so no hash is needed. A second one is another release.
        self._cached += 1
        mechanism = RandomizedResponse(self.epsilon, self.num_classes, self.seed)
        return with_labels(dataset, lambda x, labels: mechanism.fit_transform(labels))

    @property
    def transition_matrix_(self) -> np.ndarray:
        """[K, K], P(released = j | label = i)."""
        return response_matrix(self.epsilon, self.num_classes)

    @property
    def dp_event(self) -> DpEvent:
        """All releases as a dp-accounting event under "replace_one". There is one of every id, however many epochs, and
        one for each call of `cached`; before the first, that one."""
        releases = max(1, self._cached + self._by_id)
        return composed([pure_event(self.epsilon, self.num_classes)] * releases)

    @property
    def ledger(self) -> PrivacyLedger:
        """The same in tfdpfl's accounting."""
        return PrivacyLedger().add(self.dp_event, adjacency="replace_one")

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        promise = label_promise(self, self.ledger)
        return [dataclasses.replace(promise, notes=(*promise.notes, _IDS)) if self._by_id else promise]

    def get_config(self) -> Json:
        return {**super().get_config(), "epsilon": self.epsilon, "num_classes": self.num_classes, "seed": self.seed}

    def compute_output_shape(self, input_shape: Arrays) -> Arrays:
        return input_shape


def _with_one_label_each(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The ids, if no two different labels of a call have one id: they would share their noise."""
    if ids.shape.rank == 0:
        return tf.identity(ids)
    names, code = tf.reshape(ids, [-1]), tf.reshape(labels, [-1])
    distinct, which = tf.unique(names)
    first = tf.math.unsorted_segment_min(tf.range(tf.size(names)), which, tf.size(distinct))
    alike = tf.reduce_all(code == tf.gather(code, tf.gather(first, which)))
    told = (
        "ids must be of one example each, but two labels have one id. Give each column a LabelPrivacy of its own. Got"
    )
    with tf.control_dependencies([tf.debugging.Assert(alike, [told, ids])]):
        return tf.identity(ids)


@tf.autograph.experimental.do_not_convert
def _check_columns(layer: LabelPrivacy, labels: tf.Tensor, ids: tf.Tensor) -> None:
    """Raises if a function releases two columns of labels by the same ids: equal labels of an example would have the
    same noise, so that what is released tells whether they are equal."""
    if not isinstance(getattr(ids, "graph", None), tf.__internal__.FuncGraph) or tf.executing_eagerly():
        return
    released = _RELEASED.setdefault(layer, weakref.WeakKeyDictionary()).setdefault(ids.graph, [])
    if any(have_same_values(ids, by) and not have_same_values(labels, these) for these, by in released):
        raise PrivacyError(
            f"Two columns of labels have the same ids ({ids.name!r}) in one LabelPrivacy. Labels of one id share their "
            "noise, so what is released tells whether they are equal, and ε counts one release. Give each column a "
            "LabelPrivacy of its own: a report adds them up."
        )
    released.append((labels, ids))


@tf.autograph.experimental.do_not_convert
def _check_numbers(layer: LabelPrivacy, ids: tf.Tensor) -> None:
    """Raises if the map that runs gives examples other ids in each pass, or other ones than an earlier map gave."""
    if not isinstance(getattr(ids, "graph", None), tf.__internal__.FuncGraph) or tf.executing_eagerly():
        return
    dataset = next((frame.f_locals["input_dataset"] for frame in callers() if "input_dataset" in frame.f_locals), None)
    if dataset is not None and changes_each_pass(dataset, ids):
        raise PrivacyError(
            "ids are numbers of examples (enumerate) in a data set that is shuffled anew in each pass, or they are "
            "drawn or counted, so each pass would draw new noise for a label, and ε counts one release. Call "
            "enumerate() before shuffle() and batch(), or give ids that belong to the examples."
        )
    numbers = None if dataset is None else numbering(dataset, ids)
    if numbers is None:
        return
    earlier = _NUMBERED.setdefault(layer, [])
    if not all(number_apart(numbers, each) for each in earlier):
        raise PrivacyError(
            "ids are numbers (enumerate) of two data sets that this LabelPrivacy was given, and they do not agree. An "
            "example with two numbers is released twice, but counted once. Two examples with one number share their "
            "noise, so one label reveals the other. Call enumerate() before you split the data, or number further data "
            "from where the first end: enumerate(start=...)."
        )
    earlier.append(numbers)
