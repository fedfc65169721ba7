"""SMG, a gateway that tokenizes, in front of vLLM over gRPC, and 32 clients: `smg_worker.py MODEL_DIRECTORY`.

The clients stream completions over HTTP, as text: the gateway takes no token ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from serving import Items, check_length, serve
from tokenizers import Tokenizer

CLIENTS = 32
START_TIMEOUT_S = 300.0
RETRY_S = 1.0
SEQUENCES, STEP_TOKENS, CONTEXT = "32", "2048", "4096"


class Servers:
    """Both servers, on free ports; they end with this process' group."""

    def __init__(self, model: str) -> None:
        engine, gateway, host = _free_port(), _free_port(), ("--host", "127.0.0.1")
        served = ("--model", model, *host, "--port", str(engine), "--dtype", "bfloat16", "--enable-prefix-caching")
        limits = ("--max-num-seqs", SEQUENCES, "--max-num-batched-tokens", STEP_TOKENS, "--max-model-len", CONTEXT)
        launcher = ("-W", "ignore", "-m", "vllm.entrypoints.launchers.grpc_server")
        self._engine = subprocess.Popen([sys.executable, *launcher, *served, *limits])
        routed = ("--worker-urls", f"grpc://127.0.0.1:{engine}", "--model-path", model, *host, "--port", str(gateway))
        # The environment names libraries for the engine alone.
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        program = str(Path(sys.executable).with_name("smg"))
        self._gateway = subprocess.Popen([program, "launch", *routed, "--log-level", "warn"], env=environ)
        self.model, self.url = model, f"http://127.0.0.1:{gateway}/v1/completions"

    def check(self) -> None:
        """Raises RuntimeError: one of them has ended."""
        for name, process in (("vLLM", self._engine), ("SMG", self._gateway)):
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}")


def main() -> None:
    """Starts both, then answers."""
    (model,) = sys.argv[1:]
    servers = Servers(model)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    asyncio.run(_until_ready(servers))

    def generate(items: Items) -> dict[str, Any]:
        asked = [(tokenizer.decode(prompt, skip_special_tokens=False), count) for prompt, count in items]
        return asyncio.run(_ask_all(servers, asked))

    serve("SMG and vLLM over gRPC, 32 clients", generate)


async def _until_ready(servers: Servers) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while True:
        servers.check()
        try:
            async with aiohttp.ClientSession() as session:
                await _ask(session, servers, "Hello", 2)
        except (aiohttp.ClientError, RuntimeError) as error:
            if time.monotonic() > give_up:
                raise RuntimeError(f"not ready in {START_TIMEOUT_S:g} s: {error}") from error
            await asyncio.sleep(RETRY_S)
        else:
            return


async def _ask_all(servers: Servers, asked: list[tuple[str, int]]) -> dict[str, Any]:
    free = asyncio.Semaphore(CLIENTS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: str, count: int) -> float:
            async with free:
                return await _ask(session, servers, prompt, count)

        return {"first_token_s": await asyncio.gather(*(one(prompt, count) for prompt, count in asked))}


async def _ask(session: aiohttp.ClientSession, servers: Servers, prompt: str, count: int) -> float:
    """Streams one completion; seconds to its first text. Raises RuntimeError: refused, or not as long as asked."""
    body = {"model": servers.model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    begun, first_s, made = time.perf_counter(), 0.0, 0
    async with session.post(servers.url, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if event.get("choices") and not first_s:
                    first_s = time.perf_counter() - begun
                made = (event.get("usage") or {}).get("completion_tokens", made)
    check_length(made, count)
    return first_s


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    main()
