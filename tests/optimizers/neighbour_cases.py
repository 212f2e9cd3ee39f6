"""What tests of neighbouring data share: models, and the sum that a step of one releases."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.data import batches as batches_module
from tfdpfl.data import poisson_batches

K = tf.keras


L = K.layers


KERAS_3 = not hasattr(K, "__internal__")


WIDTH, CLASSES, CLIP = 4, 3, 1.0


REL = 1.000001


RNG = np.random.default_rng(0)


X = RNG.normal(size=(12, WIDTH)).astype("float32")


Y = RNG.integers(0, CLASSES, 12)


@pytest.fixture(autouse=True)
def truncation_has_a_price(monkeypatch):
    """With an older dp-accounting, too: here nothing is priced."""
    monkeypatch.setattr(batches_module, "truncated_event_type", lambda size: None)


class Pull(L.Layer):
    """A loss of its own, as a variational autoencoder's."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.reduce_sum(tf.square(x - 3.0), -1)))
        return x


class Unweighted(K.Model):
    """Its train_step ignores the sample weights."""

    def train_step(self, data):
        x, y = data[0], tf.one_hot(data[1] if data[1].shape.rank == 1 else data[1][:, 0], CLASSES)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True) - 5.0))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def layers(*middle, activity=None):
    dense = L.Dense(5, activation="tanh", bias_initializer="ones", activity_regularizer=activity)
    return [K.Input((WIDTH,)), dense, *middle, L.Dense(CLASSES)]


def unweighted():
    x = K.Input((WIDTH,))
    return Unweighted(x, L.Dense(CLASSES)(x))


MODELS = {
    "plain": lambda: K.Sequential(layers()),
    "activity regularizer": lambda: K.Sequential(layers(activity=K.regularizers.L2(10.0))),
    "add_loss": lambda: K.Sequential(layers(Pull())),
    "own train_step": unweighted,
}


class Sums:
    """The sum that one step of a model releases: the rate is 1, there is no noise, and no batch size."""

    def __init__(self, model, clip=CLIP, **settings):
        jit, loss = settings.pop("jit_compile", False), settings.pop("loss", None)
        self.model, self.optimizer = model, tfdpfl.DPSGD(
            clip, 0.0, expected_batch_size=1.0, learning_rate=1.0, **settings)  # fmt: skip
        loss = loss or K.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(self.optimizer, loss, jit_compile=jit)
        self.start, self.state = model.get_weights(), [np.array(v) for v in model.non_trainable_variables]

    def __call__(self, batches):
        """Of one logical batch, in as many as there are."""
        return self.each([batches])[0]

    def each(self, steps, feed=None):
        """Of each of several logical batches, all taken from the same weights and seeds."""
        batches = [batch for parts in steps for batch in parts]
        ends = set(np.cumsum([len(parts) for parts in steps]).tolist())
        found, now = [], iter(range(1, len(batches) + 1))

        def begin():
            self.model.set_weights(self.start)
            for v, value in zip(self.model.non_trainable_variables, self.state, strict=True):
                v.assign(value)
            if not KERAS_3 and self.optimizer._dp.seed is not None:  # where a layer's state is TensorFlow's own
                tf.random.set_seed(0)

        def end(batch, logs=None):
            if next(now) in ends:
                moved = zip(self.start, self.model.get_weights(), strict=True)
                found.append(np.concatenate([(a - b).ravel() for a, b in moved]))
                begin()

        tf.random.set_seed(0)
        begin()
        data = (feed or of_any_size)(batches)
        data = data if isinstance(data, dict) else {"x": data}
        self.model.fit(**data, verbose=0, callbacks=[K.callbacks.LambdaCallback(on_train_batch_end=end)])
        assert len(found) == len(steps)
        return found


def of_any_size(batches):
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), batches[0])
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def sample_of_all(x, y, *weights, **how):
    """A sample that holds every example; no example, where there are none."""
    like_y = Y.reshape(-1, *y.shape[1:])  # Keras 3 forgets the rank where one fit has labels of another
    none = (X, like_y, *(np.ones(len(X), "float32") for _ in weights))
    data, rate = ((x, y, *weights), 1.0) if len(x) else (none, 1e-12)
    return poisson_batches(data, rate, 1, **how)


def whole(x, y, *weights, **how):
    return [tf.nest.map_structure(np.array, b) for b in sample_of_all(x, y, *weights, **how).as_numpy_iterator()]


class FromTensorFlow(L.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))
