"""The model's chat template: messages in, one string out.

Knows no tokens. Which of the string's control tokens the template wrote, and which a caller did, is `chat.py`'s
business.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from services.tokenizer.inputs import TemplateError, Turn
from services.tokenizer.template_guard import Allowance, GuardedEnvironment, LimitExceeded

_MAX_MESSAGE_CHARACTERS = 500


class ChatTemplate:
    """One compiled template. Thread-safe; rendering blocks, so call it off the event loop.

    Args:
        source: the template's text.
        named_tokens: "bos_token" and the like, which templates write.
        max_characters: that a rendering may produce, intermediate results included (each counts).
        max_lines: Python lines that it may run.
        max_cpu_s: processor seconds of the rendering thread.

    Raises:
        ValueError: the source is no valid template; the message is Jinja's.
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        *,
        max_characters: int = 16_000_000,
        max_lines: int = 2_000_000,
        max_cpu_s: float = 1.0,
    ) -> None:
        self._limits = (max_lines, int(max_cpu_s * 1e9), max_characters)
        self._named_tokens = dict(named_tokens)
        self._environment = GuardedEnvironment()
        self._environment.filters["tojson"] = _to_json
        self._environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        try:
            source.encode()
            self._template = self._environment.from_string(source)
        except UnicodeEncodeError:
            raise ValueError("the chat template holds surrogates, which are no characters") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not valid Jinja ({error})") from error

    @classmethod
    def load(cls, directory: Path, named_tokens: Mapping[str, str], **limits: Any) -> "ChatTemplate | None":
        """Read `chat_template.jinja`, else tokenizer_config.json's `chat_template`; None if there is neither.

        Raises:
            ValueError: the template is not valid; the message names the file.
        """
        file = directory / "chat_template.jinja"
        try:
            if file.exists():
                source: object = file.read_text(encoding="utf-8")
            else:
                file = directory / "tokenizer_config.json"
                source = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.exists() else None
            if isinstance(source, list):  # several, by name
                source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
            if source is None:
                return None
            if not isinstance(source, str):
                raise ValueError("the chat template is not text")
            return cls(source, named_tokens, **limits)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} has no usable chat template: {error}") from error

    def render(self, turns: Sequence[Turn], add_generation_prompt: bool = True) -> str:
        """Render a conversation.

        Raises:
            TemplateError: the template raised (its own message), failed, or went over a limit.
        """
        variables = {
            **self._named_tokens,
            "messages": [{"role": turn.role, "content": turn.text} for turn in turns],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            with self._environment.allowance(Allowance(*self._limits)):
                return self._template.render(variables)
        except (jinja2.TemplateError, LimitExceeded) as error:
            raise TemplateError(str(error)[:_MAX_MESSAGE_CHARACTERS], field="messages") from error
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            reason = f"the chat template failed ({type(error).__name__})"
            raise TemplateError(reason, field="messages") from error


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
