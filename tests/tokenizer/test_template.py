"""Templates render as the usual environment does, and can neither escape nor run nor grow without end."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.inputs import TemplateError, Turn
from services.tokenizer.template import ChatTemplate
from tests.tokenizer.tiny import STRICT, template

HI = [Turn("user", "hi")]


def render(source: str, turns: list[Turn] | None = None, **limits: Any) -> str:
    return template(source, **limits).render(turns or HI)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),  # trim_blocks
        ("  {% if true %}x{% endif %}", "x"),  # lstrip_blocks
        ("{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ m['role'] ~ 1 }}{% endfor %}", "TrueTrueuser1"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% set ns = namespace(x='') %}{% for i in range(3) %}{% set ns.x = ns.x ~ i %}{% endfor %}{{ ns.x }}", "012"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) ~ m('a') }}", "[1][a]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x + x }}", "a1a1"),
        ("{{ 'a-b'.split('-') | join('+') }}{{ 'aXa'.replace('a', 'b') }}{{ ' x '.strip() }}", "a+bbXbx"),
        ("{{ 3 * 'ab' }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%s!' % 'x' }}{{ [1] + [2] }}", "ababab10243x![1, 2]"),
        ("{{ messages | length }}{{ 'x' if tools is none else 'y' }}{{ add_generation_prompt }}", "1xTrue"),
        ("{{ messages | map(attribute='content') | list | first | upper }}", "HI"),
    ],
)
def test_what_chat_templates_use_works(source: str, text: str) -> None:
    assert render(source) == text


def test_the_time_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_template_can_refuse_with_its_own_words() -> None:
    with pytest.raises(TemplateError, match=r"^Conversation roles must alternate") as caught:
        render(STRICT, [*HI, *HI])
    assert caught.value.field == "messages"
    with pytest.raises(TemplateError, match=r"^Only user and assistant roles are supported!$"):
        render(STRICT, [Turn("user", "hi"), Turn("tool", "42")])
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('x' * 5000) }}")
    assert len(str(caught.value)) == 500


@pytest.mark.parametrize(
    "source",
    ["{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ messages[0].nope.nope }}", "{{ messages[0]() }}", "{{ [1][9].x }}"],
)
def test_a_template_that_fails_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__.x.y }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% set messages[0].content = 'x' %}",
        "{% include 'x' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
    ],
)
def test_a_template_cannot_reach_python_or_change_its_input(source: str) -> None:
    turns = [Turn("user", "hi")]
    with pytest.raises(ValueError):  # noqa: PT011 - when loaded or when rendered
        template(source).render(turns)
    assert turns == HI


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a long range": "{% for a in range(10**9) %}{% endfor %}",
    "a long list": "{{ range(99999) | list * 99999 }}",
    "multiplied": "{{ 'x' * 10**9 }}",
    "multiplied from the left": "{{ 10**9 * 'x' }}",
    "doubled with ~": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled with +": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled with set": "{% set s = 'x' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "replaced": "{% set s = 'x' * 9999 %}{{ s.replace('x', s).replace('x', s) }}",
    "replaced by filter": "{% set s = 'x' * 9999 %}{{ s | replace('x', s) | replace('x', s) }}",
    "joined": "{% set s = 'x' * 99999 %}{{ ([s] * 9999) | join }}",
    "joined by method": "{% set s = 'x' * 99999 %}{{ ''.join([s] * 9999) }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "multiplied numbers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "padded": "{{ 'x'.ljust(10**9) }}",
    "formatted": "{{ '{:1000000000}'.format(1) }}",
    "formatted with %": "{{ '%1000000000d' % 1 }}",
    "formatted by filter": "{{ '%1000000000d' | format(1) }}",
    "centred": "{{ 'x' | center(10**9) }}",
    "batches": "{{ [1] | batch(10**9, 'x') | list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "filters in loops": "{% for a in range(9999) %}{% set x = range(9999) | select('odd') | list %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_stopped(name: str) -> None:
    """Each ends with a template's error after about the processor time it is allowed, and little memory."""
    began_ns = time.thread_time_ns()
    with pytest.raises((TemplateError, ValueError)):
        render(BOMBS[name], max_cpu_s=0.2, max_characters=1_000_000)
    assert time.thread_time_ns() - began_ns < 3e9


def test_limits_are_for_one_rendering_each() -> None:
    """What one rendering used is not missing to the next; a limit that was hit leaves nothing behind."""
    tight = template("{% for i in range(messages[0].content | int) %}x{% endfor %}", max_characters=100)
    for _ in range(5):
        assert tight.render([Turn("user", "60")]) == "x" * 60
        with pytest.raises(TemplateError, match="too much text"):
            tight.render([Turn("user", "101")])
    assert sys.gettrace() is not tight


def test_steps_are_limited_too() -> None:
    with pytest.raises(TemplateError, match="too many steps"):
        render(BOMBS["nested loops"], max_lines=1000, max_cpu_s=60)


def test_whatever_traced_the_thread_still_does() -> None:
    before = sys.gettrace()
    seen: list[str] = []

    def trace(_frame: object, event: str, _argument: object) -> None:
        seen.append(event)

    sys.settrace(trace)
    try:
        render("x")
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_content_is_data() -> None:
    for content in ("{{ 7*7 }}", "{% for x in range(9) %}", "{# no #}", "{{ ''.__class__ }}"):
        assert render("{{ messages[0].content }}", [Turn("user", content)]) == content


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{{ 1 | nofilter }}", "\ud800"])
def test_an_invalid_template_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ValueError, match="template"):
        template(source)


def test_where_templates_are_read_from(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one"}')
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render(HI) == "one"
    config.write_text('{"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "two"}]}')
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render(HI) == "two"
    config.write_text('{"chat_template": 3}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("{% bad")
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path, {})
