"""The jinja2 environment in which chat templates run. May import jinja2 and the standard library.

A template comes with a model and is not trusted: it can read what it is given and nothing else (jinja2's immutable
sandbox), and it cannot take the machine's time or memory: every loop round and every call looks at the processor time
used, every operation that can make something large is checked before it is done. A breach raises `SecurityError`.
What templates may use is what transformers gives them.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
MAX_CHARACTERS = 1 << 24
MAX_INDENT = 64
# Arguments that compiled templates add to calls in loops and blocks.
_OF_THE_COMPILER = ("_loop_vars", "_block_vars")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with transformers' template functions and with limits on time and size."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self._clock = threading.local()
        self.concat = _limited_concat  # type: ignore[method-assign]
        self.globals.pop("lipsum")
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _namespace,
        }
        self.filters |= {"tojson": _tojson, "format": self._format, "join": _join, "replace": _replace}
        self.filters |= {name: _with_small_numbers(name) for name in ("batch", "center", "indent", "slice")}

    def start_clock(self) -> None:
        """Begin to count the time of this thread's next rendering."""
        self._clock.end = time.thread_time() + MAX_SECONDS

    def tick(self) -> None:
        """Refuse to go on after `MAX_SECONDS` of processor time; called in every round of every loop."""
        if time.thread_time() > getattr(self._clock, "end", float("inf")):
            raise SecurityError(f"the template runs for more than {MAX_SECONDS:g} seconds")

    def concatenate(self, *parts: object) -> str:
        """The `~` operator."""
        return _limited_concat(map(str, parts))

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call that a template makes: look at the clock and at what string methods would build."""
        __self.tick()
        # The sandbox wraps str.format in a function of its own; the method itself is behind __wrapped__.
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        size = _STRING_METHODS.get(__obj.__name__) if isinstance(text, str) else None
        if size is not None:
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])  # a generator can be read only once
            given = {name: value for name, value in kwargs.items() if name not in _OF_THE_COMPILER}
            _check_size(size(text, *args, **given))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every arithmetic operation that can make something large."""
        _check_size(_SIZE_OF_RESULT[operator](left, right))
        return super().call_binop(context, operator, left, right)

    def _format(self, value: object, *args: Any, **kwargs: Any) -> str:
        _check_size(_modulo_size(str(value), kwargs or args))
        return str(value) % (kwargs or args)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limiter().visit(Parser(self, source, name, filename).parse())
        return tree


class _Limiter(NodeTransformer):
    """Puts a look at the clock into every loop, and the checked operation in the place of every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)
        call.set_lineno(node.lineno)
        return call

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.NSRef:  # noqa: N802
        _check_name(node.attr)
        return node


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's name for it)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Make the body a call block, as transformers does, so that names set inside stay inside."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_render"), [], [], body)
        block.set_lineno(lineno)
        return block

    def _render(self, caller: Macro) -> str:
        return str(caller())


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(
            f"the template builds a value of more than {MAX_CHARACTERS} characters or elements"
        )


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace of the template has the attribute {name!r}: it may not begin with _"
        )


def _limited_concat(parts: Iterable[str]) -> str:
    kept, size = [], 0
    for part in parts:
        size += len(part)
        _check_size(size)
        kept.append(part)
    return "".join(kept)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        _check_name(name)
    return Namespace(attributes)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError(f"tojson indents by {indent}: {MAX_INDENT} at most")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_eval_context
def _join(
    context: nodes.EvalContext, value: Iterable[Any], separator: str = "", attribute: Any = None
) -> str:
    items = list(value)
    _check_size(_join_size(separator, items))
    return str(FILTERS["join"](context, items, separator, attribute))


def _replace(value: object, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _check_size(_replace_size(text, old, new))
    return text.replace(old, new, count)


def _with_small_numbers(name: str) -> Callable[..., Any]:
    """A filter of jinja2 that takes numbers only up to the sandbox's limit for ranges, and no huge product."""
    filter_function = FILTERS[name]

    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        number = max((item for item in (*args, *kwargs.values()) if isinstance(item, int)), default=0)
        lines = value.count("\n") + 1 if isinstance(value, str) else 1
        _check_size(max(number * lines, 0 if number <= 100_000 else float("inf")))
        return filter_function(value, *args, **kwargs)

    return limited


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 64


def _plus_size(left: Any, right: Any) -> int:
    return _length(left) + _length(right)


def _times_size(left: Any, right: Any) -> float:
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        return len(left) * right
    if isinstance(right, (str, list, tuple)) and isinstance(left, int):
        return len(right) * left
    return 0


def _power_size(left: Any, right: Any) -> float:
    both = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() * right if both else 0


def _numbers(text: str) -> int:
    """The largest number written in a format string: it may be a width."""
    return max(
        (int(number) if len(number) < 10 else 1 << 40 for number in re.findall(r"\d+", text)), default=0
    )


def _arguments_size(arguments: Any) -> int:
    """Length of the longest argument of a format."""
    items = arguments.values() if isinstance(arguments, dict) else arguments
    return max(map(_length, items if isinstance(items, Iterable) else [items]), default=0)


def _modulo_size(left: Any, right: Any) -> float:
    if not isinstance(left, str):
        return 0
    if re.search(r"%[^A-Za-z%]*\*", left):
        raise SecurityError("the template formats with a width of *")
    return left.count("%") * (_numbers(left) + _arguments_size([right] if isinstance(right, str) else right))


def _format_size(text: str, *args: Any, **kwargs: Any) -> int:
    nested = re.search(r"\{[^{}]*\{", text)
    numbers = [item for item in (*args, *kwargs.values()) if isinstance(item, int)] if nested else []
    return text.count("{") * max(_numbers(text), _arguments_size(args), _arguments_size(kwargs), *numbers, 0)


def _join_size(separator: str, items: list[Any]) -> int:
    return sum(map(_length, items)) + len(separator) * len(items)


def _replace_size(text: str, old: str, new: str, count: int = -1) -> int:
    return len(text) + text.count(old) * len(new)


def _width(text: str, width: int, *fill: str) -> int:
    return width


_SIZE_OF_RESULT: dict[str, Callable[[Any, Any], float]] = {
    "+": _plus_size,
    "*": _times_size,
    "**": _power_size,
    "%": _modulo_size,
}
_STRING_METHODS: dict[str, Callable[..., float]] = {
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "format": _format_size,
    "format_map": lambda text, mapping: _format_size(text, **mapping),
    "join": _join_size,
    "replace": _replace_size,
    "translate": lambda text, table: len(text) * max(map(_length, table.values()), default=0),
}
