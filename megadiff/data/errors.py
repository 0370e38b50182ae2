"""What is wrong with data, files or flags, and with what is installed."""

from importlib import import_module
from typing import Any


class DataError(ValueError):
    """A file, flag or value of the data tools is wrong; the message says which and what to do."""


def need_library(name: str, user: str, extra: str = "data") -> Any:
    """The module `name`, or a DataError that says what `user` lacks and how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise DataError(
            f"{user} needs the library {name}: pip install 'megadiff[{extra}]'"
        ) from None
