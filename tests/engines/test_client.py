"""The client against a real server on this machine that behaves as told."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from openai import AsyncOpenAI

from eagle3.engines.http.client import Client, ServerLostError
from eagle3.errors import Eagle3Error, RejectedError


class Endpoint(ThreadingHTTPServer):
    """Answers `{"number": n}` after `delay` seconds; `script` holds status codes to answer first, by number."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[int, list[int]] = {}
        self.delay = 0.0
        self.delays: dict[int, float] = {}
        self.models: list[dict[str, Any]] = [{"id": "target"}]
        self.asked: Counter[int] = Counter()
        self.now = 0
        self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {"data": self.server.models})

    def do_POST(self) -> None:
        endpoint = self.server
        number = json.loads(self.rfile.read(int(self.headers["content-length"])))["number"]
        with endpoint.lock:
            endpoint.asked[number] += 1
            endpoint.now += 1
            endpoint.most = max(endpoint.most, endpoint.now)
            status = endpoint.script[number].pop(0) if endpoint.script.get(number) else 200
        time.sleep(endpoint.delays.get(number, endpoint.delay))
        with endpoint.lock:
            endpoint.now -= 1
        if status == 0:
            self.close_connection = True
            return
        self.answer(status, {"number": number} if status == 200 else {"error": {"message": f"told to say {status}"}})

    def answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json")
        # The client's pauses between repeats.
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client_of(endpoint: Endpoint, timeout: float = 30) -> Client:
    return Client(endpoint.url, "key", timeout=timeout)


async def work(client: Client, connection: AsyncOpenAI, number: int) -> int | str:
    """Return the number that comes back, or the code of what went wrong."""
    try:
        answer = await client.ask(connection, "/completions", {"number": number})
    except RejectedError as error:
        return f"{number} {error.code}"
    found: int = answer["number"]
    return found


def never(lost: ServerLostError) -> None:
    raise AssertionError(lost)


def test_everything_is_answered_and_never_too_much_at_a_time(endpoint: Endpoint) -> None:
    endpoint.delay = 0.02
    client = client_of(endpoint)
    numbers = list(client.stream(partial(work, client), range(60), limit=8, recover=never))
    assert sorted(numbers) == list(range(60))
    assert 1 < endpoint.most <= 8


def test_weights_bound_what_is_in_flight_and_one_too_heavy_goes_alone(endpoint: Endpoint) -> None:
    endpoint.delay = 0.02
    client = client_of(endpoint)
    items = [3, 3, 3, 50, 3, 3]
    numbers = list(client.stream(partial(work, client), items, limit=7, weight=lambda item: item, recover=never))
    assert sorted(numbers) == sorted(items)
    assert endpoint.most == 2


def test_passing_faults_are_asked_again(endpoint: Endpoint) -> None:
    endpoint.script = {1: [503, 500], 2: [429], 3: [0, 502]}
    client = client_of(endpoint)
    assert sorted(client.stream(partial(work, client), range(5), limit=5, recover=never)) == list(range(5))
    assert endpoint.asked == {0: 1, 1: 3, 2: 2, 3: 3, 4: 1}


def test_lasting_faults_are_the_requests_own(endpoint: Endpoint) -> None:
    endpoint.script = {1: [400], 2: [500] * 99}
    client = client_of(endpoint)
    results = list(client.stream(partial(work, client), range(4), limit=4, recover=never))
    assert sorted(map(str, results)) == ["0", "1 refused", "2 server_error", "3"]
    assert endpoint.asked[1] == 1


@pytest.mark.parametrize(("status", "remedy"), [(401, "OPENAI_API_KEY"), (404, "base_url"), (429, "concurrency")])
def test_what_no_request_can_pass_ends_the_run(endpoint: Endpoint, status: int, remedy: str) -> None:
    endpoint.script = {1: [status] * 99}
    client = client_of(endpoint)
    with pytest.raises(Eagle3Error, match=remedy):
        list(client.stream(partial(work, client), [1], limit=1, recover=never))


def test_one_slow_request_is_its_own_fault(endpoint: Endpoint) -> None:
    endpoint.delays = {0: 60.0}
    client = client_of(endpoint, timeout=3.0)
    answered = []
    for result in client.stream(partial(work, client), range(20), limit=2, recover=never):
        answered.append(str(result))
        time.sleep(0.2)
    assert sorted(answered) == sorted(["0 timeout", *map(str, range(1, 20))])


def test_a_server_that_answers_nothing_is_lost_and_what_was_in_flight_is_asked_again(endpoint: Endpoint) -> None:
    client = client_of(endpoint, timeout=1.0)
    endpoint.delay = 3.0
    told = []

    def recover(lost: ServerLostError) -> None:
        told.append(str(lost))
        endpoint.delay = 0.0

    assert sorted(client.stream(partial(work, client), range(6), limit=3, recover=recover)) == list(range(6))
    assert told == ["no answer to any request for 1 s"]


@pytest.mark.slow
def test_after_a_loss_the_client_goes_where_the_server_is(endpoint: Endpoint) -> None:
    client = Client("http://127.0.0.1:9/v1", "key", timeout=60)
    told = []

    def recover(lost: ServerLostError) -> None:
        told.append(lost)
        client.url = endpoint.url

    assert sorted(client.stream(partial(work, client), range(6), limit=3, recover=recover)) == list(range(6))
    assert len(told) == 1


def test_leaving_early_leaves_nothing_running(endpoint: Endpoint) -> None:
    endpoint.delay = 0.2
    client = client_of(endpoint)
    results = client.stream(partial(work, client), range(100), limit=4, recover=never)
    next(results)
    results.close()  # type: ignore[attr-defined]
    asked = sum(endpoint.asked.values())
    time.sleep(0.5)
    assert sum(endpoint.asked.values()) == asked <= 8


def test_the_model_must_be_clear(endpoint: Endpoint) -> None:
    client = client_of(endpoint)
    assert client.model(None) == {"id": "target"}
    endpoint.models = [{"id": "target"}, {"id": "adapter", "parent": "target"}, {"id": "other"}]
    assert client.model("other") == {"id": "other"}
    with pytest.raises(Eagle3Error, match=r"set engine\.model"):
        client.model(None)
    with pytest.raises(Eagle3Error, match="target, adapter, other"):
        client.model("missing")


def test_a_server_that_is_not_there(endpoint: Endpoint) -> None:
    client = Client("http://127.0.0.1:9/v1", "key", timeout=1)
    with pytest.raises(Eagle3Error, match="does not answer"):
        client.model(None)
