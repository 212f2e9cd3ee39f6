"""The sentences that refuse a loss: which op mixes examples, and what a user can do about it."""

from __future__ import annotations

from collections.abc import Callable

from tfdpfl.clipping.states import BY_POSITION, TAINTED, Mixed

__all__ = ["EAGER", "NO_BATCH", "OVERLAP", "WEIGHTED", "mixing"]

EAGER = (
    "This training step runs eagerly, but per-example gradients are read from the graph of a step. Wrap the step in "
    "tf.function: write @tf.function above the function that computes the loss and applies the gradients. Compile a "
    "Keras model without run_eagerly=True, and do not call tf.config.run_functions_eagerly."
)
NO_BATCH = (
    "The loss does not depend on any batch of examples that is an input of the graph, so no gradient belongs to one "
    "example. Pass the batch as an argument of the tf.function (or through a tf.data iterator), not as a captured "
    "array. If the loss needs no example, for example that of a GAN's generator on random draws alone, train these "
    "weights by a plain optimizer (for example keras.optimizers.Adam), and draw a fixed number."
)
OVERLAP = "Give the loss the axes of one example: for images keras.losses.Dice(axis=(1, 2, 3)), and Tversky likewise."
WEIGHTED = (
    "Use a reduction that divides by the batch size ('sum_over_batch_size') or none ('sum') in place of "
    "'mean_with_sample_weight' or a weighted mean; in your own loss, divide the sum of each example by its own "
    "weights: tf.reduce_sum(loss * mask, 1) / tf.reduce_sum(mask, 1)."
)
_NORMALISED = (
    "Replace BatchNormalization by GroupNormalization or LayerNormalization (tfdpfl.clipping.fix(model).model does), "
    "or freeze it: with layer.trainable = False it uses the statistics that it has."
)
_REDUCED = (
    "Reduce over the other axes only (axis=1 and up), so each example has its own values and its own loss. The mean of "
    "the losses is computed for you afterwards."
)
_PLACED = (
    "Give every example the same values; to pick from each example's own rows, use tf.gather(x, indices, batch_dims=1)."
)
_APART = (
    "Let every example keep its place, and compute on the whole batch at once: tf.map_fn, tf.vectorized_map and "
    "tf.unstack hand the examples out one by one."
)
_JOINED = (
    "Call the model on each part, and add the losses: for example real and generated images, each with its own labels."
)
_CONTRASTED = (
    "Compare each example with public values, or with other parts of itself: a loss that compares the examples of a "
    "batch has no gradient of one example alone."
)
_RANKS = (
    "If the labels have another shape than the outputs, for example [batch] and [batch, 1], give them the same one: "
    "y.reshape(len(y), 1). "
)
_SIZED = "Leave out the use of the batch size: the mean of the loss over the batch is computed for you."
_REMEDIES = {
    "normalises over the batch": _NORMALISED,
    "normalises examples together": _NORMALISED,
    "reduces over the batch": _REDUCED,
    "sums over the batch": _REDUCED,
    BY_POSITION: _PLACED,
    "numbers the examples by their position in the batch": _PLACED,
    "slices by the batch size": _PLACED,
    "takes the batch apart": _APART,
    "makes a list whose length depends on examples or on how many there are": _APART,
    "joins along the batch axis": _JOINED,
    "picks examples of the batch": _APART,
    "takes some examples of the batch, not all": _APART,
    "combines the examples along one axis with the examples along another": _RANKS + _CONTRASTED,
    "multiplies the examples along one axis with the examples along another": _CONTRASTED,
    "lets examples pick from one another": _CONTRASTED,
    "works along the batch axis": "Work along another axis: the examples are along this one.",
    "makes an example's result depend on the batch size": _SIZED,
    "makes the result depend on the batch size": _SIZED,
    "scales weights by the batch size": _SIZED,
    "has a shape of unknown rank": "State the shape where it is lost: tf.ensure_shape(x, [None, ...]), for example "
    "after a lookup in a mutable table.",
    "does not have the batch as its first axis": "Transpose its input, so that the examples come first.",
    "takes a branch by data": "Choose for each example by itself: tf.where(condition, a, b).",
    "runs for as many turns as the data says": "Run the same number of iterations for all examples, with "
    "tf.where(done, y, next_y).",
    "runs its loop in a kernel of cuDNN": "Build the layer with use_cudnn=False, for example LSTM(64, use_cudnn=False):"
    " TensorFlow's own loop, which runs on a GPU too, has the gradient of each example.",
    "moves examples across axes": "Keep the batch axis: tf.reshape(x, [-1, ...]), with all other lengths stated.",
    "runs Python code, which cannot be followed": "Write it with TensorFlow operations, or do it in the data set.",
}


def mixing(origin: Mixed, through: str | None = None) -> str:
    """The sentence for an op that mixes examples, with what a user can do about it."""
    reach = f", and its result reaches the loss through {through}" if through else ""
    return f"No gradient belongs to one example alone: {origin.describe()}{reach}. {_remedy(origin, through or '')}"


def _remedy(origin: Mixed, through: str) -> str:
    name = origin.name.lower()
    for holds, remedy in _SPECIAL:
        if holds(origin, name, through):
            return remedy
    if "gradient_tape" in name and _REMEDIES.get(origin.why) is _SIZED:
        return (
            "If this is the gradient of a mean over the batch with respect to inputs, use the gradient of the sum of "
            "losses instead: tape.gradient(tf.reduce_sum(losses), x), with a loss of reduction='none'. Its sign is the "
            "same."
        )
    if origin.why in _REMEDIES:
        return _REMEDIES[origin.why]
    if "not known" in origin.why:
        return "Rewrite it with operations whose batch axis can be followed."
    return "Change the layer or the loss so that it treats each example by itself."


# By the op where examples meet, its name in small letters, and what it reaches the loss through: the first that holds.
_SPECIAL: tuple[tuple[Callable[[Mixed, str, str], bool], str], ...] = (
    (lambda op, name, through: any(word in name for word in ("batch_norm", "batchnorm", "moments")), _NORMALISED),
    (
        lambda op, name, through: op.op.startswith(("String", "Unicode", "SparseCross")),
        "Take the layer out of the model and map it over the data set: dataset.map(lambda x, y: (layer(x), y)).",
    ),
    (
        lambda op, name, through: "sampled_softmax_loss" in name or "nce_loss" in name,
        "TensorFlow looks up the classes of the examples and the sampled classes together. Use two lookups: true = "
        "tf.reduce_sum(x * tf.gather(w, y), 1) and sampled = tf.matmul(x, tf.gather(w, ids), transpose_b=True); the "
        "logits are tf.concat([true[:, None], sampled], 1), and the first one is right.",
    ),
    (
        lambda op, name, through: through.startswith("CTCLoss") or "dense_to_sparse" in name,
        "If this is a CTC loss: sparse labels can be followed if tf.sparse.from_dense(labels) makes them of dense "
        "ones [batch, length]. Or give tf.nn.ctc_loss dense labels with label_length, logit_length and "
        "blank_index; in Keras 3, keras.losses.CTC does.",
    ),
    (
        lambda op, name, through: op.op.endswith("Case"),
        "Choose the branch in Python, where the index is known beforehand; or use tf.cond.",
    ),
    (
        lambda op, name, through: "hinge" in name,
        "Keras looks at all of the batch's labels to tell 0 and 1 from -1 and 1. With labels of -1 and 1: "
        "loss=lambda t, p: tf.reduce_mean(tf.maximum(1 - t * p, 0), -1) (squared: tf.square of the maximum).",
    ),
    (
        lambda op, name, through: "pfor" in name and "gradient_tape" in name,
        "If this is tape.batch_jacobian(y, x): take the derivatives one output at a time, with "
        "GradientTape(persistent=True): y, parts = ..., [y[:, i] for i in range(n)] under the tape, and "
        "tf.stack([tape.gradient(part, x) for part in parts], 1).",
    ),
    (lambda op, name, through: "pfor" in name, _APART),
    (
        lambda op, name, through: op.op == "Where" and "sparse_categorical" in name,
        "If this is ignore_class=c: loss='sparse_categorical_crossentropy' with sample_weight=(y != c), as floats, "
        "leaves the class out as well.",
    ),
    (
        lambda op, name, through: op.op.endswith("GatherNd"),
        "Use tf.gather(table, ids), or tf.gather(x, indices, batch_dims=1) to pick from each example's own rows.",
    ),
    (
        lambda op, name, through: "tf.recompute_grad" in op.why,
        "Give tf.recompute_grad's function all that depends on weights as an argument.",
    ),
    (
        lambda op, name, through: "tf.custom_gradient" in op.why,
        "Let its function for the gradient treat each example by itself and give weights none: apply "
        "tf.custom_gradient to the examples' values, or to weights alone, directly in the step.",
    ),
    (
        lambda op, name, through: op.why.startswith(TAINTED),
        "Train weights by the private optimizer alone, and write to others what is public, or nothing. A GAN's "
        "generator is public if it learns from a fixed number of draws: tf.random.normal([64, ...]).",
    ),
)
