"""Settings: environment over file over default; everything bad is reported at once, by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.common import settings
from services.common.settings import SettingsError, setting


@dataclass(frozen=True)
class Inner:
    SECTION = "SHARED"
    ratio: float = setting(0.5, "a share", minimum=0.0, maximum=1.0)
    secret_key: str = setting("", "a secret", secret=True)


@dataclass(frozen=True)
class Own:
    port: int = setting(1, "a port", minimum=0, maximum=65535)
    blocks: int | None = setting(None, "a count", minimum=1)
    words: tuple[str, ...] = setting(("a",), "words")
    kind: str = setting("x", "a kind", choices=("x", "y"))
    flag: bool = setting(False, "a flag")


@dataclass(frozen=True)
class All:
    own: Own = Own(port=7)
    inner: Inner = Inner()


def load(environ):
    return settings.load(All, environ, "demo")


def test_defaults():
    """Nothing said: the defaults, those of the composing class first."""
    assert load({}) == All()
    assert load({}).own.port == 7


def test_environment_of_every_kind():
    """Each type is parsed; a section of its own has its own prefix."""
    loaded = load(
        {
            "HEADRACE_DEMO_PORT": "80",
            "HEADRACE_DEMO_BLOCKS": "9",
            "HEADRACE_DEMO_WORDS": "a, b,c",
            "HEADRACE_DEMO_KIND": "y",
            "HEADRACE_DEMO_FLAG": "true",
            "HEADRACE_SHARED_RATIO": "0.25",
        }
    )
    assert loaded == All(Own(80, 9, ("a", "b", "c"), "y", True), Inner(0.25))


def test_the_environment_wins_over_the_file(tmp_path):
    """A TOML table a section; the environment wins."""
    path = tmp_path / "headrace.toml"
    path.write_text('[demo]\nport = 80\nwords = ["p", "q"]\n[shared]\nratio = 0.1\n', encoding="utf-8")
    loaded = load({"HEADRACE_CONFIG": str(path), "HEADRACE_DEMO_PORT": "81"})
    assert (loaded.own.port, loaded.own.words, loaded.inner.ratio) == (81, ("p", "q"), 0.1)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("HEADRACE_DEMO_PORT", "eighty", "a whole number from 0 to 65535"),
        ("HEADRACE_DEMO_PORT", "65536", "a whole number from 0 to 65535"),
        ("HEADRACE_DEMO_PORT", "1.5", "a whole number from 0 to 65535"),
        ("HEADRACE_DEMO_BLOCKS", "0", "a whole number of at least 1"),
        ("HEADRACE_DEMO_KIND", "z", "expected one of x, y"),
        ("HEADRACE_DEMO_FLAG", "maybe", "expected true or false"),
        ("HEADRACE_SHARED_RATIO", "nan", "a number from 0.0 to 1.0"),
        ("HEADRACE_SHARED_RATIO", "", "a number from 0.0 to 1.0"),
        ("HEADRACE_DEMO_PRT", "80", "no such setting"),
    ],
)
def test_a_bad_value_is_named(name, value, wanted):
    """The variable, the value and what was expected."""
    with pytest.raises(SettingsError) as caught:
        load({name: value})
    assert name in str(caught.value)
    assert wanted in str(caught.value)


def test_all_bad_values_at_once(tmp_path):
    """One report, not one a start."""
    path = tmp_path / "headrace.toml"
    path.write_text("[demo]\nkind = 'z'\ncolour = 1\n", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load({"HEADRACE_CONFIG": str(path), "HEADRACE_DEMO_PORT": "x", "HEADRACE_SHARED_RATIO": "2"})
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("content", [b"[demo", b"\xff"])
def test_a_broken_file_is_named(tmp_path, content):
    """A file that is no TOML, or no text."""
    path = tmp_path / "headrace.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="HEADRACE_CONFIG"):
        load({"HEADRACE_CONFIG": str(path)})


def test_a_missing_file_is_named(tmp_path):
    """A file that cannot be read."""
    with pytest.raises(SettingsError, match="cannot be read"):
        load({"HEADRACE_CONFIG": str(tmp_path / "none.toml")})


def test_other_processes_variables_are_not_judged():
    """One environment serves four processes: another section's names are that section's affair."""
    assert load({"HEADRACE_ENGINE_NONSENSE": "1", "HEADRACE_CACHE": "/x"}) == All()


def test_describe_hides_secrets():
    """Every setting in force by name; a secret never shows."""
    described = settings.describe(load({"HEADRACE_SHARED_SECRET_KEY": "hunter2"}), "demo")
    assert described["HEADRACE_DEMO_PORT"] == "7"
    assert described["HEADRACE_SHARED_SECRET_KEY"] == settings.SECRET_MASK
    assert "hunter2" not in str(described)
