"""Settings from the environment and one file, checked all at once. Knows no service.

A service's settings are one frozen dataclass, composed of smaller ones and never inherited. Each field made by
`setting()` is read from `HEADRACE_<SECTION>_<FIELD>`, else from the TOML file that `HEADRACE_CONFIG` names
(table `<section>`, key `<field>`), else it is the default. The environment wins over the file. Every bad value and
every unknown name in a section is reported, together, in one `SettingsError`.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"
SECRET_MASK = "(hidden)"  # noqa: S105 - what is shown instead of one

T = TypeVar("T")


class SettingsError(ValueError):
    """One or more settings are wrong; `problems` holds a sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word that argparse uses too
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is read from the environment or the file.

    Args:
        default: value when neither says anything; of the field's type, or None.
        help: one line: meaning and unit.
        minimum: smallest number allowed.
        maximum: largest number allowed.
        choices: the only words allowed.
        secret: whether `describe` hides the value.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "secret": secret,
        "setting": True,
    }
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], environ: Mapping[str, str], section: str = "") -> T:
    """An instance of `cls` from the environment and the file that it names.

    Raises:
        SettingsError: naming every variable or key at fault.
    """
    problems: list[str] = []
    tables = _read_file(environ.get(CONFIG_VARIABLE), problems)
    known: set[str] = set()
    value = _load(cls, environ, tables, section, problems, known)
    _report_unknown(environ, tables, known, problems)
    if problems:
        raise SettingsError(problems)
    return typing.cast("T", value)


def describe(settings: Any, section: str = "") -> dict[str, str]:
    """Every setting in force by variable name, secrets hidden."""
    result: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            result.update(describe(value, _section_of(type(value), section)))
        else:
            shown = SECRET_MASK if field.metadata.get("secret") and value else str(value)
            result[variable_name(section, field.name)] = shown
    return result


def variable_name(section: str, field: str) -> str:
    """Name of the environment variable of a field: `HEADRACE_ENGINE_KV_BLOCKS`."""
    return PREFIX + "_".join(part for part in (section, field) if part).upper()


def _section_of(cls: Any, inherited: str) -> str:
    return str(getattr(cls, "SECTION", inherited))


def _read_file(path: str | None, problems: list[str]) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{CONFIG_VARIABLE}={path}: cannot be read ({error.strerror})")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{CONFIG_VARIABLE}={path}: is not TOML ({error})")
    return {}


def _load(
    cls: type,
    environ: Mapping[str, str],
    tables: dict[str, Any],
    section: str,
    problems: list[str],
    known: set[str],
    default: Any = None,
) -> Any:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            inner = typing.cast("type", kind)
            base = field.default if dataclasses.is_dataclass(field.default) else None
            values[field.name] = _load(inner, environ, tables, _section_of(inner, section), problems, known, base)
            continue
        name = variable_name(section, field.name)
        known.add(name)
        table = tables.get(section.lower(), {}) if section else tables
        raw = environ.get(name)
        if raw is None and isinstance(table, dict) and not isinstance(table.get(field.name), dict):
            raw = table.get(field.name)
        if raw is None or (raw == "" and field.default in (None, "")):
            continue
        try:
            values[field.name] = _parse(kind, raw, field.metadata)
        except ValueError as error:
            problems.append(f"{name}={raw!r}: {error}")
    try:
        return dataclasses.replace(default, **values) if default is not None else cls(**values)
    except ValueError as error:  # __post_init__ compares fields
        problems.append(str(error))
        return None


def _report_unknown(environ: Mapping[str, str], tables: dict[str, Any], known: set[str], problems: list[str]) -> None:
    """Names that no field has, in the sections that this process owns: a typing error must not be silent."""
    sections = {name.removeprefix(PREFIX).split("_")[0] for name in known}
    for name in sorted(environ):
        word = name.removeprefix(PREFIX).split("_")[0]
        if name.startswith(PREFIX) and name not in known and word in sections and "_" in name[len(PREFIX) :]:
            problems.append(f"{name}: no such setting")
    for section, table in tables.items():
        if isinstance(table, dict) and section.upper() in sections:
            problems += [
                f"[{section}] {key} in {environ[CONFIG_VARIABLE]}: no such setting"
                for key in table
                if variable_name(section, key) not in known
            ]


def _parse(kind: Any, raw: Any, metadata: Mapping[str, Any]) -> Any:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(a for a in arguments if a is not type(None))
        arguments = typing.get_args(kind)
    if kind is bool:
        return _parse_bool(raw)
    if kind in (int, float):
        return _parse_number(kind, raw, metadata)
    if typing.get_origin(kind) is tuple:
        items = raw if isinstance(raw, list) else [part.strip() for part in str(raw).split(",")]
        return tuple(str(item) for item in items if str(item))
    text = str(raw)
    choices = metadata.get("choices")
    if choices and text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return Path(text) if kind is Path else text


def _parse_bool(raw: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    try:
        return words[str(raw).lower()]
    except KeyError:
        raise ValueError("expected true or false") from None


def _parse_number(kind: type, raw: Any, metadata: Mapping[str, Any]) -> Any:
    minimum, maximum = metadata.get("minimum"), metadata.get("maximum")
    wanted = "a whole number" if kind is int else "a number"
    if minimum is not None and maximum is not None:
        wanted += f" from {minimum} to {maximum}"
    elif minimum is not None:
        wanted += f" of at least {minimum}"
    try:
        number = kind(raw)
    except (TypeError, ValueError):
        raise ValueError(f"expected {wanted}") from None
    too_small = minimum is not None and not number >= minimum
    too_large = maximum is not None and not number <= maximum
    if too_small or too_large or number != number:
        raise ValueError(f"expected {wanted}")
    return number
