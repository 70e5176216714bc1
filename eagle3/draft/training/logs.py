"""The logs of a training run: `log.jsonl` and, on GPUs, `timing.jsonl`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from eagle3.draft.training.trackers import Track
from eagle3.files.atomic import atomic_write
from eagle3.files.records import RecordLog

LOG, TIMING = "log.jsonl", "timing.jsonl"


class TrainingLogs:
    """Appends to hidden files in the work folder, `.log.jsonl`, which become the artifact's at the end of the run."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def cut(self, step: int, evaluated: int) -> None:
        """Drop the records of what came after a checkpoint: steps after `step`, evaluations after `evaluated`."""
        for name in (LOG, TIMING):
            path = self._work_file(name)
            if path.exists():
                with RecordLog(path) as log:
                    kept = [
                        record
                        for record in log.records
                        if record["step"] <= (evaluated if record.get("kind") == "evaluation" else step)
                    ]
                path.unlink()
                with RecordLog(path) as log:
                    log.append(*kept)

    @contextmanager
    def open(self, track: Track) -> Iterator[None]:
        """Open the logs; what is appended is also passed to `track`."""
        with ExitStack() as stack:
            self._logs = {name: stack.enter_context(RecordLog(self._work_file(name))) for name in self.names}
            self._track = track
            yield

    def append(self, record: Mapping[str, Any], name: str = LOG) -> None:
        """Append a record while the logs are open."""
        self._logs[name].append(dict(record))
        self._track(record.get("kind", "timing"), record)

    def publish(self) -> None:
        """Copy the logs to their final names."""
        for name in self.names:
            with atomic_write(self.folder / name) as temporary:
                shutil.copyfile(self._work_file(name), temporary)

    def _work_file(self, name: str) -> Path:
        return self.folder / f".{name}"
