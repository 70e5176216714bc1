"""A client that sends many requests at once to an OpenAI-compatible server, in bounded memory, with retries."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import httpx2
import openai
import orjson

from eagle3.engines.http.server import get, healthy, is_loopback
from eagle3.errors import Eagle3Error, RejectedError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Retries after lost connections and status 408, 409, 429 and 5xx, with growing pauses: 16 s in all.
_RETRIES = 5
_CONNECT_TIMEOUT = 30.0


class ServerLostError(Exception):
    """The server is gone or hangs; its requests may be sent again."""


def api_key() -> str:
    """Return the API key of a server that is not ours; it is read from the environment only."""
    return os.environ.get("OPENAI_API_KEY") or "none"


class Client:
    """A client of one server.

    Args:
        url: base address, ending in `/v1`.
        key: API key.
        timeout: seconds for one answer, including retries.
    """

    def __init__(self, url: str, key: str, *, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout
        self._last_answer = 0.0

    @property
    def root(self) -> str:
        """The address below which `/health`, `/version` and `/metrics` are."""
        return self.url.removesuffix("/v1")

    def fetch_text(self, path: str) -> str:
        """Return the text at a path below the root, such as `/metrics`."""
        try:
            return get(self.root + path)
        except httpx2.HTTPError as error:
            raise Eagle3Error("a server does not answer", where=self.root + path, found=error) from None

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send one request and wait: GET, or POST if there is a body; `path` is below `/v1`.

        Raises:
            Eagle3Error: the server cannot be reached, or refuses.
        """
        with asyncio.Runner() as runner:
            client = self._connect()
            try:
                return runner.run(self.ask(client, path, body))
            except (ServerLostError, RejectedError) as error:
                raise Eagle3Error("a server does not answer", where=self.url + path, found=error) from None
            finally:
                runner.run(client.close())

    def model(self, wanted: str | None) -> dict[str, Any]:
        """Return the server's entry for the model to use: `id`, and with vLLM `max_model_len`.

        Raises:
            Eagle3Error: the model is missing, or there are several and none is named.
        """
        models = self.fetch("/models")["data"]
        found = [model for model in models if wanted in (None, model["id"])]
        # vLLM lists adapters, too: they name the model they belong to.
        found = [model for model in found if not model.get("parent")] or found
        if len(found) != 1:
            raise Eagle3Error(
                "it is not clear which of the server's models to use",
                where=self.url,
                found=", ".join(model["id"] for model in models) or "no model",
                expected=wanted or "one model",
                remedy="set engine.model to one of them",
            )
        entry: dict[str, Any] = found[0]
        return entry

    async def ask(self, client: openai.AsyncOpenAI, path: str, body: dict[str, Any] | None) -> Any:
        """Return the JSON response to one request.

        Raises:
            RejectedError: `refused` (4xx), `server_error` (5xx of a healthy server), `timeout`, `not_json`.
            ServerLostError: the connection failed, or no request was answered for as long as one may take.
            Eagle3Error: the key, the address or the rate limit is wrong: no request can succeed.
        """
        try:
            async with asyncio.timeout(self._timeout):
                if body is None:
                    answer = await client.get(path, cast_to=httpx2.Response)
                else:
                    answer = await client.post(path, body=body, cast_to=httpx2.Response)
            value = orjson.loads(answer.content)
        except TimeoutError:
            if time.monotonic() - self._last_answer >= self._timeout:
                raise ServerLostError(f"no answer to any request for {self._timeout:.0f} s") from None
            raise RejectedError("timeout", f"no answer in {self._timeout:.0f} s") from None
        except orjson.JSONDecodeError as error:
            raise RejectedError("not_json", str(error)) from None
        except openai.APIConnectionError as error:
            raise ServerLostError(repr(error.__cause__ or error)) from None
        except openai.InternalServerError as error:
            if not await asyncio.to_thread(healthy, self.root):
                raise ServerLostError(error.message) from None
            raise RejectedError("server_error", error.message) from None
        except openai.APIStatusError as error:
            raise self._explain(error) from None
        self._last_answer = time.monotonic()
        return value

    def _explain(self, error: openai.APIStatusError) -> Exception:
        remedies = {
            401: "set OPENAI_API_KEY to the endpoint's key",
            403: "set OPENAI_API_KEY to a key that may use this model",
            404: "check machine.base_url (it ends in /v1) and engine.model",
            429: "lower machine.concurrency",
        }
        if error.status_code not in remedies:
            return RejectedError("refused", error.message)
        return Eagle3Error(
            "an endpoint refuses every request",
            where=self.url,
            found=error.message,
            remedy=remedies[error.status_code],
        )

    def stream(
        self,
        work: Callable[[openai.AsyncOpenAI, Item], Awaitable[Result]],
        items: Iterable[Item],
        *,
        limit: int,
        weight: Callable[[Item], int] = lambda _: 1,
        recover: Callable[[ServerLostError], None],
    ) -> Iterator[Result]:
        """Process the items, several at a time, and yield the results in any order.

        Args:
            work: processes one item; sends its requests with `ask`.
            items: read one by one.
            limit: maximum weight in flight; one item may exceed it.
            weight: of an item.
            recover: called when the server is lost. Returns when it is back (with `url` set to its new address), and
                the items in flight are processed again; or raises.
        """
        waiting = deque(items)
        with asyncio.Runner() as runner:
            while waiting:
                self._last_answer = time.monotonic()
                lost = yield from self._work_through(runner.get_loop(), work, waiting, limit, weight)
                if lost is not None:
                    recover(lost)

    def _work_through(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[openai.AsyncOpenAI, Item], Awaitable[Result]],
        waiting: deque[Item],
        limit: int,
        weight: Callable[[Item], int],
    ) -> Generator[Result, None, ServerLostError | None]:
        """Process all of `waiting`, or put unfinished items back and return why the server was lost."""
        client = self._connect()
        running: dict[asyncio.Future[Result], Item] = {}
        load = 0
        lost = None
        try:
            while running or (waiting and lost is None):
                while waiting and lost is None and (not running or load + weight(waiting[0]) <= limit):
                    item = waiting.popleft()
                    load += weight(item)
                    running[asyncio.ensure_future(work(client, item), loop=loop)] = item
                done, _ = loop.run_until_complete(asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    item = running.pop(task)
                    load -= weight(item)
                    try:
                        result = task.result()
                    except ServerLostError as error:
                        lost = error
                        waiting.appendleft(item)
                        continue
                    yield result
        finally:
            for task in running:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*running, client.close(), return_exceptions=True))
        return lost

    def _connect(self) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(
            # `ask` limits the whole request: a model can think for minutes without sending a byte.
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not is_loopback(self.url),
        )
        return openai.AsyncOpenAI(base_url=self.url, api_key=self._key, max_retries=_RETRIES, http_client=http)
