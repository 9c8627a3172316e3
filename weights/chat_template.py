"""A model's chat template: Jinja source, run in a sandbox.

The environment is the one that published templates are written for: blocks trimmed, `break` and `continue`,
`raise_exception`, `strftime_now`, a `tojson` that leaves HTML characters alone, and `{% generation %}` as a no-op.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


class ChatTemplate:
    """A compiled template.

    Raises:
        ValueError: the source is not a Jinja template; the message carries the line.
    """

    def __init__(self, source: str) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: `{"role": str, "content": str | [{"type": "text", "text": str}, ...]}` each; text parts are joined
                by newlines. Other keys (`name`, `tool_calls`, ...) reach the template as they are; a message with
                `tool_calls` needs no content.
            add_generation_prompt: end with the opening of an assistant's turn.
            variables: further names for the template, such as `bos_token`, `tools` or `date_string`.

        Raises:
            ValueError: a message of another form, or whatever the template raises.
        """
        context = {"tools": None, "documents": None, **variables}
        context |= {"messages": _checked_messages(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._template.render(context))
        except Exception as error:  # a template is a program of unknown origin and may fail in any way
            raise ValueError(f"the chat template failed: {error or type(error).__name__}") from error


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it is plain."""

        tags = {"generation"}  # noqa: RUF012 (an override of a set that jinja2 declares this way)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {messages!r}")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{index}] must be an object with role and content, not {message!r}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{index}] needs a role, a string such as 'user'; it has {role!r}")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return dict(message)
    if isinstance(content, Sequence) and content and all(map(_is_text_part, content)):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    raise ValueError(
        f"messages[{index}] ({role}) needs a content that is a string or a list of "
        f"{{'type': 'text', 'text': ...}} parts; it has {content!r}"
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
