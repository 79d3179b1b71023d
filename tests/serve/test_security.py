"""Keys on every route, limits, and nothing that is executed or told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.routing import Route

from pagedcli.config import ServeConfig
from pagedcli.errors import ConfigError
from pagedcli.serve.app import make_routes
from pagedcli.serve.security import OPEN_PATHS, is_local, read_keys
from tests.serve.support import http_post, raw_request, served

KEYS = (b"first-key", b"second-key")


def test_every_route_needs_a_key_unless_it_says_otherwise() -> None:
    with served(keys=KEYS) as server:
        routes = make_routes(server.state).routes
        assert len(routes) >= 13
        walked = 0
        for route in routes:
            assert isinstance(route, Route)
            path = route.path.replace("{model_id:path}", "x").replace("{request_id}", "x")
            for method in route.methods or ():
                answer = server.http.request(method, server.url + path)
                if path in OPEN_PATHS:
                    assert answer.status_code == 200, path
                    continue
                walked += 1
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    error = answer.json()["error"]
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert walked >= 11
        # what has no route does not say so to those without a key
        for path in (
            "/docs",
            "/redoc",
            "/openapi.json",
            "/nothing",
            "/health/",
            "//health",
            "/HEALTH",
            "/metrics",
        ):
            assert server.http.get(server.url + path).status_code == 401, path


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
        ("Bearer  first-key", 200),
        ("Bearer first-ke", 401),
        ("Bearer first-keyy", 401),
        ("Bearer", 401),
        ("first-key", 401),
        ("Basic first-key", 401),
        ("", 401),
    ],
)
def test_only_a_whole_key_opens(header: str, status: int) -> None:
    with served(keys=KEYS) as server:
        answer = server.http.get(server.url + "/v1/models", headers={"Authorization": header})
        assert answer.status_code == status


def test_two_authorizations_are_none() -> None:
    with served(keys=KEYS) as server:
        twice = "Authorization: Bearer wrong\r\nAuthorization: Bearer first-key\r\n"
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        assert raw_request(server.address, http_post("/v1/completions", body, twice)).startswith(
            b"HTTP/1.1 401"
        )
        odd = b"Authorization: Bearer \xff\xfe\r\n"
        head = http_post("/v1/completions", body).replace(b"Connection", odd + b"Connection")
        assert raw_request(server.address, head).startswith(b"HTTP/1.1 401")


def test_keys_come_from_a_file_a_flag_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    environment = {"PAGED_API_KEY": "env"}
    assert read_keys(str(file), ["flag"], environment) == (b"one", b"two")
    assert read_keys(None, ["flag"], environment) == (b"flag",)
    assert read_keys(None, [], environment) == (b"env",)
    assert read_keys(None, [], {}) == ()


@pytest.mark.parametrize("text", ["", "\n \n", "with space\n", "ключ\n"])
def test_keys_that_could_not_be_sent_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="keys"):
        read_keys(str(file), [], {})
    with pytest.raises(ConfigError, match="PAGED_API_KEY"):
        read_keys(None, [], {"PAGED_API_KEY": text.strip("\n")})
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(str(tmp_path / "none"), [], {})


def test_cors_is_off_by_default() -> None:
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    with served(keys=KEYS) as server:
        answer = server.http.options(server.url + "/v1/completions", headers=asking)
        assert answer.status_code == 401
        assert "access-control-allow-origin" not in answer.headers
    with served(keys=KEYS, cors_origins=("https://example.org",)) as server:
        answer = server.http.options(server.url + "/v1/completions", headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        answer = server.http.post(
            server.url + "/v1/completions", headers={"Origin": "https://example.org"}, json={"prompt": "a"}
        )
        assert answer.status_code == 401
        other = server.http.get(server.url + "/health", headers={"Origin": "https://other.org"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://127.0.0.1:8000", ""])
def test_a_web_page_may_not_even_post(origin: str) -> None:
    """A browser delivers such a question without asking first."""
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    with served() as server:
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        answer = server.http.post(server.url + "/v1/completions", headers=headers, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert not server.records
        assert server.http.get(server.url + "/health", headers=headers).status_code == 200
    with served(cors_origins=("*",)) as server:
        answer = server.http.post(server.url + "/v1/completions", headers=headers, content=body)
        assert answer.status_code == 200


def test_bounds_are_the_servers_to_set() -> None:
    with served(max_n=2, max_stop_sequences=1, max_stop_chars=3, max_logit_bias=1, max_prompts=2) as server:
        for fields, field in [
            ({"n": 3}, "n"),
            ({"stop": ["a", "b"]}, "stop"),
            ({"stop": "abcd"}, "stop"),
            ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
            ({"stop_token_ids": [1, 2]}, "stop_token_ids"),
            ({"bad_words": ["a", "b"]}, "bad_words"),
            ({"bad_words": ["abcd"]}, "bad_words"),
            ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
            ({"prompt": ["a", "b", "c"]}, "prompt"),
        ]:
            error = server.refusal("/v1/completions", {"prompt": "a", **fields})
            assert error["param"] == field
            assert "at most" in error["message"]
        assert server.complete(prompt="a", n=2, stop="abc", logit_bias={"1": 1}, max_tokens=1)
    with served(max_choices=3) as server:
        error = server.refusal("/v1/completions", {"prompt": ["a", "b"], "n": 2})
        assert error["param"] == "n"
        assert server.complete(prompt=["a", "b", "c"], max_tokens=1)
    with served(max_depth=3) as server:
        assert server.complete(prompt="a", metadata={"a": {"b": 1}}, max_tokens=1)
        error = server.refusal("/v1/completions", {"prompt": "a", "metadata": {"a": {"b": {"c": {}}}}})
        assert "3 deep" in error["message"]


def test_only_this_machine_is_local() -> None:
    assert is_local(ServeConfig().host)
    assert is_local("127.0.0.2")
    assert is_local("::1")
    assert not is_local("0.0.0.0")
    assert not is_local("::")
    assert not is_local("example.org")


def test_a_template_cannot_reach_the_interpreter() -> None:
    with served() as server:
        body = {"messages": [{"role": "user", "content": "{{ ''.__class__.__mro__ }}"}]}
        told = server.post("/apply-template", body).json()["prompt"]
        assert told == "[user]{{ ''.__class__.__mro__ }}\n[assistant]"
        kwargs = {"chat_template_kwargs": {"template": "{{ 1 }}"}}
        assert server.refusal("/apply-template", {**body, **kwargs})["param"] == "chat_template_kwargs"
