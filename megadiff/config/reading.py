"""Options from YAML files and flags, and back to YAML."""

import argparse
import dataclasses
import difflib
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml

from megadiff.config.options import Config, ConfigError, sections


def load_config(argv: list[str], config: Config | None = None) -> Config:
    """The configuration of the command line `argv`: defaults, then `--config` files, then flags.

    The values of `config`, if given, take the place of the defaults; it is the result. Raises
    ConfigError for unknown keys, values of a wrong type and unreadable files. `--help` prints the
    flags and exits.
    """
    parser = _parser()
    flags, unknown = parser.parse_known_args([_with_dashes(word) for word in argv])
    if unknown:
        known = [o for action in parser._actions for o in action.option_strings]
        flag = next((u for u in unknown if u.startswith("-")), unknown[0])
        raise ConfigError(f"unknown flag {flag}{_nearest(flag.split('=')[0], known)}")
    config = config or Config()
    for path in flags.config or []:
        _read_file(config, path)
    for name, section in sections(config).items():
        for f in dataclasses.fields(section):
            value = getattr(flags, f"{name}.{f.name}", None)
            if value is not None:
                setattr(section, f.name, value)
    return config


def _with_dashes(word: str) -> str:
    """A flag written with underscores (`--deepspeed_config`, `--override-opt_param-scheduler`)."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _read_file(config: Config, path: str) -> None:
    """Set the fields that the YAML file `path` names, after those of its `base` file, if any.

    `base` is a path relative to the file itself.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected sections such as `model:`, found {type(values).__name__}"
        )
    base = values.pop("base", None)
    if base is not None:
        _read_file(config, str(Path(path).parent / str(base)))
    update_config(config, values, source=path)


def update_config(config: Config, values: dict[str, Any], source: str) -> None:
    """Set the fields named in nested `values`; `source` names their origin in error messages."""
    known = sections(config)
    for name, entries in values.items():
        if name not in known:
            raise ConfigError(f"{source}: unknown section {name!r}{_nearest(str(name), known)}")
        hints = get_type_hints(type(known[name]))
        if not isinstance(entries, dict | None):
            raise ConfigError(f"{source}: {name} must hold keys and values, found {entries!r}")
        for key, value in (entries or {}).items():
            key = str(key).replace("-", "_")
            if key not in hints:
                raise ConfigError(f"{source}: unknown key {name}.{key}{_nearest(key, hints)}")
            setattr(known[name], key, _convert(value, hints[key], f"{source}: {name}.{key}"))


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as `update_config` takes them."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        usage="%(prog)s [--config FILE] [flags]",
        description="Pretrain a Differential Transformer.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
    )
    parser.add_argument(
        "--config", action="append", metavar="FILE", help="YAML file; may be repeated"
    )
    for name, section in sections(Config()).items():
        group = parser.add_argument_group(type(section).__doc__ or name)
        hints = get_type_hints(type(section))
        for f in dataclasses.fields(section):
            _add_flag(group, f"{name}.{f.name}", f, hints[f.name])
    return parser


def _add_flag(group: Any, dest: str, f: dataclasses.Field, hint: Any) -> None:
    default = f.default if f.default is not dataclasses.MISSING else None
    text = f.metadata["help"] + ("" if default is None else f" [{default}]")
    flag = "--" + f.name.replace("_", "-")
    hint = _without_none(hint)
    metavar = {int: "N", float: "X"}.get(hint, f.name.split("_")[-1].upper())
    if hint is bool:
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif get_origin(hint) is Literal:
        options = {"choices": get_args(hint)}
    elif get_origin(hint) is list:
        options = {"type": get_args(hint)[0], "nargs": "+", "metavar": metavar}
    else:
        options = {"type": hint, "metavar": metavar}
    group.add_argument(flag, dest=dest, help=text, **options)
    for alias, constant in f.metadata["aliases"].items():
        group.add_argument(
            alias, dest=dest, action="store_const", const=constant, help=f"{f.name} {constant}"
        )


def _without_none(hint: Any) -> Any:
    if NoneType in get_args(hint):
        return next(h for h in get_args(hint) if h is not NoneType)
    return hint


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` from YAML as `hint` says. YAML reads 1e-4 as text, so text is parsed for numbers."""
    if value is None and hint is not _without_none(hint):
        return None
    hint = _without_none(hint)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, get_args(hint)))}")
    if get_origin(hint) is list:
        if isinstance(value, list):
            return [_convert(v, get_args(hint)[0], where) for v in value]
        raise ConfigError(f"{where}: expected a list, found {value!r}")
    if isinstance(value, bool):
        if hint is bool:
            return value
    elif isinstance(value, (str, int, float)) and hint is not bool:
        with suppress(ValueError, OverflowError):
            if hint is not int or isinstance(value, int):
                return hint(value)
            if float(value).is_integer():
                return int(float(value))
    raise ConfigError(f"{where}: expected {hint.__name__}, found {value!r}")


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
