"""The one error of this package that is about privacy rather than about a bad argument."""

__all__ = ["PrivacyError"]


class PrivacyError(ValueError):
    """What was asked cannot be made private, or its privacy cannot be priced.

    The message names the cause and the remedy. Ordinary bad arguments (a negative noise multiplier, δ ≥ 1)
    raise a plain `ValueError`.
    """

    # AutoGraph passes an exception on by type only if its constructor is this one.
    __init__ = Exception.__init__
