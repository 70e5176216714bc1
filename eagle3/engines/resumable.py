"""Generation that survives a kill: good answers are kept in a log and not generated again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3.console import say
from eagle3.engines.base import Engine, Generation, GenerationRequest, Sampling
from eagle3.errors import Eagle3Error
from eagle3.files.records import RecordLog


class ResumableEngine:
    """An engine, and the log of its answers in this work folder.

    If the engine's rounding depends on the batch, an unfinished group is recomputed as a whole; if requests are
    independent, each answer is kept on its own. Only good answers enter the log: the next
    run asks again for those that failed.
    """

    def __init__(self, engine: Engine, log: RecordLog) -> None:
        self._engine = engine
        self._log = log
        self._known = {record["id"]: Generation(**record) for record in log.records}
        if self._known:
            say(f"{len(self._known):,} answers of an interrupted run are kept")

    def generate(self, group: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Generation]:
        """Yield the answer to every request, in any order, those in the log first.

        Args:
            group: requests that are computed together: at most `batch_size` of them, if the engine has one.
            sampling: how to choose tokens.

        Raises:
            Eagle3Error: the engine returns an unknown answer, or leaves a request unanswered.
        """
        waiting = {request.id: request for request in group}
        alone = self._engine.batch_size is None
        if alone or all(id in self._known for id in waiting):
            for id in [id for id in waiting if id in self._known]:
                del waiting[id]
                yield self._known[id]
        finished = []
        for answer in self._engine.generate(list(waiting.values()), sampling) if waiting else ():
            if waiting.pop(answer.id, None) is None:
                raise Eagle3Error(
                    "the engine answered a request that was not made", where=self._engine.name, found=answer.id
                )
            if answer.error is None and alone:
                self._log.append(vars(answer))
            elif answer.error is None:
                finished.append(vars(answer))
            yield answer
        if finished:
            self._log.append(*finished)
        if waiting:
            raise Eagle3Error(
                "the engine left requests unanswered", where=self._engine.name, found=", ".join(sorted(waiting)[:3])
            )
