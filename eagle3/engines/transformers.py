"""The embedded engine: the target in this process, on any device, through transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import batched
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any
