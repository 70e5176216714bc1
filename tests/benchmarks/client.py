"""Requests per second of the client against an instant local server, at concurrency 128.

    python tests/benchmarks/client.py [REQUESTS]

The server is a process of its own; `per_cpu_second` is what one core of the client's would do.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from functools import partial
from multiprocessing.connection import Connection

import orjson
from openai import AsyncOpenAI

from eagle3.engines.base import GenerationRequest, Sampling
from eagle3.engines.http.client import Client, ServerLostError
from eagle3.engines.http.completion import body_of, read_message, read_raw

ANSWER = orjson.dumps(
    {
        "id": "x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * 250, "reasoning": None},
                "finish_reason": "stop",
                "token_ids": list(range(300)),
            }
        ],
        "prompt_token_ids": list(range(200)),
        "usage": {"completion_tokens": 300},
    }
)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
    try:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            await reader.readexactly(length)
            writer.write(head + ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(told: Connection) -> None:
    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def give_up(lost: ServerLostError) -> None:
    raise lost


async def work(client: Client, connection: AsyncOpenAI, request: GenerationRequest) -> int:
    body = body_of(request, Sampling(max_tokens=300), "target")
    answer = await client.ask(connection, "/chat/completions", body)
    read_message(answer["choices"][0])
    read_raw(answer, 0.0)
    return len(answer["choices"][0]["token_ids"])


def main(count: int) -> None:
    told, tell = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(tell,), daemon=True)
    server.start()
    client = Client(f"http://127.0.0.1:{told.recv()}/v1", "key", timeout=60)
    messages = [{"role": "user", "content": "some words of a prompt " * 40}]
    requests = [GenerationRequest(id=str(number), messages=messages, seed=number) for number in range(count)]
    wall, cpu = time.perf_counter(), time.process_time()
    answers = list(client.stream(partial(work, client), requests, limit=128, recover=give_up))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    server.terminate()
    row = {
        "benchmark": "client",
        "concurrency": 128,
        "requests": len(answers),
        "per_second": round(count / wall),
        "per_cpu_second": round(count / cpu),
    }
    print(orjson.dumps(row).decode())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
