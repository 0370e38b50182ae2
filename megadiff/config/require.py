"""Conditions of a configuration, each with its message."""

from typing import Any

from megadiff.config.options import ConfigError


def flag(name: str) -> str:
    """The flag that sets the field `name`."""
    return f"--{name.replace('_', '-')}"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"{flag(name)} is {value}, must be positive")


def require_at_least_zero(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= 0, f"{flag(name)} is {value}, must not be negative")
