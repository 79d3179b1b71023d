"""Chat templates against transformers' `apply_chat_template`, and what a bad template or message gives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.errors import RequestError
from pagedcli.text import template_sandbox
from pagedcli.text.chat import ChatTemplates
from pagedcli.text.tokenizer import Tokenizer
from tests.text_vocabularies import byte_level, write_folder

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INDENTED = """{{ bos_token }}
{%- set ns = namespace(found=false, count=0) %}
{% for message in messages %}
    {%- if message.role == 'user' %}
        {% set ns.count = ns.count + 1 %}
        {%- set ns.found = true -%}
    [INST] {{ message.content | trim }} [/INST]
    {%- elif message.role == 'assistant' %}
        {%- generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('only user and assistant, not ' + message.role) }}
    {%- endif %}
    {%- if ns.count > 90 %}{% break %}{% endif %}
{% endfor %}
{%- if not ns.found %}none{% endif %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ documents | tojson }}
{%- macro wrap(text, sign='*') %}{{ sign }}{{ text | upper }}{{ sign }}{% endmacro %}
{{ wrap('x' ~ 1 ~ none ~ missing) }} {{ effort | default('low') }} {{ unk_token is defined }}
{%- for m in messages %}{{ m.content.replace('u', '__').strip().ljust(9) }}{{ '-'.join(['a', 'b']) }}
{{- '{:>3}{x}'.format(1, x=2) }}{{ 'a\tb'.expandtabs(4).upper() }}{{ m.role.split('s') }}{% endfor %}
{%- for key, value in {'b': 1, 'a': 2} | dictsort %}{{ key }}={{ value }},{% endfor %}
{{ messages | map(attribute='role') | join('|') }} {{ messages[1:] | length }} {{ "%s-%03d" | format("a", 7) }}
{{ ("a" * 3 + "b").replace("a", "cc").center(12) }}|{{ "{:>5}".format(3) }}
{{ [1, 2] + [3] }}|{{ 7 % 4 }}|{{ 2 ** 8 }}
"""
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
REASONING = (
    "{% for m in messages %}{{ m.role }} {{ m.keys() | join(',') }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %};{% endfor %}"
)
# In the manner of Qwen 3 and Llama 3.1: backwards loops, thinking taken out of earlier turns, tools, a date.
THINKING = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}{{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}{{- date_string }}{{ loop is defined }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {
    "thinking": THINKING,
    "chatml": CHATML,
    "indented": INDENTED,
    "parts": PARTS,
    "reasoning": REASONING,
}
USER = {"role": "user", "content": ' What\'s "up"?\n<b>é中🎉 '}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, {"role": "assistant", "content": "Not much.  "}, {"role": "user", "content": ""}],
    [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nx"},
        USER,
        {"role": "assistant", "content": "<think>a"},
    ],
    [{**USER, "name": None}, {"role": "assistant", "content": "hm", "reasoning": "why"}],
    [
        USER,
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{"function": {"name": "f", "arguments": {"ä": 1}}}],
        },
    ],
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(_folder(tmp_path_factory.mktemp("chat")))


def _folder(path: Path) -> Path:
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return write_folder(path, byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast", **named})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "é", "x": [1, None, True]}}], "effort": "high"},
        {"enable_thinking": False, "date_string": "today"},
        {"documents": [{"title": "t", "text": "<x>"}]},
    ],
)
def test_renders_what_transformers_renders(
    name: str, chat: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer, oracle: Any
) -> None:
    settings_ = {"add_generation_prompt": True, **options}
    expected = oracle.apply_chat_template(chat, chat_template=TEMPLATES[name], tokenize=False, **settings_)
    assert tokenizer.apply_chat_template(chat, template=TEMPLATES[name], **settings_) == expected


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_any_text_is_rendered_as_transformers_does(
    tokenizer: Tokenizer, oracle: Any, texts: list[str]
) -> None:
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    for template in (CHATML, INDENTED):
        expected = oracle.apply_chat_template(chat, chat_template=template, tokenize=False)
        assert tokenizer.apply_chat_template(chat, template=template, add_generation_prompt=False) == expected


TRIMMING = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<end>{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, TRIMMING, REASONING])
@pytest.mark.parametrize("content", ["The answer is", "ends with space ", " x"])
def test_the_last_message_is_continued_as_transformers_does(
    template: str, content: str, tokenizer: Tokenizer, oracle: Any
) -> None:
    chat = [USER, {"role": "assistant", "content": content, "reasoning_content": "so"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = oracle.apply_chat_template(chat, chat_template=template, tokenize=False, **options)
    assert tokenizer.apply_chat_template(chat, template=template, **options) == expected
    assert chat[-1]["content"] == content
    if template is REASONING:
        options["continue_final_message"] = "reasoning_content"
        expected = oracle.apply_chat_template(chat, chat_template=template, tokenize=False, **options)
        assert tokenizer.apply_chat_template(chat, template=template, **options) == expected


TWO_PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


def test_text_parts_are_passed_on_to_a_template_that_goes_through_them(
    tokenizer: Tokenizer, oracle: Any
) -> None:
    expected = oracle.apply_chat_template(TWO_PARTS, chat_template=PARTS, tokenize=False)
    assert tokenizer.apply_chat_template(TWO_PARTS, template=PARTS) == expected == "<user>[a][b]"
    through_a_name = (
        "{% for m in messages %}{% set c = m['content'] %}"
        "{% for p in c %}({{ p.text }}){% endfor %}{% endfor %}"
    )
    assert tokenizer.apply_chat_template(TWO_PARTS, template=through_a_name) == "(a)(b)"


def test_text_parts_are_joined_for_a_template_that_expects_text(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(TWO_PARTS, template=CHATML, add_generation_prompt=False)
    assert text.endswith("<|im_start|>user\na\nb<|im_end|>\n")


def refused(messages: Any, template: str = CHATML, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ChatTemplates({"default": template}, {}).render(messages, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages[0].content[0] is of type 'image_url'",
        ),
        (
            [USER, {"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[1].content[0] is of type 'input_audio'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] has no text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] is of type 'str'"),
        ([{"role": "user", "content": 5}], "messages[0].content must be text"),
        ([{"content": "x"}], "messages[0] has no role"),
        ([{"role": 5}], "messages[0] has no role"),
        (["x"], "messages[0] is a str"),
        ([], "at least one message"),
        ("hello", "at least one message"),
        (None, "at least one message"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0] holds a object"),
    ],
)
def test_messages_that_are_not_messages_are_refused_by_name(messages: Any, says: str) -> None:
    error = refused(messages)
    assert says in str(error)
    assert error.code == "invalid_value"


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert "nested" in str(refused([{"role": "user", "content": "x", "deep": deep}]))


def test_without_a_template_the_error_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        ChatTemplates({}, {}).render([USER])
    assert caught.value.code == "no_template"
    with pytest.raises(RequestError, match="named rag, tool_use, none of them default"):
        ChatTemplates({"tool_use": "x", "rag": "y"}, {}).render([USER])


FAULTS = {
    "{{ raise_exception('Conversation roles must alternate') }}": "Conversation roles must alternate",
    "{{ raise_exception() }}": "raise_exception",
    "{{ messages[0].a.b }}": "uses what is not there",
    "{{ messages[7].role }}": "uses what is not there",
    "{{ nothing() }}": "uses what is not there",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'a' + 1 }}": "TypeError",
    "{{ missing | tojson }}": "TypeError",
    "{{ 'x' | int | nofilter }}": "nofilter",
    "{% if %}": "does not compile at line 1",
    "{% for %}": "does not compile",
    "{{ 'a": "does not compile",
    "{% include 'x' %}": "failed",
    "{{ strftime_now(5) }}": "TypeError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ messages[0].update({'a': 1}) }}": "unsafe",
    "{% set ns = namespace(_x=1) %}": "_x",
    "{% set ns = namespace() %}{% set ns._y = 1 %}": "_y",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
}


@pytest.mark.parametrize("template", FAULTS)
def test_a_template_that_fails_gives_one_line_and_never_a_traceback(template: str) -> None:
    error = refused([USER], template)
    assert FAULTS[template].lower() in str(error).lower()
    assert error.code == "template_error"


@pytest.mark.parametrize("template", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"])
def test_what_the_sandbox_hides_is_nothing(template: str) -> None:
    assert ChatTemplates({"default": template}, {}).render([USER]) == ""


BOMBS = [
    "{{ range(10 ** 9) | list | length }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set r = range(99999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 'x'.ljust(10 ** 9) }}",
    "{{ 'x' | center(10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a\tb'.expandtabs(10 ** 9) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('b' * 100000).join('a' * 100000) }}",
    "{{ ('a' * 100000) | join('b' * 100000) }}",
    "{{ [1] | batch(10 ** 9, 0) | list }}",
    "{{ [1] | slice(10 ** 9) | list }}",
    "{{ [1] | tojson(indent=10 ** 9) }}",
    "{{ ('\n' * 100000) | indent(99999) }}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    (
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = t %}{% endfor %}"
    ),
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "{{ 'abc'.translate({97: 'x' * 16000000}) }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_cannot_take_the_machines_time_or_memory(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    begin = time.thread_time()
    error = refused([USER], template)
    assert error.code == "template_error"
    assert "MemoryError" not in str(error)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("template", [bomb for bomb in BOMBS if "endset" in bomb or "{{ s }}" in bomb])
def test_what_blocks_and_outputs_build_is_limited_in_size(template: str) -> None:
    assert "more than 16777216 characters" in str(refused([USER], template))


def test_a_long_conversation_is_no_bomb() -> None:
    chat = [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y" * 500}] * 500
    text = ChatTemplates({"default": CHATML}, {}).render(chat)
    assert text.count("<|im_start|>user") == 500


def test_the_date_is_todays() -> None:
    from datetime import datetime

    days = {datetime.now().strftime("%d %b %Y")}
    text = ChatTemplates({"default": "{{ strftime_now('%d %b %Y') }}"}, {}).render([USER])
    assert text in days | {datetime.now().strftime("%d %b %Y")}
