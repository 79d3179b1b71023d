"""Chat templates: messages in, prompt text out. May import jinja2, `errors` and `text.template_sandbox`.

Renders what transformers' `apply_chat_template` renders. Whatever goes wrong in a template is a `RequestError`
(code template_error) with the template's own message; nothing else escapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import Template, nodes

from pagedcli.errors import RequestError
from pagedcli.text.template_sandbox import ChatEnvironment

# What a template can raise, besides TemplateError, when it meets data that it was not written for.
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
MAX_DEPTH = 64
# Marks the end of the message to be continued; its trailing space shows whether the template trims.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class ChatTemplates:
    """The templates of one model and the special tokens that they may name.

    Args:
        sources: Template texts by name; the usual one is called "default".
        special_tokens: Names such as `bos_token` with their texts, visible to every template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = ChatEnvironment()
        self._compile = lru_cache(maxsize=16)(self._compile_uncached)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: Role and content of each message; content is text or a list of text parts.
            template: Name of one of the model's templates, or the text of another one.
            tools: JSON schemas of tools, handed to the template.
            documents: Documents, handed to the template.
            add_generation_prompt: Whether the prompt ends where the assistant begins to speak.
            continue_final_message: Leave the last message open; text: the field of it that is continued.
            variables: Further names for the template, such as `reasoning_effort`.
        """
        source = self._choose(template, has_tools=bool(tools))
        compiled, takes_parts = self._compile(source)
        chat = [
            _plain_message(message, index, takes_parts) for index, message in enumerate(_listed(messages))
        ]
        field = "content" if continue_final_message is True else continue_final_message
        if field:
            _refuse(
                add_generation_prompt,
                "continue_final_message leaves no room for add_generation_prompt: give one",
            )
            final = _mark_end(chat[-1], field, source)
        given = {**self._special_tokens, **plain(variables, "chat_template_kwargs")}
        given |= {
            "messages": chat,
            "tools": plain(tools, "tools"),
            "documents": plain(documents, "documents"),
        }
        text = self._run(compiled, {**given, "add_generation_prompt": add_generation_prompt})
        return _cut_at_mark(text, final) if field else text

    def _choose(self, template: str | None, *, has_tools: bool) -> str:
        if template is not None:
            return self.sources.get(template, template)
        for name in (["tool_use"] if has_tools else []) + ["default"]:
            if name in self.sources:
                return self.sources[name]
        if self.sources:
            names = ", ".join(sorted(self.sources))
            message = f"the model has chat templates named {names}, none of them default: name one"
            raise RequestError(message, code="no_template")
        raise RequestError(
            "the model has no chat template: send a prompt instead of messages, or give a template "
            "(--set model.chat_template=FILE)",
            code="no_template",
            field="messages",
        )

    def _compile_uncached(self, source: str) -> tuple[Template, bool]:
        """The compiled template, and whether it goes through the parts of a message's content itself."""
        try:
            return self._environment.from_string(source), _iterates_content(self._environment.parse(source))
        except TEMPLATE_FAULTS as error:
            where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise _template_error(f"the chat template does not compile{where}: {error}") from error

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        self._environment.start_clock()
        try:
            return template.render(variables)
        except jinja2.UndefinedError as error:
            raise _template_error(f"the chat template uses what is not there: {error}") from error
        except jinja2.TemplateError as error:
            raise _template_error(str(error) or type(error).__name__) from error
        except TEMPLATE_FAULTS as error:
            raise _template_error(f"the chat template failed: {type(error).__name__}: {error}") from error


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types, so that a template meets no object with methods of its own."""
    _refuse(depth > MAX_DEPTH, f"{field} is nested more than {MAX_DEPTH} deep", field)
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {plain(key, field, depth + 1): plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, field, depth + 1) for item in value]
    raise _invalid(f"{field} holds a {type(value).__name__}: only JSON values can be used", field)


def _listed(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    ok = isinstance(messages, (list, tuple)) and len(messages) > 0
    _refuse(not ok, "messages must be a list of at least one message")
    return messages


def _plain_message(message: Any, index: int, takes_parts: bool) -> Message:
    """One message as templates expect it: fields that are None left out, reasoning under every name it goes by."""
    where = f"messages[{index}]"
    _refuse(not isinstance(message, Mapping), f"{where} is a {type(message).__name__}: it must be an object")
    _refuse(
        not isinstance(message.get("role"), str), f"{where} has no role: give system, user, assistant or tool"
    )
    copy = {key: item for key, item in plain(message, where).items() if item is not None}
    if "content" in copy:
        copy["content"] = _plain_content(copy["content"], where, takes_parts)
    reasoning = next((copy[name] for name in REASONING_FIELDS if name in copy), None)
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _plain_content(content: Any, where: str, takes_parts: bool) -> str | list[Any]:
    if isinstance(content, str):
        return content
    _refuse(not isinstance(content, list), f"{where}.content must be text or a list of parts")
    texts = [_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return content if takes_parts else "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    _refuse(kind != "text", f"{where} is of type {kind!r}: this engine takes text parts only")
    _refuse(not isinstance(part.get("text"), str), f"{where} has no text")
    return str(part["text"])


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether some loop goes over a message's content, named directly or through a variable set from it."""
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _mentions_content(node.node, frozenset())
    }
    return any(_mentions_content(node.iter, frozenset(names)) for node in tree.find_all(nodes.For))


def _mentions_content(node: nodes.Node, names: frozenset[str]) -> bool:
    """Whether an expression is `x.content`, `x["content"]` or a known name, possibly filtered or sliced."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        is_content = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return is_content or (isinstance(node.arg, nodes.Slice) and _mentions_content(node.node, names))
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _mentions_content(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


def _mark_end(message: Message, field: str, source: str) -> str:
    """Put the mark behind the text that is to be continued; returns that text."""
    fields = [field]
    if field in REASONING_FIELDS:
        fields = [name for name in REASONING_FIELDS if message.get(name) == message.get(field)]
    known = any(name in source for name in fields)
    _refuse(not known, f"continue_final_message: the chat template does not use {field}")
    value = message.get(field)
    part = value[-1] if isinstance(value, list) and value else None
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        text = str(part["text"])
        part["text"] = text + CONTINUE_TAG
        return text
    if not isinstance(value, str):
        raise _invalid(f"continue_final_message: the last message has no text in {field}")
    message.update(dict.fromkeys(fields, value + CONTINUE_TAG))
    return value


def _cut_at_mark(text: str, final: str) -> str:
    mark = CONTINUE_TAG.strip()
    if final.strip() not in text or mark not in text:
        raise _template_error(
            "continue_final_message: the chat template changes or leaves out the last message"
        )
    end = text.rindex(mark)
    return text[:end] if text[end:].startswith(CONTINUE_TAG) else text[:end].rstrip()


def _refuse(condition: bool, message: str, field: str = "messages") -> None:
    if condition:
        raise _invalid(message, field)


def _invalid(message: str, field: str = "messages") -> RequestError:
    return RequestError(message, code="invalid_value", field=field)


def _template_error(message: str) -> RequestError:
    return RequestError(" ".join(message.split()), code="template_error", field="messages")
