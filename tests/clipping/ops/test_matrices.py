"""Linear algebra of an example's own matrix is exact, and of the batch as a matrix is refused."""

import pytest
import tensorflow as tf
from helpers import L, normal
from mixing_cases import check_exact, check_refused_or_apart, check_told, d, n, square, total

BY_PLACE = tf.constant(normal(4, 2, 2), tf.float32)  # another right-hand side for each place in the batch
MIXING = {
    "inverse of the batch": lambda x: total(tf.linalg.inv(tf.ensure_shape(d(x), [4, 4]))),
    "diagonal of the batch": lambda x: total(tf.linalg.diag_part(tf.ensure_shape(d(x), [4, 4]))),
    "examples as diagonals": lambda x: total(tf.linalg.diag(tf.transpose(d(x)))),
    "examples as bands": lambda x: total(tf.linalg.diag(tf.ensure_shape(d(x), [4, 4]), k=(-1, 2))),
    "solution for the batch": lambda x: total(tf.linalg.solve(tf.ensure_shape(d(x), [4, 4]), x)),
    "solutions by position": lambda x: total(tf.linalg.solve(square(x) + 9 * tf.eye(2), BY_PLACE)),
    "solutions of all examples": lambda x: total(
        tf.linalg.triangular_solve(square(x) + 9 * tf.eye(2), tf.ensure_shape(square(x), [4, 2, 2])[:, None])
    ),
    "solutions of pairs": lambda x: total(
        tf.linalg.triangular_solve(square(x)[:, None] + 9 * tf.eye(2), square(x)[None])
    ),
    "diagonal matrix": lambda x: tf.reduce_sum(tf.linalg.diag(d(x)[:, 0]), 0) ** 2,
    "band of the batch size": lambda x: total(tf.linalg.band_part(square(x), n(x) - 4, -1)),
}  # fmt: skip
TOLD = {
    "diagonal of the batch": "MatrixDiagPartV3.*works along the batch axis",
    "examples as bands": "MatrixDiagV3.*works along the batch axis",
    "solution for the batch": "MatrixSolve.*works along the batch axis",
    "solutions by position": "MatrixSolve.*treats an example by its position in the batch",
    "solutions of pairs": "MatrixTriangularSolve.*examples along one axis with the examples along another",
    "solutions of all examples": "MatrixTriangularSolve.*examples along one axis with the examples along another",
    "inverse of the batch": "MatrixInverse.*works along the batch axis",
}

ALLOWED = {
    "own solution": lambda x: tf.linalg.solve(tf.einsum("bij,bkj->bik", x, x) + tf.eye(3), x),
    "own diagonal": lambda x: tf.linalg.diag_part(tf.einsum("bij,bkj->bik", x, x), k=(-1, 1)),
    "own diagonal matrices": lambda x: tf.linalg.diag(x),
    "own inverse": lambda x: tf.linalg.inv(tf.einsum("bij,bkj->bik", x, x) + tf.eye(3)),
}  # fmt: skip


UNTOLD = {name: losses for name, losses in MIXING.items() if name not in TOLD}


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("losses", UNTOLD.values(), ids=UNTOLD)
def test_what_lets_examples_meet_is_refused_or_keeps_them_apart(losses):
    check_refused_or_apart(losses)


@pytest.mark.parametrize(("name", "message"), TOLD.items(), ids=TOLD)
def test_a_refusal_names_the_op_and_the_reason(name, message):
    check_told(MIXING[name], message)


@pytest.mark.slow
@pytest.mark.one_stack
def test_what_keeps_examples_apart_is_exact():
    check_exact(*map(L.Lambda, ALLOWED.values()))
