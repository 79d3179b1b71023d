"""Measure the engine in the server's process against an engine in a process of its own (docs/adr/0005-one-process.md).

    python tools/measure_engine_process.py [--rounds 3] [--outputs 64] [--model MODEL] [--streams 1 --streams 32]

The same server and the same requests, in turns: once as `paged serve` is, and once with a stand-in for the engine's
client that sends token ids and parameters through a pipe and gets whole steps of deltas back. The stand-in knows only
what a stream needs; it is here and not in the package because it was not faster.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from pagedcli.bench.server_process import ServerCommand, ServerProcess, our_server  # noqa: E402
from pagedcli.bench.serving import load, token_prompts  # noqa: E402
from pagedcli.workloads.arrivals import together  # noqa: E402


def engine_main(pipe: Connection, model: str | None) -> None:
    """The engine's process: takes requests from the pipe, sends what each turn of the loop brought."""
    from pagedcli.api.build import build_engine
    from pagedcli.config import EngineConfig, ModelConfig
    from pagedcli.engine.outputs import Delta
    from pagedcli.engine.prompt import RequestSpec

    engine = build_engine(EngineConfig(ModelConfig(model)))
    resolved = {
        name: getattr(engine.resolved, name)
        for name in ("num_pages", "max_model_len", "vocab_size", "page_size")
    }
    pipe.send((str(engine.resolved.path), resolved, engine.generation_config))
    box: list[Delta] = []

    def flush() -> None:
        if box:
            pipe.send(box[:])
            box.clear()

    engine.client.on_turn(flush)
    while (item := pipe.recv()) is not None:
        if isinstance(item, str):
            engine.client.abort(item)
        else:
            request_id, tokens, params, stream = item
            engine.client.add(
                RequestSpec(tokens, params=params, request_id=request_id, stream=stream), box.append
            )
    engine.close()


class PipeClient:
    """What a server needs of `EngineThread`, at the other end of a pipe."""

    def __init__(self, pipe: Connection, codec: Any, vocab_size: int) -> None:
        self.codec = codec
        self.settings = SimpleNamespace(chat_template=None)
        self.timing = SimpleNamespace(receiving=contextlib.nullcontext, tokenizing=contextlib.nullcontext)
        self.dead = None
        self.is_full = False
        self._pipe, self._vocab_size = pipe, vocab_size
        self._lock = threading.Lock()
        self._sinks: dict[str, Callable[[Any], None]] = {}
        self._hooks: list[Callable[[], None]] = []
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def num_unfinished(self) -> int:
        """Requests not answered yet."""
        return len(self._sinks)

    def on_turn(self, hook: Callable[[], None]) -> None:
        """Have `hook` called after each message."""
        self._hooks.append(hook)

    def add(self, spec: Any, sink: Callable[[Any], None]) -> str:
        """Tokenize here, send ids and parameters."""
        from pagedcli.engine.prompt import prepare

        prepared = prepare(spec, self.codec, vocab_size=self._vocab_size, chat_template=None)
        request_id = uuid.uuid4().hex
        self._sinks[request_id] = sink
        with self._lock:
            self._pipe.send((request_id, prepared.tokens, prepared.params, spec.stream))
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request."""
        with self._lock:
            self._pipe.send(request_id)
        return request_id in self._sinks

    def drain(self, timeout_s: float) -> bool:
        """Whether all is answered."""
        return not self._sinks

    def _read(self) -> None:
        while True:
            for delta in self._pipe.recv():
                self._sinks[delta.request_id](delta)
                if delta.output is not None:
                    del self._sinks[delta.request_id]
            for hook in self._hooks:
                hook()


def serve_apart(port: int, model: str | None) -> None:
    """A server whose engine is another process."""
    from pagedcli.api.convert import load_tokenizer
    from pagedcli.checkpoint.sources import open_checkpoint
    from pagedcli.cli.serve_run import attach
    from pagedcli.config import ServeConfig
    from pagedcli.serve.app import create_app
    from pagedcli.serve.lifecycle import Lifecycle, bind, serve
    from pagedcli.serve.state import ServerState

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=engine_main, args=(theirs, model), daemon=True).start()

    def open_engine() -> Any:
        path, resolved, generation = ours.recv()
        tokenizer = load_tokenizer(open_checkpoint(Path(path)))
        client = PipeClient(ours, tokenizer, resolved["vocab_size"])
        facts = SimpleNamespace(model="apart", path=Path(path), **resolved)
        return SimpleNamespace(
            client=client,
            resolved=facts,
            tokenizer=tokenizer,
            generation_config=generation,
            close=lambda: ours.send(None),
        )

    lifecycle = Lifecycle(open_engine, drain_s=1, on_ready=lambda llm: attach(state, llm.engine, {}))
    state = ServerState(ServeConfig(), lifecycle)
    serve(create_app(state), lifecycle, bind("127.0.0.1", port))


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    import psutil

    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(streams: int, outputs: int, seed: int, server: ServerProcess) -> tuple[float, float, float]:
    """Output tokens per second, p99 between tokens in ms, CPU ms per token."""
    before = cpu_seconds(server.pid)
    report = load(server, token_prompts(streams, seed=seed, lengths=(32, 96)), outputs, together(streams))
    assert not report.failed, report.errors
    spent = cpu_seconds(server.pid) - before
    return report.output_tokens_per_s, 1e3 * report.itl_s.p99, 1e3 * spent / report.output_tokens


def rows(counts: list[int], outputs: int, rounds: int, model: str | None) -> Iterator[list[str]]:
    """A row per number of streams."""
    arguments = ("--model", model) if model else ()
    apart = (sys.executable, __file__, "--port", "{port}", *arguments)
    with (
        ServerProcess(our_server(arguments)) as inside,
        ServerProcess(ServerCommand("apart", apart, "/ready")) as other,
    ):
        for server in (inside, other):
            load(server, token_prompts(32, seed=0, lengths=(32, 96)), 4, together(32))
        for streams in counts:
            found = [
                [measure(streams, outputs, 10 * r + streams, s) for s in (inside, other)]
                for r in range(1, rounds + 1)
            ]
            medians = [
                [statistics.median(pair[side][item] for pair in found) for side in (0, 1)]
                for item in range(3)
            ]
            ratio = statistics.median(pair[1][0] / pair[0][0] for pair in found)
            shown = [f"{value:,.1f}" for values in medians for value in values]
            yield [str(streams), *shown[:2], f"{ratio:.3f}", *shown[2:]]


def main(
    port: Annotated[int | None, typer.Option(hidden=True, help="Be the server with an engine apart.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="As in paged serve.")] = None,
    rounds: Annotated[int, typer.Option(help="Pairs of runs.")] = 3,
    outputs: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; may be repeated.")] = None,
) -> None:
    """Measure both and print a table."""
    if port is not None:
        serve_apart(port, model)
        return
    started = time.monotonic()
    table = Table(title=f"engine in the server's process | in one of its own ({os.cpu_count()} cores)")
    names = (
        "streams",
        "tok/s in",
        "tok/s apart",
        "apart/in",
        "ITL p99 in",
        "apart",
        "CPU ms/tok in",
        "apart",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows(streams or [1, 32, 256], outputs, rounds, model):
        table.add_row(*row)
    console = Console(width=140)
    console.print(table)
    console.print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    typer.run(main)
