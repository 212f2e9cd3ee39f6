"""The one error of this package that is about privacy rather than about a bad argument."""

__all__ = ["PrivacyError"]


class PrivacyError(ValueError):
    """Refuses a request that cannot be made private, or whose ε cannot be computed.

    The message names the cause and the remedy. Ordinary bad arguments (a negative noise multiplier, δ ≥ 1)
    raise a plain `ValueError`.
    """

    # AutoGraph passes an exception on by type only if its constructor is this one.
    __init__ = Exception.__init__
