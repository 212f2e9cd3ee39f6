"""The sentences that refuse a loss: which op mixes examples, and what a user can do about it."""

from __future__ import annotations

from tfdpfl.clipping.states import BY_POSITION, TAINTED, Mixed

ALONE = (
    " The batch is known to be one example, whose axis cannot always be told from others of length 1: if the model "
    "trains on larger batches, leave the size free, as tf.data.Dataset's batch(1) without drop_remainder does."
)
_NORMALISED = (
    "Replace BatchNormalization by GroupNormalization or LayerNormalization (tfdpfl.clipping.fix(model).model does), "
    "or freeze it: layer.trainable = False makes it use the statistics that it has."
)
_REDUCED = (
    "Reduce over the other axes only (axis=1 and up), so that each example has values, and a loss, of its own; the "
    "mean of the losses is taken afterwards."
)
_PLACED = (
    "Give every example the same values; to pick from each example's own rows, use tf.gather(x, indices, batch_dims=1)."
)
_APART = (
    "Let every example keep its place, and compute on the whole batch at once: tf.map_fn, tf.vectorized_map and "
    "tf.unstack hand the examples out one by one."
)
_CONTRASTED = (
    "Compare each example with what is public, or with its own other parts: what compares the examples of a batch has "
    "no gradient of one example alone."
)
_SIZED = "Leave out what the batch size goes into; the loss's mean over the batch is taken for you."
_MENDS = {
    "normalises over the batch": _NORMALISED,
    "normalises examples together": _NORMALISED,
    "reduces over the batch": _REDUCED,
    "sums over the batch": _REDUCED,
    BY_POSITION: _PLACED,
    "numbers the examples by their position in the batch": _PLACED,
    "slices by the batch size": _PLACED,
    "takes the batch apart": _APART,
    "makes a list whose length depends on examples or on how many there are": _APART,
    "picks examples of the batch": _APART,
    "takes some examples of the batch, not all": _APART,
    "combines the examples along one axis with the examples along another": _CONTRASTED,
    "multiplies the examples along one axis with the examples along another": _CONTRASTED,
    "lets examples pick from one another": _CONTRASTED,
    "works along the batch axis": "Work along another axis: the examples are along this one.",
    "makes an example's result depend on the batch size": _SIZED,
    "makes the result depend on the batch size": _SIZED,
    "scales weights by the batch size": _SIZED,
    "has a shape of unknown rank": "Say the shape before it: tf.ensure_shape(x, [None, ...]).",
    "does not have the batch as its first axis": "Transpose its input, so that the examples come first.",
    "runs Python code, which cannot be followed": "Write it with TensorFlow operations, or do it in the data set.",
}


def mixing(origin: Mixed, through: str | None = None) -> str:
    """The sentence for an op that mixes examples, with what a user can do about it."""
    reach = f", and its result reaches the loss through {through}" if through else ""
    return f"No gradient belongs to one example alone: {origin.describe()}{reach}. {_mend(origin)}"


def _mend(origin: Mixed) -> str:
    name = origin.name.lower()
    if "batch_norm" in name or "batchnorm" in name or "moments" in name:
        return _NORMALISED
    if origin.op.startswith(("String", "Unicode", "SparseCross")):
        return "Take the layer out of the model and map it over the data set: dataset.map(lambda x, y: (layer(x), y))."
    if "hinge" in name:
        return (
            "Keras looks at all of the batch's labels to tell 0 and 1 from -1 and 1. With labels of -1 and 1: "
            "loss=lambda t, p: tf.reduce_mean(tf.maximum(1 - t * p, 0), -1) (squared: tf.square of the maximum)."
        )
    if "pfor" in name:
        return _APART
    if origin.op == "Where" and "sparse_categorical" in name:
        return (
            "If this is ignore_class=c: loss='sparse_categorical_crossentropy' with sample_weight=(y != c), as floats, "
            "leaves the class out as well."
        )
    if origin.op.endswith("GatherNd"):
        return "Use tf.gather(table, ids), or tf.gather(x, indices, batch_dims=1) to pick from each example's own rows."
    if origin.why.startswith(TAINTED):
        return "Train weights by the private optimizer alone, and write to others what is public, or nothing."
    if origin.why in _MENDS:
        return _MENDS[origin.why]
    if "not known" in origin.why:
        return "Rewrite it with operations whose batch axis can be followed."
    return "Change the layer or the loss so that each example is treated by itself."
