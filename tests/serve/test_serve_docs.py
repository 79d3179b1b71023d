"""docs/serve.md names every route, field and error code that there is, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedcli.serve import validation
from pagedcli.serve.app import make_routes
from pagedcli.serve.schemas import ChatBody, CompletionBody
from tests.serve.support import Served

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
SOURCES = sorted((Path(__file__).parents[2] / "pagedcli" / "serve").glob("*.py"))


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_field_is_documented(kind: type[ChatBody | CompletionBody]) -> None:
    missing = [name for name in kind.model_fields if f"`{name}`" not in PAGE]
    assert not missing


def test_no_field_is_both_served_and_unsupported() -> None:
    served_fields = {*CompletionBody.model_fields, *ChatBody.model_fields}
    assert not served_fields & (validation._UNSUPPORTED | validation._INSTEAD.keys())
    assert set(validation._NEUTRAL) <= served_fields


def test_every_route_is_documented(server: Served) -> None:
    for route in make_routes(server.state).routes:
        path = route.path.replace("{model_id:path}", "{name}").replace("{request_id}", "{id}")  # type: ignore[attr-defined]
        assert path in PAGE


def test_every_error_code_is_documented() -> None:
    codes = {
        code for file in SOURCES for code in re.findall(r'code="(\w+)"', file.read_text(encoding="utf-8"))
    }
    assert len(codes) > 8
    undocumented = {code for code in codes if f"`{code}`" not in PAGE} - {"server_error", "duplicate_id"}
    assert not undocumented
