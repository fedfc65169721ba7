"""A Jinja environment in which a template can neither reach Python nor run or grow without end.

Templates come from a model's directory, never from a request; still they are code from elsewhere. Beside
Jinja's immutable sandbox, each rendering has an allowance of lines, processor time and characters. Knows
nothing of chats.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_INTEGER_ARGUMENT = 100_000
_MAX_INTEGER_BITS = 4096
_LINES_PER_CLOCK = 256
# each can build a huge string out of a small template in one step; no chat template needs them
_LEFT_OUT_FILTERS = ("center", "format", "indent", "pprint", "random", "urlize", "wordwrap", "xmlattr")
_LEFT_OUT_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"})
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")


class LimitExceeded(Exception):
    """A rendering used up its lines, its processor time or its characters."""


class Allowance:
    """What one rendering may still use; enforced by a trace function on the rendering thread."""

    def __init__(self, lines: int, cpu_ns: int, characters: int) -> None:
        self._lines = lines
        self._cpu_end_ns = time.thread_time_ns() + cpu_ns
        self._characters = characters

    def take_characters(self, count: int) -> None:
        """Count text (or list items) that a template builds, intermediate results included."""
        self._characters -= count
        if self._characters < 0:
            raise LimitExceeded("the chat template produced too much text")

    def trace(self, _frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        """Count a line that is run, in the template or in what it calls."""
        if event == "line":
            self._lines -= 1
            if self._lines < 0:
                raise LimitExceeded("the chat template ran too many steps")
            if self._lines % _LINES_PER_CLOCK == 0 and time.thread_time_ns() > self._cpu_end_ns:
                raise LimitExceeded("the chat template took too long")
        return self.trace


class _Generator(CodeGenerator):
    """Compiles `a ~ b` to a call of the environment, which counts."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Renders inside `allowance(...)` only; several threads may do so at once."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
        self._current = threading.local()
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)

    @contextmanager
    def allowance(self, allowance: Allowance) -> Iterator[None]:
        """Enforce an allowance on this thread; whatever traced the thread before does so again after."""
        before = sys.gettrace()
        self._current.allowance = allowance
        sys.settrace(allowance.trace)
        try:
            yield
        finally:
            sys.settrace(before)
            del self._current.allowance

    def _take(self, count: int) -> None:
        allowance: Allowance | None = getattr(self._current, "allowance", None)
        if allowance is not None:  # None: constants being folded while a template is compiled
            allowance.take_characters(count)

    def concat(self, parts: Iterable[str]) -> str:
        """Join like "".join; also what macros, set blocks and the whole rendering end in."""
        kept = []
        for part in parts:
            self._take(len(part))
            kept.append(part)
        return "".join(kept)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give `str.format` no special treatment, so that it is refused like its kin."""
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse string methods that build huge strings in one step."""
        if isinstance(obj, str) and attr in _LEFT_OUT_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result is small enough."""
        if operator == "+":
            self._take(_length(left) + _length(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if _length(sequence) and isinstance(count, int):
                    self._take(_length(sequence) * max(count, 0))
            _check_bits(operator, left, right)
        elif operator == "**":
            _check_bits(operator, left, right)
        elif isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format with a wide field is not allowed")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox allows, with arguments of sane size."""
        self._check_arguments(getattr(obj, "__name__", ""), (getattr(obj, "__self__", None), *args), kwargs)
        return super().call(context, obj, *args, **kwargs)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps the marks that tell Jinja to pass context or environment
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._check_arguments(name, args, kwargs)
            return function(*args, **kwargs)

        return guarded

    def _check_arguments(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > _MAX_INTEGER_ARGUMENT and name != "tojson":
                raise SecurityError(f"{name} was given the number {value.bit_length()} bits long; too large")
        texts = [value for value in args if isinstance(value, str)]
        if name == "replace" and len(texts) >= 3:
            self._take(texts[0].count(texts[1]) * len(texts[2]))
        elif name == "join":
            separator = max((len(text) for text in texts), default=0)
            for value in args:
                if isinstance(value, (list, tuple)):
                    self._take(sum(_length(item) + separator for item in value))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check_bits(operator: str, left: Any, right: Any) -> None:
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > _MAX_INTEGER_BITS:
        raise SecurityError(f"the result of {operator} would be too large")
