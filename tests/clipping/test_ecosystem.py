"""What people build with Keras, small, and trained with only the optimizer changed: the tasks of Keras's examples and
the backbones of its libraries, written anew. Each trains as it is, or after one mend that its refusal names, or is
refused. Where it trains, the step is that of the examples' gradients one by one."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import keras3
from helpers import K, L, raw

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import fix

pytestmark = pytest.mark.slow
N, CLIP, RATE = 2, 0.5, 0.25
TINY = 1e-7  # dropout, noise and times are drawn, and change nothing that float32 sees
MSE, TOKENS = "mse", K.losses.SparseCategoricalCrossentropy(from_logits=True)
tanh = {"activation": "tanh"}


def rng(seed=0):
    return np.random.default_rng(seed)


def images(*shape, seed=0):
    return rng(seed).random((N, *shape)).astype("float32")


def ids(*shape, high=7, low=0, seed=0):
    return rng(seed).integers(low, high, (N, *shape)).astype("int32")


def labels(high=3, seed=5):
    return ids(high=high, seed=seed)


def drop():
    return L.Dropout(TINY)


class Of(L.Layer):
    """A function of tensors as a layer; with ``shapes`` it takes weights of these as its last arguments."""

    def __init__(self, function, shapes=(), start="glorot_normal", **kwargs):
        super().__init__(**kwargs)
        self.function, self.shapes, self.start = function, shapes, start

    def build(self, _):
        self.ws = [self.add_weight(name=f"w{i}", shape=s, initializer=self.start) for i, s in enumerate(self.shapes)]
        self.built = True

    def call(self, *inputs):
        return self.function(*inputs, *[tf.convert_to_tensor(w) for w in self.ws])


def of(function, *shapes, **kwargs):
    return Of(function, shapes, **kwargs)


def fixed(model, mended):
    """The mend of batch normalisation."""
    return fix(model).model if mended else model


# -- images --------------------------------------------------------------------------------------------------------


def digits_by_convolutions():
    layers = [L.Conv2D(3, 3, **tanh), L.MaxPooling2D(), L.Conv2D(4, 2, **tanh), L.Flatten(), drop(), L.Dense(3)]
    return K.Sequential([K.Input((8, 8, 1)), *layers]), TOKENS, images(8, 8, 1), labels()


def cats_and_dogs_from_scratch(mended=False):
    x = K.Input((12, 12, 3))
    y = L.Rescaling(1 / 255)(L.RandomRotation(TINY)(L.RandomFlip(seed=1)(x)))
    before = y = L.Activation("relu")(L.BatchNormalization()(L.Conv2D(4, 3, 2, padding="same")(y)))
    y = L.BatchNormalization()(L.SeparableConv2D(6, 3, padding="same")(L.Activation("relu")(y)))
    y = L.Add()([L.MaxPooling2D(3, 2, padding="same")(y), L.Conv2D(6, 1, 2, padding="same")(before)])
    y = L.Dense(1)(drop()(L.GlobalAveragePooling2D()(y)))
    # One flip is drawn by each; its draws do not repeat, so the images are symmetric.
    half = images(6, 6, 3)
    half = np.concatenate([half, half[:, ::-1]], 1)
    data = 255 * np.concatenate([half, half[:, :, ::-1]], 2)
    return fixed(K.Model(x, y), mended), K.losses.BinaryCrossentropy(True), data, labels(2)


def head_on_a_frozen_application():
    base = K.applications.MobileNet((32, 32, 3), alpha=0.25, include_top=False, weights=None, pooling="avg")
    base.trainable = False
    x = K.Input((32, 32, 3))
    y = base(L.Rescaling(2.0, -1.0)(x), training=False)
    return K.Model(x, L.Dense(3)(drop()(y))), TOKENS, images(32, 32, 3), labels()


def application_fine_tuned(mended=False):
    model = K.applications.MobileNet((32, 32, 3), alpha=0.25, include_top=False, weights=None, pooling="avg")
    model = K.Model(model.input, L.Dense(2)(L.Flatten()(model.layers[12].output)))
    return fixed(model, mended), TOKENS, images(32, 32, 3), labels(2)


def residual_network_of_second_version(mended=False):
    x = K.Input((8, 8, 2))
    y = L.Conv2D(4, 3, padding="same")(x)
    for _ in range(2):
        z = L.Activation("relu")(L.BatchNormalization()(y))
        y = L.Add()([y, L.Conv2D(4, 3, padding="same")(L.ZeroPadding2D(0)(z))])
    return fixed(K.Model(x, L.Dense(2)(L.GlobalMaxPooling2D()(y))), mended), TOKENS, images(8, 8, 2), labels(2)


def feed_forward(y, width, hidden):
    return L.Dense(width)(drop()(L.Dense(hidden, activation="gelu")(y)))


def attended(x, causal=False, mask=None):
    """The first half of a transformer's block, for models whose point is elsewhere."""
    y = L.LayerNormalization(epsilon=1e-6)(x)
    y = L.MultiHeadAttention(2, 2, dropout=TINY)(y, y, use_causal_mask=causal, attention_mask=mask)
    return L.Add()([x, y])


def block(x, width=4, **how):
    x = attended(x, **how)
    return L.Add()([x, feed_forward(L.LayerNormalization(epsilon=1e-6)(x), width, 6)])


def cut(x, size):
    x = tf.image.extract_patches(x, [1, size, size, 1], [1, size, size, 1], [1] * 4, "VALID")
    return tf.reshape(x, [tf.shape(x)[0], x.shape[1] * x.shape[2], x.shape[3]])


class Placed(L.Layer):
    """Patches, projected, each with the embedding of its place."""

    def __init__(self, patches, width):
        super().__init__()
        self.patches, self.project, self.place = patches, L.Dense(width), L.Embedding(patches, width)

    def call(self, x):
        return self.project(x) + self.place(tf.range(0, self.patches))


def vision_transformer():
    x = K.Input((6, 6, 2))
    y = block(Placed(9, 4)(of(lambda x: cut(x, 2))(x)))
    return K.Model(x, L.Dense(3)(drop()(L.Flatten()(y)))), TOKENS, images(6, 6, 2), labels()


def compact_transformer_with_stochastic_depth():
    def deep(x):  # whole branches of an example are left out
        keep = tf.floor(1 - TINY + tf.random.uniform([tf.shape(x)[0], 1, 1], maxval=1 - TINY))
        return x / (1 - TINY) * (keep + 1) / (keep + 1)

    x = K.Input((8, 8, 2))
    y = L.Reshape((16, 4))(L.MaxPooling2D()(L.ZeroPadding2D(1)(L.Conv2D(4, 3, activation="relu")(x))))
    y = L.Add()([y, of(deep)(attended(y))])
    weights = L.Softmax(axis=1)(L.Dense(1)(y))
    pooled = of(lambda w, y: tf.squeeze(tf.matmul(w, y, transpose_a=True), -2))(weights, y)
    return K.Model(x, L.Dense(3)(pooled)), TOKENS, images(8, 8, 2), labels()


def windows_that_shift():
    """Attention within windows, which stand in the batch axis for a while, and a table of relative places."""
    size, at = 2, np.array([[3 * (a // 2 - b // 2 + 1) + (a % 2 - b % 2 + 1) for b in range(4)] for a in range(4)])

    def attend(x, w, table):
        n, shifted = tf.shape(x)[0], tf.roll(x, [-1, -1], [1, 2])
        parts = tf.transpose(tf.reshape(shifted, [n, 2, size, 2, size, 4]), [0, 1, 3, 2, 4, 5])
        q, k, v = tf.unstack(tf.reshape(tf.reshape(parts, [-1, 4, 4]) @ w, [-1, 4, 3, 4]), axis=2)
        scores = tf.matmul(q, k, transpose_b=True) + tf.reshape(tf.gather(table, at.ravel()), [4, 4])
        parts = tf.reshape(tf.nn.softmax(scores) @ v, [n, 2, 2, size, size, 4])
        return tf.roll(tf.reshape(tf.transpose(parts, [0, 1, 3, 2, 4, 5]), [n, 4, 4, 4]), [1, 1], [1, 2])

    x = K.Input((8, 8, 1))
    y = L.Conv2D(4, 2, 2)(x)
    y = L.Add()([y, Of(attend, [(4, 12), (9,)], "random_normal")(L.LayerNormalization()(y))])
    return K.Model(x, L.Dense(3)(L.GlobalAveragePooling2D()(y))), TOKENS, images(8, 8, 1), labels()


def mixers_without_attention():
    """Patches mixed by dense layers, by a Fourier transform, and by a gate."""
    x = K.Input((4, 4))
    turn = L.Permute((2, 1))
    y = L.Add()([x, turn(feed_forward(turn(L.LayerNormalization()(x)), 4, 3))])
    y = L.Add()([y, of(lambda y: tf.math.real(tf.signal.fft2d(tf.cast(y, tf.complex64))))(y)])
    y = L.LayerNormalization()(feed_forward(y, 8, 6))
    gate = of(lambda v, w: tf.einsum("bnd,nm->bmd", v, w) + 1, (4, 4))(of(lambda y: y[..., :4])(y))
    y = of(lambda y, gate: y[..., 4:] * gate)(y, gate)
    return K.Model(x, L.Dense(2)(L.GlobalAveragePooling1D()(y))), TOKENS, images(4, 4), labels(2)


def convolution_mixer(mended=False):
    x = K.Input((8, 8, 2))
    y = L.BatchNormalization()(L.Activation("gelu")(L.Conv2D(4, 2, 2)(x)))
    y = L.Add()([y, L.BatchNormalization()(L.Activation("gelu")(L.DepthwiseConv2D(3, padding="same")(y)))])
    return fixed(K.Model(x, L.Dense(2)(L.GlobalAveragePooling2D()(y))), mended), TOKENS, images(8, 8, 2), labels(2)


def involution():
    def convolve(x, kernel):
        patches = tf.image.extract_patches(x, [1, 3, 3, 1], [1] * 4, [1] * 4, "SAME")
        patches = tf.reshape(patches, [tf.shape(x)[0], 6, 6, 9, 4])
        return tf.reduce_sum(patches * kernel[..., None], 3)

    x = K.Input((6, 6, 4))
    kernel = L.Conv2D(9, 1)(L.Conv2D(2, 1, **tanh)(x))
    return K.Model(x, L.Dense(2)(L.Flatten()(of(convolve)(x, kernel)))), TOKENS, images(6, 6, 4), labels(2)


def segmentation_with_skips(mended=False):
    x = K.Input((8, 8, 3))
    down = y = L.BatchNormalization()(L.Conv2D(4, 3, 2, padding="same", **tanh)(x))
    y = L.BatchNormalization()(L.SeparableConv2D(4, 3, padding="same", **tanh)(y))
    y = L.UpSampling2D(2)(L.Add()([L.Conv2DTranspose(4, 3, padding="same")(y), down]))
    return fixed(K.Model(x, L.Conv2D(3, 3, padding="same")(y)), mended), TOKENS, images(8, 8, 3), ids(8, 8, high=3)


def atrous_pyramid():
    x = K.Input((8, 8, 3))
    y = L.Conv2D(4, 3, padding="same", activation="relu")(x)
    pool = L.UpSampling2D(8, interpolation="bilinear")(L.Conv2D(2, 1)(L.AveragePooling2D(8)(y)))
    y = L.Concatenate()([pool, *(L.Conv2D(2, 3, dilation_rate=r, padding="same")(y) for r in (1, 2, 3))])
    return K.Model(x, L.Conv2D(3, 1)(L.GroupNormalization(2)(y))), TOKENS, images(8, 8, 3), ids(8, 8, high=3)


def finer_images():
    x = K.Input((5, 5, 1))
    y = L.Conv2D(4, 3, padding="same", **tanh)(x)
    return K.Model(x, of(lambda y: tf.nn.depth_to_space(y, 2))(y)), MSE, images(5, 5, 1), images(10, 10, 1, seed=1)


class Brightened(K.Model):
    """Images made brighter by curves, without labels: losses of exposure, colour and smoothness."""

    def __init__(self):
        super().__init__()
        self.net = K.Sequential([K.Input((8, 8, 3)), L.Conv2D(3, 3, padding="same", **tanh)])

    def loss_of(self, x):
        curve = self.net(x)
        better = x + curve * (tf.square(x) - x)
        exposed = tf.reduce_mean((tf.nn.avg_pool2d(tf.reduce_mean(better, 3, keepdims=True), 4, 4, "VALID") - 0.6) ** 2)
        r, g, b = tf.split(tf.reduce_mean(better, (1, 2)), 3, axis=1)
        colour = tf.reduce_mean(tf.sqrt((r - g) ** 4 + (g - b) ** 4 + (b - r) ** 4 + 1e-8))
        smooth = tf.reduce_mean((curve[:, 1:] - curve[:, :-1]) ** 2) + tf.reduce_mean(
            (curve[:, :, 1:] - curve[:, :, :-1]) ** 2)  # fmt: skip
        return exposed + 5 * colour + 2 * smooth

    def train_step(self, data):
        return stepped(self, data)


def stepped(model, data):
    """The train step of Keras's guides."""
    with tf.GradientTape() as tape:
        loss = model.loss_of(data)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss}


def low_light():
    return Brightened(), None, images(8, 8, 3), None


class Detector(K.losses.Loss):
    """Focal and box losses of anchors, normalised by how many an image has."""

    def call(self, y, p):
        positive = tf.cast(y[..., 4] > 0, "float32")
        probability = tf.sigmoid(p[..., 4])
        likely = tf.where(positive > 0, probability, 1 - probability)
        focal = 0.25 * (1 - likely) ** 2 * tf.nn.sigmoid_cross_entropy_with_logits(positive, p[..., 4])
        far = tf.abs(y[..., :4] - p[..., :4])
        box = tf.reduce_sum(tf.where(far < 0.5, 0.5 * far**2, far - 0.25), -1) * positive
        count = tf.reduce_sum(positive, -1)
        return tf.math.divide_no_nan(tf.reduce_sum(focal, -1), count) + tf.math.divide_no_nan(
            tf.reduce_sum(box, -1), count)  # fmt: skip


def object_detection():
    x = K.Input((8, 8, 3))
    low = L.Conv2D(4, 3, 2, padding="same", activation="relu")(x)
    high = L.Conv2D(4, 3, 2, padding="same", activation="relu")(low)
    low = L.Add()([low, L.UpSampling2D(2)(high)])
    head = L.Conv2D(10, 3, padding="same")  # two anchors, shared by the levels
    y = L.Concatenate(axis=1)([L.Reshape((-1, 5))(head(level)) for level in (low, high)])
    boxes = images(40, 5) - np.array([0, 0, 0, 0, 0.5], "float32")
    return K.Model(x, y), Detector(), images(8, 8, 3), boxes


def crops_of_a_spatial_transformer(mended=False):
    def sample(x, shift):
        n, at = tf.shape(x)[0], tf.clip_by_value(tf.cast(4 + 3 * tf.tanh(shift), tf.int32), 0, 7)
        if mended:
            return tf.gather(tf.reshape(x, [n, 64, 2]), at[:, :1] * 8 + at[:, 1:], batch_dims=1)
        return tf.gather_nd(x, tf.stack([tf.range(n), at[:, 0], at[:, 1]], 1))

    x = K.Input((8, 8, 2))
    shift = L.Dense(2)(L.Flatten()(x))
    y = L.Dense(3)(L.Flatten()(of(sample)(L.Conv2D(2, 3, padding="same")(x), shift)))
    return K.Model(x, y), TOKENS, images(8, 8, 2), labels()


def video_frames_in_time():
    x = K.Input((3, 6, 6, 1))
    frames = L.TimeDistributed(K.Sequential([K.Input((6, 6, 1)), L.Conv2D(2, 3, **tanh), L.GlobalMaxPooling2D()]))(x)
    return K.Model(x, L.Dense(3)(L.GRU(3)(frames))), TOKENS, images(3, 6, 6, 1), labels()


def video_in_tubes():
    x = K.Input((4, 4, 4, 1))
    y = attended(Placed(8, 4)(L.Reshape((8, 4))(L.Conv3D(4, 2, 2)(x))))
    return K.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(y))), TOKENS, images(4, 4, 4, 1), labels()


def next_frames():
    x = K.Input((3, 5, 5, 1))
    y = L.ConvLSTM2D(2, 3, padding="same", return_sequences=True)(x)
    y = L.Conv3D(1, 3, padding="same", activation="sigmoid")(y)
    return K.Model(x, y), "binary_crossentropy", images(3, 5, 5, 1), images(3, 5, 5, 1, seed=1)


def point_clouds(mended=False):
    def net(x, width):
        return L.Activation("relu")(L.BatchNormalization()(L.Conv1D(width, 1)(x)))

    x = K.Input((6, 3))
    turn = L.Reshape((3, 3))(L.Dense(9)(L.GlobalMaxPooling1D()(net(x, 4))))
    y = net(L.Dot((2, 1))([x, turn]), 4)
    return fixed(K.Model(x, L.Dense(3)(drop()(L.GlobalMaxPooling1D()(y)))), mended), TOKENS, images(6, 3), labels()


class Triplets(K.Model):
    def __init__(self):
        super().__init__()
        self.embed = K.Sequential([K.Input((6,)), L.Dense(4, **tanh), L.Dense(3)])

    def loss_of(self, data):
        anchor, near, far = (tf.math.l2_normalize(self.embed(x), -1) for x in data)
        closer, apart = (tf.reduce_sum(tf.square(anchor - x), -1) for x in (near, far))
        return tf.maximum(closer - apart + 0.5, 0.0)

    def train_step(self, data):
        return stepped(self, data)


def siamese_triplets():
    return Triplets(), None, tuple(images(6, seed=i) for i in range(3)), None


class TwoViews(K.Model):
    """Without negatives: each view predicts the other, which gets no gradient."""

    def __init__(self):
        super().__init__()
        self.encode = K.Sequential([K.Input((6,)), L.Dense(4, **tanh), L.Dense(4)])
        self.predict_other = K.Sequential([K.Input((4,)), L.Dense(2, **tanh), L.Dense(4)])

    def loss_of(self, data):
        one, two = (self.encode(x) for x in data)
        far = lambda p, z: -tf.reduce_mean(tf.reduce_sum(
            tf.math.l2_normalize(p, 1) * tf.math.l2_normalize(tf.stop_gradient(z), 1), 1))  # fmt: skip
        return far(self.predict_other(one), two) / 2 + far(self.predict_other(two), one) / 2

    def train_step(self, data):
        return stepped(self, data)


def views_that_predict_each_other():
    return TwoViews(), None, (images(6), images(6, seed=1)), None


def contrast_with_the_rest_of_the_batch():
    class Contrast(TwoViews):
        def loss_of(self, data):
            one, two = (tf.math.l2_normalize(self.encode(x), 1) for x in data)
            scores = tf.matmul(one, two, transpose_b=True) / 0.1
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]), scores))

    return Contrast(), None, (images(6), images(6, seed=1)), None


class Masked(K.Model):
    """An autoencoder that sees a part of the patches, drawn for each image."""

    def __init__(self):
        super().__init__()
        self.encode = K.Sequential([K.Input((None, 5)), L.Dense(4, **tanh)])
        self.decode = K.Sequential([K.Input((6, 4)), L.Dense(5)])
        self.token = of(lambda x, w: tf.repeat(tf.repeat(w[None], 4, 1), tf.shape(x)[0], 0), (1, 4))

    def loss_of(self, x):
        n = tf.shape(x)[0]
        order = tf.argsort(tf.tile([[0.0, 3, 1, 2]], [n, 1]) + TINY * tf.random.uniform([n, 4]), axis=-1)
        seen = self.encode(tf.gather(x, order[:, :2], batch_dims=1))
        guess = self.decode(tf.concat([seen, self.token(x)], 1))[:, 2:]
        return tf.reduce_mean((tf.gather(x, order[:, 2:], batch_dims=1) - guess[:, :2]) ** 2)

    def train_step(self, data):
        return stepped(self, data)


def masked_patches():
    return Masked(), None, images(4, 5), None


class Distiller(K.Model):
    def __init__(self):
        super().__init__()
        self.student = K.Sequential([K.Input((6,)), L.Dense(4, **tanh), L.Dense(3)])
        self.teacher = K.Sequential([K.Input((6,)), L.Dense(8, **tanh), L.Dense(3)])
        self.teacher.trainable = False

    def loss_of(self, data):
        x, y = data
        soft, logits = tf.nn.softmax(self.teacher(x) / 3), self.student(x)
        taught = K.losses.KLDivergence()(soft, tf.nn.softmax(logits / 3)) * 9
        return 0.1 * TOKENS(y, logits) + 0.9 * taught

    def train_step(self, data):
        teacher = self.teacher(data[0], training=False)  # outside of the tape
        with tf.GradientTape() as tape:
            loss = self.loss_of(data) + 0.0 * tf.reduce_mean(teacher)
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables, strict=True))
        return {"loss": loss}


def knowledge_distillation():
    return Distiller(), None, (images(6), labels()), "pair"


def captcha():
    """Letters read by a recurrent network over columns; in Keras 2 the loss is that of its backend."""

    class Alignment(K.losses.Loss):
        def call(self, y, p):
            n, frames, length = tf.shape(y)[0], p.shape[1], y.shape[1]
            if keras3():
                return K.losses.CTC(reduction=None).call(y, p)
            return K.backend.ctc_batch_cost(y, tf.nn.softmax(p), tf.fill([n, 1], frames), tf.fill([n, 1], length))

    x = K.Input((8, 4, 1))
    y = L.Reshape((8, 8))(L.Conv2D(2, 3, padding="same", activation="relu")(x))
    y = L.Bidirectional(L.LSTM(3, return_sequences=True, dropout=TINY))(L.Dense(4, activation="relu")(y))
    return K.Model(x, L.Dense(6)(y)), Alignment(), images(8, 4, 1), ids(2, low=1, high=5)


def style_statistics():
    """A Gram matrix of each image's features, in a loss that the model adds itself."""

    class Gram(L.Layer):
        def call(self, x):
            flat = tf.reshape(x, [-1, 36, 3])
            self.add_loss(tf.reduce_mean(tf.square(tf.matmul(flat, flat, transpose_a=True) / 36 - 0.1)))
            return x

    x = K.Input((6, 6, 1))
    y = L.Conv2D(1, 3, padding="same")(Gram()(L.Conv2D(3, 3, padding="same", **tanh)(x)))
    return K.Model(x, y), MSE, images(6, 6, 1), images(6, 6, 1, seed=1)


def latent_array_that_looks():
    x = K.Input((5, 4))
    latent = of(lambda x, w: tf.repeat(w[None], tf.shape(x)[0], 0), (2, 4))(x)
    y = L.Add()([latent, L.MultiHeadAttention(1, 4)(L.LayerNormalization()(latent), L.LayerNormalization()(x))])
    return K.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(attended(y)))), TOKENS, images(5, 4), labels()


# -- generative ----------------------------------------------------------------------------------------------------


class Variational(K.Model):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = L.Dense(4), K.Sequential([K.Input((2,)), L.Dense(5, **tanh), L.Dense(6)])
        self.seen = K.metrics.Mean(name="reconstruction")

    @property
    def metrics(self):
        return [self.seen]

    def loss_of(self, x):
        mean, spread = tf.split(self.encode(x), 2, axis=1)
        z = mean + TINY * tf.exp(0.5 * spread) * tf.random.normal(tf.shape(mean))
        cross = K.losses.binary_crossentropy(x[..., None], tf.sigmoid(self.decode(z))[..., None])
        apart = -0.5 * (1 + spread - tf.square(mean) - tf.exp(spread))
        return tf.reduce_mean(tf.reduce_sum(cross, 1)) + tf.reduce_mean(tf.reduce_sum(apart, 1))

    def train_step(self, data):
        found = stepped(self, data)
        self.seen.update_state(found["loss"])
        return {"reconstruction": self.seen.result()}


def variational_autoencoder():
    return Variational(), None, images(6), None


def vectors_from_a_codebook():
    class Quantizer(L.Layer):
        def build(self, _):
            self.book = self.add_weight(name="book", shape=(3, 5), initializer="random_uniform")
            self.built = True

        def call(self, x):
            book, flat = tf.convert_to_tensor(self.book), tf.reshape(x, [-1, 3])
            far = tf.reduce_sum(flat**2, 1, keepdims=True) + tf.reduce_sum(book**2, 0) - 2 * flat @ book
            near = tf.matmul(tf.one_hot(tf.argmin(far, 1), 5), book, transpose_b=True)
            near = tf.reshape(near, tf.shape(x))
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(near) - x) ** 2)
                          + tf.reduce_mean((near - tf.stop_gradient(x)) ** 2))  # fmt: skip
            return x + tf.stop_gradient(near - x)

    x = K.Input((8, 8, 1))
    y = Quantizer()(L.Conv2D(3, 3, 4, padding="same", activation="relu")(x))
    return K.Model(x, L.Conv2DTranspose(1, 3, 4, padding="same")(y)), MSE, images(8, 8, 1), images(8, 8, 1)


class Adversaries(K.Model):
    """Two networks, two optimizers, one step; `loss_of` is the discriminator's."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.discriminator = K.Sequential([K.Input((6,)), L.Dense(4, activation="tanh"), L.Dense(1)])
        self.generator = K.Sequential([K.Input((2,)), L.Dense(6, **tanh)])

    def compile(self, optimizer, **kwargs):
        super().compile(optimizer=optimizer, **kwargs)
        self.other = sgd()

    @property
    def stepped_on(self):
        return self.discriminator.trainable_variables

    def latent(self, x):
        return tf.zeros([tf.shape(x)[0], 2]) + TINY * tf.random.normal([tf.shape(x)[0], 2])

    def loss_of(self, x):
        made = self.generator(self.latent(x))
        if self.kind == "penalty":
            between = 0.3 * x + 0.7 * made
            with tf.GradientTape() as tape:
                tape.watch(between)
                judged = self.discriminator(between)
            slope = tf.sqrt(tf.reduce_sum(tape.gradient(judged, between) ** 2, 1))
            loss = tf.reduce_mean(self.discriminator(made)) - tf.reduce_mean(self.discriminator(x))
            return loss + 10 * tf.reduce_mean((slope - 1) ** 2)
        entropy = tf.nn.sigmoid_cross_entropy_with_logits
        if self.kind == "joined":
            n = tf.shape(x)[0]
            truth = tf.concat([tf.zeros((n, 1)), tf.ones((n, 1))], 0)
            return tf.reduce_mean(entropy(truth, self.discriminator(tf.concat([x, made], 0))))
        real, false = self.discriminator(x), self.discriminator(made)
        return (tf.reduce_mean(entropy(tf.zeros_like(real), real)) + tf.reduce_mean(
            entropy(tf.ones_like(false), false))) / 2  # fmt: skip

    def train_step(self, x):
        for of_one, variables, optimizer in (
            (self.loss_of, self.discriminator.trainable_variables, self.optimizer),
            (self.fooled, self.generator.trainable_variables, self.other),
        ):
            with tf.GradientTape() as tape:
                loss = of_one(x)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}

    def fooled(self, x):
        judged = self.discriminator(self.generator(self.latent(x)))
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros_like(judged), judged))


def adversaries_that_judge_all_at_once(mended=False):
    return Adversaries("added" if mended else "joined"), None, images(6), None


def adversaries_with_a_gradient_penalty():
    return Adversaries("penalty"), None, images(6), None


class Diffusion(K.Model):
    """Noise told from images at times drawn for each, and a slow copy of the weights."""

    def __init__(self):
        super().__init__()
        self.net, self.slow = (self.made() for _ in range(2))
        self.slow.trainable = False

    @staticmethod
    def made():
        x, t = K.Input((6, 6, 1)), K.Input((1, 1, 1))
        waves = of(lambda t: tf.concat([tf.sin(t * f) for f in (1.0, 3.0)] + [tf.cos(t)], 3))(t)
        y = L.Concatenate()([L.Conv2D(3, 1)(x), L.UpSampling2D(6, interpolation="nearest")(waves)])
        y = L.Add()([L.Conv2D(3, 1)(y), L.Conv2D(3, 3, padding="same", activation="swish")(y)])
        return K.Model([x, t], L.Conv2D(1, 1)(y))

    def loss_of(self, x):
        n = tf.shape(x)[0]
        noise = tf.cos(9 * x) + TINY * tf.random.normal(tf.shape(x))
        t = 0.3 + TINY * tf.random.uniform([n, 1, 1, 1])
        return K.losses.MeanAbsoluteError()(noise, self.net([tf.cos(t) * x + tf.sin(t) * noise, t**2]))

    @property
    def stepped_on(self):
        return self.net.trainable_variables

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        gradients = tape.gradient(loss, self.net.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.net.trainable_weights, strict=True))
        for weight, slow in zip(self.net.weights, self.slow.weights, strict=True):
            slow.assign(0.999 * slow + (1 - 0.999) * weight)
        return {"loss": loss}


def denoising_diffusion():
    return Diffusion(), None, images(6, 6, 1), None


class Flow(K.Model):
    """Couplings that can be turned round, and the density of what they make."""

    def __init__(self):
        super().__init__()
        half = lambda: K.Sequential([K.Input((4,)), L.Dense(5, activation="relu"), L.Dense(4, **tanh)])
        self.scales, self.shifts = [half() for _ in range(2)], [half() for _ in range(2)]

    def loss_of(self, x):
        log = 0.0
        for i, (scale, shift) in enumerate(zip(self.scales, self.shifts, strict=True)):
            mask = tf.constant([[0.0, 1, 0, 1], [1.0, 0, 1, 0]][i])
            s, t = (net(x * mask) * (1 - mask) for net in (scale, shift))
            x = (1 - mask) * (x * tf.exp(-s) - t * tf.exp(-s)) + x * mask
            log -= tf.reduce_sum(s, 1)
        return -tf.reduce_mean(log - tf.reduce_sum(x**2, 1) / 2)

    def train_step(self, data):
        return stepped(self, data)


def real_valued_flow():
    return Flow(), None, images(4), None


def pixels_in_order():
    mask = np.zeros((3, 3, 1, 1), "float32")
    mask[0], mask[1, 0] = 1, 1

    x = K.Input((5, 5, 1))
    first = of(lambda x, w: tf.nn.relu(tf.nn.conv2d(x, w * mask, 1, "SAME")), (3, 3, 1, 4))(x)
    y = L.Add()([first, L.Conv2D(4, 1, activation="relu")(first)])
    return K.Model(x, L.Conv2D(1, 1, activation="sigmoid")(y)), "binary_crossentropy", images(5, 5, 1), images(5, 5, 1)


def radiance_along_rays():
    def render(raw, t):
        colour, density = tf.sigmoid(raw[..., :3]), tf.nn.relu(raw[..., 3])
        step = tf.concat([t[..., 1:] - t[..., :-1], tf.broadcast_to([1e10], tf.shape(t[..., :1]))], -1)
        alpha = 1 - tf.exp(-density * step)
        through = tf.math.cumprod(1 - alpha + 1e-10, -1, exclusive=True)
        return tf.reduce_sum((alpha * through)[..., None] * colour, -2)

    x, t = K.Input((4, 3)), K.Input((4,))
    waves = of(lambda x: tf.concat([x, tf.sin(2 * x), tf.cos(2 * x)], -1))(x)
    y = L.Dense(4)(L.Concatenate()([L.Dense(5, activation="relu")(waves), waves]))
    data = (images(4, 3), np.sort(images(4), 1))
    return K.Model([x, t], of(render)(y, t)), MSE, data, images(3, seed=2)


# -- text ----------------------------------------------------------------------------------------------------------


def words(n, high=7):
    return K.Input((n,), dtype="int32"), ids(n, high=high)


class TokenAndPosition(L.Layer):
    def __init__(self, length, high=7, width=4):
        super().__init__()
        self.token, self.place = L.Embedding(high, width), L.Embedding(length, width)

    def call(self, x):
        return self.token(x) + self.place(tf.range(0, tf.shape(x)[-1]))


def text_by_a_transformer():
    x, data = words(5)
    y = L.GlobalAveragePooling1D()(block(TokenAndPosition(5)(x)))
    return K.Model(x, L.Dense(2)(drop()(L.Dense(3, activation="relu")(y)))), TOKENS, data, labels(2)


def text_by_a_recurrent_network():
    x, data = words(5)
    y = L.Bidirectional(L.LSTM(2, return_sequences=True))(L.Embedding(7, 3)(x))
    return K.Model(x, L.Dense(1, activation="sigmoid")(L.LSTM(2)(y))), "binary_crossentropy", data, (
        labels(2))  # fmt: skip


def text_written_by_a_small_gpt():
    def causal(x):
        i, j = tf.range(5)[:, None], tf.range(5)
        return tf.tile(tf.cast(i >= j, tf.int32)[None], [tf.shape(x)[0], 1, 1])

    x, data = words(5)
    y = TokenAndPosition(5)(x)
    return K.Model(x, L.Dense(7)(attended(y, mask=of(causal)(y)))), TOKENS, data, np.roll(data, -1, 1)


def translation_letter_by_letter():
    a, b = K.Input((4, 3)), K.Input((3, 3))
    _, *state = L.LSTM(3, return_state=True)(a)
    y, *_ = L.LSTM(3, return_sequences=True, return_state=True)(b, initial_state=state)
    return K.Model([a, b], L.Dense(3)(y)), TOKENS, (images(4, 3), images(3, 3, seed=1)), ids(3, high=3)


def translation_by_a_transformer():
    (a, first), (b, second) = words(4), words(3)
    memory = TokenAndPosition(4)(a)
    y = attended(TokenAndPosition(3)(b), causal=True)
    y = L.LayerNormalization()(L.Add()([y, L.MultiHeadAttention(2, 2)(y, memory)]))
    return K.Model([a, b], L.Dense(7)(y)), TOKENS, (first, second), ids(3, seed=4)


def names_in_sentences():
    """A loss of one's own that leaves padding out: each example's mean is over its own words."""

    class NoPadding(K.losses.Loss):
        def call(self, y, p):
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), p)
            mask = tf.cast(y > 0, loss.dtype)
            return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)

    x, data = words(5)
    tags = ids(5, high=4, low=1)
    tags[1, 3:] = 0
    return K.Model(x, L.Dense(4)(attended(TokenAndPosition(5)(x)))), NoPadding(), data, tags


class MaskedWords(K.Model):
    """BERT's task: the loss counts where a word was hidden."""

    def __init__(self):
        super().__init__()
        x, _ = words(5)
        self.net = K.Model(x, L.Dense(7)(attended(TokenAndPosition(5)(x))))
        self.entropy = K.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def loss_of(self, data):
        x, y, weight = data
        return self.entropy(y, self.net(x), sample_weight=weight)

    def train_step(self, data):
        return stepped(self, data)


def masked_words():
    hidden = (rng(2).random((N, 5)) < 0.5).astype("float32")
    return MaskedWords(), None, (ids(5), ids(5, seed=1), hidden), "three"


def experts_chosen_for_each_word(mended=False):
    """A router, which a loss of its own balances: over all texts, or for each."""

    class Switch(L.Layer):
        def __init__(self):
            super().__init__()
            self.router = L.Dense(2)

        def build(self, _):
            self.experts = self.add_weight(name="experts", shape=(2, 4, 4), initializer="glorot_normal")
            self.built = True

        def call(self, x):
            gate = tf.nn.softmax(self.router(x))
            chosen = tf.one_hot(tf.argmax(gate, -1), 2)
            axes = 1 if mended else (0, 1)
            balance = tf.reduce_sum(tf.reduce_mean(chosen, axes) * tf.reduce_mean(gate, axes), -1)
            self.add_loss(2 * tf.reduce_mean(balance))
            return tf.einsum("btd,edf,bte->btf", x, tf.convert_to_tensor(self.experts), chosen * gate)

    x, data = words(5)
    y = Switch()(TokenAndPosition(5)(x))
    return K.Model(x, L.Dense(2)(L.GlobalAveragePooling1D()(y))), TOKENS, data, labels(2)


# -- backbones with adapters ---------------------------------------------------------------------------------------


class LoRA(L.Layer):
    """A frozen dense layer, and two thin ones that are trained beside it."""

    def __init__(self, width, rank=2):
        super().__init__()
        self.frozen = L.Dense(width, trainable=False)
        self.down, self.up = L.Dense(rank, use_bias=False), L.Dense(width, use_bias=False)

    def call(self, x):
        return self.frozen(x) + self.up(self.down(x)) * 0.5


def rotated(x):
    """Rotary places: [batch, length, heads, size]."""
    at = tf.range(x.shape[1], dtype=x.dtype)[:, None] / 10.0 ** tf.range(x.shape[-1] // 2, dtype=x.dtype)
    sin, cos = tf.sin(at)[:, None], tf.cos(at)[:, None]
    a, b = tf.split(x, 2, -1)
    return tf.concat([a * cos - b * sin, b * cos + a * sin], -1)


def grouped_attention(q, k, v):
    """Fewer keys than queries, and each word sees those before it."""
    q, k = rotated(tf.reshape(q, [-1, 5, 2, 4])), rotated(tf.reshape(k, [-1, 5, 1, 4]))
    k, v = tf.repeat(k, 2, 2), tf.repeat(tf.reshape(v, [-1, 5, 1, 4]), 2, 2)
    scores = tf.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    scores += (1 - tf.linalg.band_part(tf.ones([5, 5]), -1, 0)) * -1e9
    return tf.reshape(tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), v), [-1, 5, 8])


def root_mean_square(x, w):
    return x * tf.math.rsqrt(tf.reduce_mean(x**2, -1, keepdims=True) + 1e-6) * w


def language_model_with_adapters():
    """As Llama and its kin: root mean square, rotary places, grouped keys, gated linear units."""
    x, data = words(5)
    table = L.Embedding(7, 8, trainable=False)
    y = table(x)
    z = Of(root_mean_square, [(8,)], "ones")(y)
    y = L.Add()([y, LoRA(8)(of(grouped_attention)(LoRA(8)(z), L.Dense(4, trainable=False)(z), LoRA(4)(z)))])
    z = Of(root_mean_square, [(8,)], "ones")(y)
    gated = L.Multiply()([L.Dense(6, activation="silu")(z), L.Dense(6)(z)])
    y = L.Add()([y, L.Dense(8)(gated)])
    return K.Model(x, L.Dense(7)(y)), TOKENS, data, np.roll(data, -1, 1)


def tied_language_model():
    """Words are looked up in the table that they are scored by; logits are capped."""

    class Tied(L.Layer):
        def build(self, _):
            self.table = self.add_weight(name="table", shape=(7, 4), initializer="glorot_normal")
            self.built = True

        def call(self, x, back=False):
            table = tf.convert_to_tensor(self.table)
            return 5 * tf.tanh(tf.matmul(x, table, transpose_b=True) / 5) if back else tf.gather(table, x) * 2.0

    x, data = words(5)
    tied = Tied()
    return K.Model(x, tied(block(tied(x), causal=True), back=True)), TOKENS, data, np.roll(data, -1, 1)


def encoder_of_segments():
    """As BERT: words, segments and places, post-normalised, with a mask of padding."""
    (x, a), (s, b), (m, _) = words(5), words(5, 2), words(5)
    y = L.Add()([TokenAndPosition(5)(x), L.Embedding(2, 4)(s)])
    y = drop()(L.LayerNormalization()(y))
    mask = of(lambda m: tf.cast(m[:, None, :], tf.bool))(m)
    z = L.LayerNormalization()(L.Add()([y, L.MultiHeadAttention(2, 2)(y, y, attention_mask=mask)]))
    y = L.LayerNormalization()(L.Add()([z, feed_forward(z, 4, 6)]))
    pooled = L.Dense(4, **tanh)(of(lambda y: y[:, 0])(y))
    kept = np.ones((N, 5), "int32")
    kept[1:, 3:] = 0
    return K.Model([x, s, m], L.Dense(2)(pooled)), TOKENS, (a, b, kept), labels(2)


def disentangled_attention():
    """As DebertaV3: scores of places relative to each other are gathered for each query."""
    at = np.clip(np.arange(5)[:, None] - np.arange(5) + 4, 0, 8)

    def attend(x, q, k, v, table):
        query, key = x @ q, x @ k
        place = tf.einsum("bqd,pd->bqp", query, table @ k)
        place = tf.gather(place, tf.tile(at[None], [tf.shape(x)[0], 1, 1]), batch_dims=2)
        return tf.nn.softmax(tf.matmul(query, key, transpose_b=True) + place) @ (x @ v)

    x, data = words(5)
    y = of(attend, (4, 4), (4, 4), (4, 4), (9, 4))(TokenAndPosition(5)(x))
    return K.Model(x, L.Dense(2)(L.GlobalAveragePooling1D()(y))), TOKENS, data, labels(2)


def images_and_text_towers():
    """As CLIP: two towers, of which each pair is scored by itself."""
    x, (w, data) = K.Input((4, 4, 3)), words(5)
    image = L.Dense(3)(L.GlobalAveragePooling1D()(Placed(4, 4)(of(lambda x: cut(x, 2))(x))))
    text = L.Dense(3)(of(lambda y: y[:, -1])(attended(TokenAndPosition(5)(w), causal=True)))
    y = of(lambda a, b, s: tf.exp(s) * tf.reduce_sum(tf.math.l2_normalize(a, -1) * tf.math.l2_normalize(b, -1), 1,
                                                     keepdims=True), (1,), start="ones")(image, text)  # fmt: skip
    return K.Model([x, w], y), K.losses.BinaryCrossentropy(True), (images(4, 4, 3), data), labels(2)


def speech_encoder():
    """As Whisper: two convolutions over a spectrogram, sinusoids for places, cross-attention from words."""
    x, (w, data) = K.Input((8, 3)), words(3)
    y = L.Conv1D(4, 3, 2, padding="same", activation="gelu")(L.Conv1D(4, 3, padding="same", activation="gelu")(x))
    y = of(lambda y: y + np.sin(np.arange(16).reshape(4, 4)).astype("float32"))(y)
    z = attended(TokenAndPosition(3)(w), causal=True)
    z = L.Add()([z, L.MultiHeadAttention(2, 2)(z, y)])
    return K.Model([x, w], L.Dense(7)(z)), TOKENS, (images(8, 3), data), ids(3, seed=8)


# -- tables, time, graphs, play, sound -----------------------------------------------------------------------------


def income_from_raw_columns():
    age, work = K.Input((1,)), K.Input((1,), dtype="string")
    known = L.StringLookup(vocabulary=["state", "private", "self"])
    known = L.Flatten()(L.Embedding(4, 2)(known(work)))
    y = L.Concatenate()([L.Normalization(mean=[40.0], variance=[100.0])(age), known])
    data = (40 + 10 * images(1), np.array([["state"], ["?"]], object))
    return K.Model([age, work], L.Dense(1)(drop()(L.Dense(3, activation="relu")(y)))), K.losses.BinaryCrossentropy(
        True), data, labels(2)  # fmt: skip


def gated_residual_selection():
    x = K.Input((2, 4))
    parts = [of(lambda x, i=i: x[:, i])(x) for i in range(2)]

    def gated(y):
        z = drop()(L.Dense(4)(L.Dense(4, activation="elu")(y)))
        z = L.Multiply()([L.Dense(4)(z), L.Dense(4, activation="sigmoid")(z)])
        return L.LayerNormalization()(L.Add()([L.Dense(4)(y), z]))

    chosen = L.Reshape((2, 1))(L.Dense(2, activation="softmax")(gated(L.Concatenate()(parts))))
    stack = of(lambda *p: tf.stack(p, 1))(*map(gated, parts))
    y = of(lambda w, p: tf.squeeze(tf.matmul(w, p, transpose_a=True), 1))(chosen, stack)
    return K.Model(x, L.Dense(1)(y)), MSE, images(2, 4), images(1, seed=1)


def columns_by_a_transformer():
    x, data = words(3)
    y = of(lambda y, place: y + place, (3, 4))(L.Embedding(7, 4)(x))
    return K.Model(x, L.Dense(2)(L.Flatten()(attended(y)))), TOKENS, data, labels(2)


def forest_of_soft_trees():
    def leaves(decide):
        at, probability = 1, tf.ones([tf.shape(decide)[0], 1, 1])
        both = tf.stack([decide, 1 - decide], 2)
        for depth in range(2):
            probability = tf.reshape(tf.tile(probability, [1, 1, 2]), [-1, 2**depth, 2])
            probability = tf.reshape(probability * both[:, at : 2 * at], [-1, 2 ** (depth + 1), 1])
            at *= 2
        return tf.reshape(probability, [-1, 4])

    x = K.Input((5,))
    y = of(leaves)(L.Dense(4, activation="sigmoid")(x))
    return K.Model(x, of(lambda p, w: tf.matmul(p, tf.nn.softmax(w)), (4, 3))(y)), (
        "sparse_categorical_crossentropy"), images(5), labels()  # fmt: skip


def deep_and_cross(mended=False):
    x = K.Input((4,))
    y = x
    for _ in range(2):
        y = L.Add()([L.Multiply()([x, L.Dense(4)(y)]), y])
    deep = L.Activation("relu")(L.BatchNormalization()(L.Dense(4)(x)))
    y = L.Dense(2)(L.Concatenate()([y, deep]))
    return fixed(K.Model(x, y), mended), TOKENS, images(4), labels(2)


def films_by_dot_product():
    class Recommender(K.Model):
        def __init__(self):
            super().__init__()
            table = lambda width: L.Embedding(7, width)
            self.user, self.film, self.of_user, self.of_film = table(3), table(3), table(1), table(1)

        def call(self, x):
            user, film = x[:, 0], x[:, 1]
            score = tf.reduce_sum(self.user(user) * self.film(film), 1, keepdims=True)
            return tf.sigmoid(score + self.of_user(user) + self.of_film(film))

    return Recommender(), "binary_crossentropy", ids(2), labels(2)


def what_a_shopper_did_before():
    (past, a), (now, b) = words(4), words(1)
    table = L.Embedding(7, 4)
    y = L.Concatenate(axis=1)([table(past), table(now)])
    y = attended(of(lambda y, p: y + p, (5, 4))(y))
    return K.Model([past, now], L.Dense(1)(L.Flatten()(y))), MSE, (a, b), images(1)


def tasks_with_shared_experts():
    x = K.Input((5,))
    experts = of(lambda *e: tf.stack(e, 1))(*[L.Dense(4, activation="relu")(x) for _ in range(3)])
    heads = [L.Dense(1)(L.Dot(1)([L.Dense(3, activation="softmax")(x), experts])) for _ in range(2)]
    return K.Model(x, heads), [MSE, "mae"], images(5), (images(1, seed=1), images(1, seed=2))


def random_features_and_a_hinge(mended=False):
    x = K.Input((4,))
    y = of(lambda x: tf.cos(x @ np.cos(np.arange(24.0)).reshape(4, 6).astype("float32")))(x)
    hinge = (lambda t, p: tf.reduce_mean(tf.maximum(1 - t * p, 0), -1)) if mended else "hinge"
    return K.Model(x, L.Dense(1)(y)), hinge, images(4), 2.0 * labels(2)[:, None].astype("float32") - 1


def weather():
    x = K.Input((6, 3))
    return K.Model(x, L.Dense(1)(L.LSTM(3)(x))), MSE, images(6, 3), images(1)


def engine_noise(mended=False):
    x = K.Input((8, 1))
    y = L.ReLU()(L.BatchNormalization()(L.Conv1D(3, 3, padding="same")(x)))
    return fixed(K.Model(x, L.Dense(2)(L.GlobalAveragePooling1D()(y))), mended), TOKENS, images(8, 1), labels(2)


def anomalies():
    x = K.Input((8, 1))
    y = L.Conv1D(2, 3, 2, padding="same", activation="relu")(drop()(L.Conv1D(3, 3, 2, padding="same", **tanh)(x)))
    y = L.Conv1DTranspose(3, 3, 2, padding="same", **tanh)(L.Conv1DTranspose(2, 3, 2, padding="same")(y))
    return K.Model(x, L.Conv1DTranspose(1, 3, padding="same")(y)), MSE, images(8, 1), images(8, 1)


def traffic_on_a_road_graph():
    """Messages along known roads, then a recurrent network for each place."""
    start, end = np.array([0, 1, 2, 0]), np.array([1, 2, 0, 2])

    def messages(x, w):
        sent = tf.gather(tf.einsum("btni,io->btno", x, w), start, axis=2)
        roads = tf.one_hot(end, 3) / 2
        return tf.nn.relu(tf.einsum("bteo,en->btno", sent, roads))

    x = K.Input((4, 3, 2))
    y = of(messages, (2, 3))(x)
    y = of(lambda y: tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [-1, 4, 3]))(y)
    y = L.Dense(1)(L.LSTM(3)(y))
    return K.Model(x, of(lambda y: tf.reshape(y, [-1, 3]))(y)), MSE, images(4, 3, 2), images(3)


def attention_in_each_graph():
    def attend(h, edges, a):
        score = tf.nn.leaky_relu(tf.einsum("bid,d->bi", h, a)[:, :, None] + tf.einsum("bjd,d->bj", h, a)[:, None])
        return tf.nn.softmax(tf.where(edges > 0.4, score, -1e9)) @ h

    x, edges = K.Input((4, 3)), K.Input((4, 4))
    y = of(attend, (5,))(L.Dense(5)(x), edges)
    y = L.Dense(2)(L.GlobalAveragePooling1D()(L.ReLU()(y)))
    return K.Model([x, edges], y), TOKENS, (images(4, 3), images(4, 4) + np.eye(4, dtype="float32")), labels(2)


def nodes_of_one_graph():
    """Examples are nodes, and neighbours are other examples."""
    x = K.Input((3,))
    near = of(lambda h: tf.math.unsorted_segment_mean(tf.gather(h, [1, 0]), tf.constant([0, 1]), 2))
    return K.Model(x, L.Dense(2)(near(L.Dense(4)(x)))), TOKENS, images(3), labels(2)


class QLearner(K.Model):
    def __init__(self, mended):
        super().__init__()
        self.net, self.masked = K.Sequential([K.Input((4,)), L.Dense(5, activation="relu"), L.Dense(2)]), mended

    def target(self, reward, after):
        best = reward + 0.9 * tf.reduce_max(self.net(after), 1)
        return tf.stop_gradient(best) if self.masked else best

    def loss_of(self, data, target=None):
        before, action, reward, after = data
        target = self.target(reward, after) if target is None else target
        q = tf.reduce_sum(self.net(before) * tf.one_hot(action, 2), 1)
        return K.losses.Huber()(target, q)

    def train_step(self, data):
        target = self.target(*data[2:])
        with tf.GradientTape() as tape:
            loss = self.loss_of(data, target)
        gradients = tape.gradient(loss, self.net.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.net.trainable_variables, strict=True))
        return {"loss": loss}


def q_learning(mended=False):
    return QLearner(mended), None, (images(4), labels(2), images(), images(4, seed=1)), "four"


class Policy(K.Model):
    """Advantages were found before; the clip of the ratio keeps the policy near to what it was."""

    def __init__(self):
        super().__init__()
        self.actor = K.Sequential([K.Input((4,)), L.Dense(5, **tanh), L.Dense(3)])
        self.critic = K.Sequential([K.Input((4,)), L.Dense(5, **tanh), L.Dense(1)])

    def loss_of(self, data):
        seen, action, advantage, returned, before = data
        log = tf.reduce_sum(tf.nn.log_softmax(self.actor(seen)) * tf.one_hot(action, 3), 1)
        ratio = tf.exp(log - before)
        least = tf.where(advantage > 0, 1.2 * advantage, 0.8 * advantage)
        value = tf.squeeze(self.critic(seen), 1)
        return -tf.reduce_mean(tf.minimum(ratio * advantage, least)) + tf.reduce_mean((returned - value) ** 2)

    def train_step(self, data):
        return stepped(self, data)


def proximal_policy():
    return Policy(), None, (images(4), labels(), images(), images(seed=1), -images(seed=2)), "five"


def speakers_by_their_spectrum():
    def spectrum(x):
        return tf.math.abs(tf.signal.fft(tf.cast(tf.squeeze(x, -1), tf.complex64))[:, :8])[..., None]

    x = K.Input((16, 1))
    y = of(spectrum)(x)
    short = L.Conv1D(3, 1, padding="same")(y)
    y = L.Conv1D(3, 3, padding="same")(L.Activation("relu")(L.Conv1D(3, 3, padding="same")(y)))
    y = L.MaxPooling1D(2, 2)(L.Activation("relu")(L.Add()([y, short])))
    return K.Model(x, L.Dense(3)(L.Flatten()(y))), TOKENS, images(16, 1), labels()


def speech_by_alignment(mended=False):
    """As Deep Speech: convolutions with batch normalisation before a recurrent network."""
    x = K.Input((8, 4))
    y = L.Reshape((4, 6))(L.Conv1D(6, 3, 2, padding="same")(x))
    y = L.ReLU()(L.BatchNormalization()(y))
    y = L.Bidirectional(L.GRU(3, return_sequences=True, reset_after=True))(y)

    class Alignment(K.losses.Loss):
        def call(self, y, p):
            n = tf.shape(y)[0]
            y = tf.cast(y, tf.int32)
            return tf.nn.ctc_loss(y, p, tf.fill([n], 1), tf.fill([n], 4), logits_time_major=False, blank_index=-1)

    return fixed(K.Model(x, L.Dense(5)(y)), mended), Alignment(), images(8, 4), ids(1, high=4)


TRAIN = [
    digits_by_convolutions, head_on_a_frozen_application, vision_transformer, compact_transformer_with_stochastic_depth,
    windows_that_shift, mixers_without_attention, involution, atrous_pyramid, finer_images, low_light, object_detection,
    video_frames_in_time, video_in_tubes, next_frames, siamese_triplets, views_that_predict_each_other, masked_patches,
    knowledge_distillation, captcha, style_statistics, latent_array_that_looks,
    variational_autoencoder, vectors_from_a_codebook, adversaries_with_a_gradient_penalty, denoising_diffusion,
    real_valued_flow, pixels_in_order, radiance_along_rays,
    text_by_a_transformer, text_by_a_recurrent_network, text_written_by_a_small_gpt, translation_letter_by_letter,
    translation_by_a_transformer, names_in_sentences, masked_words,
    language_model_with_adapters, tied_language_model, encoder_of_segments, disentangled_attention,
    images_and_text_towers, speech_encoder,
    income_from_raw_columns, gated_residual_selection, columns_by_a_transformer, forest_of_soft_trees,
    films_by_dot_product, what_a_shopper_did_before, tasks_with_shared_experts, weather, anomalies,
    traffic_on_a_road_graph, attention_in_each_graph, proximal_policy, speakers_by_their_spectrum,
]  # fmt: skip
FIX = "tfdpfl.clipping.fix.model..model"
MENDED = {
    cats_and_dogs_from_scratch: FIX,
    application_fine_tuned: FIX,
    residual_network_of_second_version: FIX,
    convolution_mixer: FIX,
    segmentation_with_skips: FIX,
    crops_of_a_spatial_transformer: r"tf\.gather\(x, indices, batch_dims=1\)",
    point_clouds: FIX,
    adversaries_that_judge_all_at_once: "Call the model on each part, and add the losses",
    experts_chosen_for_each_word: "axis=1 and up",
    deep_and_cross: FIX,
    random_features_and_a_hinge: r"tf\.reduce_mean\(tf\.maximum\(1 - t \* p, 0\), -1\)",
    engine_noise: FIX,
    q_learning: r"tf\.stop_gradient",
    speech_by_alignment: FIX,
}
# On the older stack one each of what Keras 2 builds otherwise (recurrent, normalising, attention, lookups, frozen
# applications), and of train steps and losses of one's own.
BOTH = {
    head_on_a_frozen_application, adversaries_with_a_gradient_penalty, text_by_a_transformer, income_from_raw_columns,
    weather, q_learning, captcha,
}  # fmt: skip
REFUSED = {
    contrast_with_the_rest_of_the_batch: "a loss that compares the examples of a batch",
    nodes_of_one_graph: "examples",
}


def sgd():
    return tfdpfl.DPSGD(CLIP, 0.0, learning_rate=RATE)


def as_batch(x, y):
    """What `fit` hands a train step; ``y`` is a word where all of x is its data."""
    return x if y is None or isinstance(y, str) else (x, y)


def made(build, **kwargs):
    K.utils.set_random_seed(1)
    model, loss, x, y = build(**kwargs)
    data = tf.data.Dataset.from_tensor_slices(as_batch(x, y)).batch(8)  # of free size
    for batch in data:
        if loss is None:
            model.loss_of(batch)
        elif not model.built:
            model(batch[0])
    model.compile(sgd(), **({} if loss is None else {"loss": loss}))
    return model, loss, data, (x, y)


def one_by_one(model, loss, x, y, variables):
    """Each example's gradient, by TensorFlow's tape and without a graph."""
    for i in range(N):
        one = tf.nest.map_structure(lambda a, i=i: tf.constant(a[i : i + 1]), as_batch(x, y))
        with tf.GradientTape() as tape:
            if loss is None:
                value = model.loss_of(one)
            else:
                value = model.compute_loss(one[0], one[1], model(one[0], training=True))
        grads = tape.gradient(value, variables, unconnected_gradients="zero")
        yield [tf.convert_to_tensor(g).numpy().astype("float64") for g in grads]


def trains(build, **kwargs):
    model, loss, data, (x, y) = made(build, **kwargs)
    trained = getattr(model, "stepped_on", None) or model.trainable_variables
    variables = raw(trained)
    total = [0.0] * len(variables)
    for gradient in one_by_one(model, loss, x, y, variables):
        norm = np.sqrt(sum((g**2).sum() for g in gradient))
        total = [t + g * min(1, CLIP / max(norm, 1e-30)) for t, g in zip(total, gradient, strict=True)]
    before = [v.numpy() for v in variables]
    model.fit(data, verbose=0)
    scale = max(np.abs(t).max() for t in total) / N * RATE
    assert scale > 0
    for v, b, t in zip(variables, before, total, strict=True):
        np.testing.assert_allclose(b - v.numpy(), RATE * t / N, atol=3e-4 * scale, rtol=0)
    assert model.optimizer.num_dp_steps == 1


def is_refused(build, message):
    model, _, data, _ = made(build)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=f"(?s){message}"):
        model.fit(data, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def cases(builds, messages=None):
    for build in builds:
        marks = [] if build in BOTH else [pytest.mark.one_stack]
        yield pytest.param(build, *([messages[build]] if messages else []), marks=marks, id=name(build))


def name(value):
    return getattr(value, "__name__", "").replace("_", " ")


@pytest.mark.parametrize("build", cases(TRAIN))
def test_trains_with_only_the_optimizer_changed(build):
    trains(build)


@pytest.mark.parametrize(("build", "mend"), cases(MENDED, MENDED))
def test_trains_after_the_mend_that_its_refusal_names(build, mend):
    is_refused(build, mend)
    trains(build, mended=True)


@pytest.mark.one_stack
@pytest.mark.parametrize(("build", "message"), cases(REFUSED, REFUSED))
def test_is_refused_by_name(build, message):
    is_refused(build, message)


def test_a_batch_of_known_size_trains_as_one_of_free_size():
    """As `fit` makes batches of arrays whose number the batch size divides."""
    K.utils.set_random_seed(1)
    model, loss, x, y = disentangled_attention()
    model.compile(sgd(), loss=loss)
    model.fit(x, y, batch_size=2, verbose=0)
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(2), verbose=0)


def test_most_train_as_they_are_and_nearly_all_after_one_mend():
    every = len(TRAIN) + len(MENDED) + len(REFUSED)
    assert every > 60 and len(TRAIN) / every > 0.7 and (len(TRAIN) + len(MENDED)) / every > 0.97
