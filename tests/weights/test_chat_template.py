"""Chat templates render as in transformers, whose environment they are written for, and fail as ValueError."""

import re
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ostinato.weights.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  <b>1 & 2</b> \n"},
    {"role": "assistant", "content": "Ünïcödé ✓"},
    {"role": "user", "content": "{{ messages }}"},
]
TEMPLATES = {
    "chatml": CHATML,
    "trimmed-blocks": "{% for m in messages %}\n    {% if loop.first %}\n  first\n    {% endif %}\n"
    "{{ m.role }}\n{% endfor %}\n",
    "loop-controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.index == 4 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ messages[0] | tojson(separators=(',', ':')) }}",
    "tojson-ascii-sorted": "{{ messages | tojson(ensure_ascii=true, sort_keys=true) }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}\n{% set x = 2 %}{{ m.content }}\n"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro say(m) %}[{{ m.role | upper }}] {{ m.content | trim }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "absent-tools": "{% if tools is defined and tools is none and documents is none %}none{% endif %}",
    "undefined": "[{{ no_such_name }}]{{ 'given' if no_such_name is defined else 'absent' }}",
    "slices-and-tests": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{{ rest | length }}{{ rest[-1].content is string }}{{ rest[0] is mapping }}"
    "{{ rest is iterable }}{{ rest is not none }}{{ 'x' if rest is sequence else 'y' }}",
    "neighbours": "{% for m in messages %}{% if loop.previtem and loop.previtem.role != m.role %}|{% endif %}"
    "{{ loop.index0 }}{{ loop.last }}{{ loop.nextitem.role if loop.nextitem is defined }}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | list | join(',') }}{{ [3, 1] | sort | first }}{{ '7' | int + 1 }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a  b' | replace('  ', '-') | title }}"
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for k, v in messages[0] | items %}{{ k }}{% endfor %}",
    "whitespace": "{%- for m in messages -%}\n  {{- m.role }}\n"
    "  {%- if not loop.last %}\n,\n{%- endif -%}\n{%- endfor %}\n\n",
    "loop-else-and-recursion": "{% for m in [] %}x{% else %}none{% endfor %}{% for n in [1, [2, [3]]] recursive %}"
    "{% if n is iterable %}{{ loop(n) }}{% else %}{{ n }}{% endif %}{% endfor %}",
    "html-stays": "{{ '<a href=\"x\">&' }}{{ '<&>' | tojson }}{{ {'é': none, 'b': [true, 1.5]} | tojson(indent=4) }}",
    "ends-with-newline": "{{ messages[0].content }}\n",
    "call-block": "{% macro wrap() %}[{{ caller() }}]{% endmacro %}{% call wrap() %}{{ bos_token }}{% endcall %}",
    "variables-of-a-call": "{{ enable_thinking is defined }}{{ add_generation_prompt }}{{ eos_token | default('no') }}",
    "strings": "{{ messages[1].content.strip().split('&')[0] }}{{ 'a,b'.split(',') | join('|') }}",
}


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompt", "no-prompt"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    [expected], _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    rendered = ChatTemplate(source).render(MESSAGES, add_generation_prompt=add_generation_prompt, bos_token="<s>")
    assert rendered == expected


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ date_string }}{{ tools[0].name }}")
    rendered = template.render(MESSAGES, bos_token="<s>", date_string="1 May", tools=[{"name": "clock"}])
    assert rendered == "<s>1 Mayclock"


def test_strftime_now_tells_the_date() -> None:
    before = datetime.now().strftime("%d %b %Y")
    rendered = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(MESSAGES)
    assert rendered in (before, datetime.now().strftime("%d %b %Y"))


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "here"}]
    rendered = ChatTemplate(CHATML).render([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert rendered == "<|im_start|>user\nLook:\nhere<|im_end|>\n"


def test_a_call_of_a_tool_needs_no_content() -> None:
    messages = [{"role": "assistant", "tool_calls": [{"name": "clock"}]}, {"role": "tool", "content": "12:00"}]
    rendered = ChatTemplate("{% for m in messages %}{{ m.content or m.tool_calls[0].name }};{% endfor %}")
    assert rendered.render(messages) == "clock;12:00;"


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(CHATML).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


BAD_MESSAGES: dict[str, Any] = {
    "text": ("hello", "'hello'"),
    "one-message": ({"role": "user", "content": "a"}, "list"),
    "none-at-all": ([], "at least one"),
    "message-is-text": (["hello"], r"messages\[0\].*'hello'"),
    "no-role": ([{"content": "a"}], r"messages\[0\] needs a role"),
    "role-is-number": ([{"role": 1, "content": "a"}], r"messages\[0\] needs a role.*1"),
    "empty-role": ([{"role": "", "content": "a"}], "needs a role"),
    "no-content": ([MESSAGES[0], {"role": "user"}], r"messages\[1\] \(user\) needs a content.*None"),
    "content-is-number": ([{"role": "user", "content": 5}], "it has 5"),
    "no-parts": ([{"role": "user", "content": []}], "needs a content"),
    "image": ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "image"),
    "part-without-text": ([{"role": "user", "content": [{"type": "text"}]}], "needs a content"),
}


@pytest.mark.parametrize(("messages", "complaint"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_senseless_messages_are_refused(messages: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate(CHATML).render(messages)


BAD_TEMPLATES = {
    "raises": ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
    "adds-text-to-none": ("{{ 'a' + none }}", "chat template failed"),
    "divides-by-zero": ("{{ 1 // 0 }}", "division"),
    "never-ends": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "reaches-into-python": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe|no attribute|undefined"),
    "changes-messages": ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    "opens-files": ("{{ open('/etc/hostname').read() }}", "undefined"),
    "includes": ("{% include 'other' %}", "chat template failed"),
    "huge-range": ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
}


@pytest.mark.parametrize(("source", "complaint"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_whatever_a_template_does_is_a_value_error(source: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.compile(complaint, re.IGNORECASE)):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", ["a\n{% if x %}", "a\n{{ 'x' }", "a\n{% unknown %}"], ids=["open", "brace", "tag"])
def test_a_broken_template_names_the_line(source: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate(source)
