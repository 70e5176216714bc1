"""Trackers: TensorBoard and Weights & Biases show the log while training runs. Both are optional installs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from eagle3.config.machine import MachineSettings
from eagle3.errors import Eagle3Error

Track = Callable[[str, Mapping[str, Any]], None]


@contextmanager
def trackers(machine: MachineSettings, name: str, step: int, settings: Mapping[str, Any]) -> Iterator[Track]:
    """Open the trackers that the settings name, and close them at the end.

    Args:
        machine: which trackers.
        name: of the run, the same when it continues.
        step: the last step before this start; points after it are replaced.
        settings: shown with the run.

    Yields:
        a function that takes the kind of a record and the record.

    Raises:
        Eagle3Error: the package of a tracker is not installed.
    """
    with ExitStack() as stack:
        writers: list[Callable[[Mapping[str, float], int], None]] = []
        if machine.tensorboard is not None:
            writers.append(_tensorboard(stack, Path(machine.tensorboard) / name, step))
        if machine.wandb is not None:
            writers.append(_wandb(stack, machine.wandb, name, settings))

        def track(kind: str, record: Mapping[str, Any]) -> None:
            for write in writers:
                write(scalars(kind, record), record["step"])

        yield track


def scalars(kind: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers as `kind/name`, those of the unroll's steps as `kind/name/step`."""
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = {f"{name}/{t}": part for t, part in enumerate(value)} if isinstance(value, list) else {name: value}
        # Ratios with a divisor of 0 are None.
        found |= {f"{kind}/{tag}": part for tag, part in parts.items() if isinstance(part, int | float)}
    del found[f"{kind}/step"]
    return found


def _tensorboard(stack: ExitStack, folder: Path, step: int) -> Callable[[Mapping[str, float], int], None]:
    _require("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = stack.enter_context(SummaryWriter(folder, purge_step=step + 1))

    def write(values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    return write


def _wandb(
    stack: ExitStack, project: str, name: str, settings: Mapping[str, Any]
) -> Callable[[Mapping[str, float], int], None]:
    wandb = _require("wandb")
    # Where it writes and which server it uses are its own settings, read from the environment.
    run = stack.enter_context(wandb.init(project=project, id=name, resume="allow", config=dict(settings)))

    def write(values: Mapping[str, float], step: int) -> None:
        run.log(dict(values), step=step)

    return write


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise Eagle3Error(
            f"machine.{package} is set, but {package} is not installed",
            remedy=f'pip install -e ".[{package}]", or set machine.{package} to null',
        ) from None
