"""`paged generate -p` and `--chat`: answers that stream to the terminal. May import everything below `cli`.

Sampling values: flags count most, then (for conversations) the model's generation_config, then the table's.
"""

from __future__ import annotations

import queue
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pagedcli.api.defaults import model_defaults
from pagedcli.cli import engine_access
from pagedcli.cli.console import Messages, discard_stdout, write_result
from pagedcli.cli.row_fields import make_params
from pagedcli.cli.rows import row_seed
from pagedcli.config import EngineConfig
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.loop import Sink
from pagedcli.engine.outputs import Delta, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import ConfigError, RequestError

DONE, INTERRUPTED = 0, 130
_HELP = "/exit or Ctrl-D ends, /clear forgets the conversation, Ctrl-C stops an answer"


class Client(Protocol):
    """What this needs of `engine.client.EngineThread`."""

    def add(self, spec: RequestSpec, sink: Sink) -> str:
        """Hand in a request."""

    def abort(self, request_id: str) -> bool:
        """End a request with what it has."""


def stream_answer(client: Client, spec: RequestSpec, write: Callable[[str], None]) -> RequestOutput:
    """Answer one request, writing text as it comes; Ctrl-C ends it with what it has."""
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    request_id = client.add(spec, deltas.put)
    while True:
        try:
            delta = deltas.get()
            write(delta.text)
        except KeyboardInterrupt:
            client.abort(request_id)
            continue
        if delta.output is not None:
            if delta.output.error is not None:
                raise delta.output.error
            return delta.output


def _is_aborted(output: RequestOutput) -> bool:
    return any(sample.finish_reason == "abort" for sample in output.samples)


def _params(sampling: Mapping[str, Any], defaults: Mapping[str, Any], seed: int) -> SamplingParams:
    try:
        params = make_params({**defaults, **sampling}, {})
    except RequestError as error:
        if error.field not in defaults or error.field in sampling:
            raise
        raise ConfigError(
            f"the model's generation_config.json: {error}, or say it with --set sampling.{error.field}=..."
        ) from None
    return params if params.seed is not None else params.replace(seed=seed)


def answer_prompt(
    prompt: str, config: EngineConfig, sampling: dict[str, Any], messages: Messages, *, chat: bool
) -> int:
    """Answer one prompt: raw, or as the only message of a conversation."""
    seed = config.seed if config.seed is not None else secrets.randbits(63)
    with engine_access.open_engine(config, messages) as engine:
        defaults = model_defaults(engine.generation_config) if chat else {}
        params = _params(sampling, defaults, seed)
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        )
        spec = RequestSpec(params=params, stream=params.n == 1, **asked)
        try:
            output = stream_answer(engine.client, spec, write_result if spec.stream else _write_nothing)
            _write_rest(output)
        except BrokenPipeError:
            discard_stdout()
            return DONE
    _tell(output, messages, seed, drawn=config.seed is None)
    return INTERRUPTED if _is_aborted(output) else DONE


def _write_nothing(text: str) -> None:
    """Several answers at once would mix: they are written when all have ended."""


def _write_rest(output: RequestOutput) -> None:
    """A line end after a streamed answer; of several answers, all of them."""
    if len(output.samples) == 1:
        write_result("\n")
        return
    for sample in output.samples:
        write_result(f"[{sample.index}] {sample.text}\n")


def _tell(output: RequestOutput, messages: Messages, seed: int, *, drawn: bool) -> None:
    usage, seconds = output.usage, output.seconds
    reasons = ", ".join(str(sample.finish_reason) for sample in output.samples)
    first = f", first token after {seconds.first_token:.2f} s" if seconds.first_token is not None else ""
    messages.detail(
        f"{reasons}; {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated in {seconds.total:.2f} s{first}"
        + (f"; seed {seed} (drawn)" if drawn else "")
    )


def converse(config: EngineConfig, sampling: dict[str, Any], messages: Messages) -> int:
    """A conversation in the terminal, until /exit or the end of stdin."""
    if sampling.get("n", 1) != 1:
        raise ConfigError("--chat gives one answer at a time: leave -n out")
    seed = config.seed if config.seed is not None else secrets.randbits(63)
    with engine_access.open_engine(config, messages) as engine:
        messages.say(f"{engine_access.engine_title(engine)}\n{_HELP}")
        defaults = model_defaults(engine.generation_config)
        history: list[dict[str, Any]] = []
        turn = 0
        while (text := _read_message(messages)) is not None:
            if text == "/clear":
                history.clear()
            elif text.startswith("/"):
                messages.say(_HELP)
            elif text:
                turn += 1
                _take_turn(
                    engine.client, history, text, _params(sampling, defaults, row_seed(seed, turn)), messages
                )
    return DONE


def _take_turn(
    client: Client, history: list[dict[str, Any]], text: str, params: SamplingParams, messages: Messages
) -> None:
    """Ask and answer; a refused message is taken back, a stopped answer stays as far as it came."""
    asked = [*history, {"role": "user", "content": text}]
    try:
        output = stream_answer(client, RequestSpec(messages=asked, params=params), write_result)
    except RequestError as error:
        messages.say(f"{error} (/clear forgets the conversation)")
        return
    write_result("\n")
    if output.samples[0].finish_reason is FinishReason.LENGTH:
        tokens = output.usage.completion_tokens
        messages.say(f"(cut after {tokens:,} tokens: --max-tokens N allows more, /clear makes room)")
    history[:] = [*asked, {"role": "assistant", "content": output.text}]


def _read_message(messages: Messages) -> str | None:
    """The next line of the user; None at the end. Ctrl-C at the prompt drops the line."""
    while True:
        try:
            text = _input().strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            messages.say("")
            continue
        return None if text in ("/exit", "/quit") else text


def _input() -> str:
    """A line, with editing and history on a terminal; no prompt goes into a redirected stdout."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401 - gives input() its editing and history

        return input("> ")
    return input()
