"""Write captured states to the logs: compress in threads, append in order, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from eagle3.hidden_states import codec
from eagle3.hidden_states.capture_log import CaptureLog
from eagle3.hidden_states.codec import Frame
from eagle3.hidden_states.stored_sample import Int32s, Provenance, places


@dataclass(frozen=True)
class CaptureSample:
    """A sample whose states are to be captured."""

    id: str
    token_ids: Int32s
    """[n]"""
    last_rows: Int32s
    """[m]: the rows of the last state to store, ascending; the last is n - 1."""
    shard: int


class CaptureWriter:
    """Takes samples with their states; when `drain` returns, all of them survive a kill.

    `submit` waits while more than `limit` bytes of states are in flight (a larger sample goes alone), so a slow disk
    slows the engine down instead of filling the memory. On exit, even after an error, samples in flight are finished
    if possible.

    Args:
        logs: shard -> its log.
        threads: number of threads for compression.
        limit: maximum bytes of states in flight.
    """

    def __init__(self, logs: Mapping[int, CaptureLog], *, threads: int, limit: int) -> None:
        self._logs = logs
        self._limit = limit
        self._encoders = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="append")
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._bytes = 0

    def submit(self, sample: CaptureSample, states: codec.Bits, next_token: int, provenance: Provenance) -> None:
        """Hand over one sample.

        Args:
            sample: the sample.
            states: [n, L, H]; must not be changed afterwards.
            next_token: the engine's greedy token after it.
            provenance: how to encode it.

        Raises:
            OSError: an earlier sample could not be written.
        """
        while self._waiting and (self._waiting[0][1].done() or self._bytes + states.nbytes > self._limit):
            self._wait_for_oldest()
        last = states[sample.last_rows, -1]  # [m, H]
        frames = []
        for number, place in enumerate(places(len(states), len(last), provenance.aux_layers)):
            aux = place.state < provenance.aux_layers
            rows = states[place.start : place.stop, place.state] if aux else last[place.start : place.stop]
            encoding = provenance.encoding if aux else "lossless"
            crc = codec.seed(provenance.part, sample.id, number)
            frames.append(self._encoders.submit(codec.encode, rows, encoding, crc))
        future = self._writer.submit(self._append, sample, next_token, frames)
        self._waiting.append((states.nbytes, future))
        self._bytes += states.nbytes

    def drain(self) -> None:
        """Wait until all samples are written.

        Raises:
            OSError: one could not be written.
        """
        while self._waiting:
            self._wait_for_oldest()
        for log in self._logs.values():
            log.sync()

    def _wait_for_oldest(self) -> None:
        size, future = self._waiting.popleft()
        self._bytes -= size
        future.result()

    def _append(self, sample: CaptureSample, next_token: int, frames: Sequence[Future[Frame]]) -> None:
        encoded = [frame.result() for frame in frames]
        self._logs[sample.shard].append(sample.id, sample.token_ids, sample.last_rows, next_token, encoded)

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._encoders.shutdown()
        self._writer.shutdown()
