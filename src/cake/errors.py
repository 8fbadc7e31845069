"""Exception classes, and the way from a C++ error message to one of them."""

from __future__ import annotations

import re


class DTypeError(TypeError, ValueError):
    """An argument has a type or dtype that cake cannot take."""


class UnsupportedError(NotImplementedError, ValueError):
    """A request that is valid elsewhere but that cake does not do."""


# The C++ side marks its messages with the class they belong to: "[cake:TypeError] argument: ...".
_MARKED = re.compile(r"\[cake:(\w+)\] (.*?)(?: \(originally from |\n|$)", re.DOTALL)
_CLASSES: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": DTypeError,
    "Unsupported": UnsupportedError,
    "RuntimeError": RuntimeError,
}


def translate(error: RuntimeError) -> Exception:
    """Return the Python exception that a marked C++ error stands for, or `error` itself.

    Parameters
    ----------
    error : RuntimeError
        As raised by an operator of `torch.ops.cake`.

    Returns
    -------
    Exception
        ValueError, DTypeError, UnsupportedError or RuntimeError with the plain message.
    """
    found = _MARKED.search(str(error))
    return _CLASSES[found.group(1)](found.group(2)) if found else error
