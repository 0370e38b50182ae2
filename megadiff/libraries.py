"""Libraries that only some runs need."""

from importlib import import_module
from typing import Any


class LibraryError(ValueError):
    """A library is not installed; the message says what needs it and how to install it."""


def need_library(name: str, user: str, extra: str = "data") -> Any:
    """The module `name`, or a LibraryError that says what `user` lacks."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise LibraryError(
            f"{user} needs the library {name}: pip install 'megadiff[{extra}]'"
        ) from None
