"""Contamination: prompts that repeat what the draft, or the target, is evaluated on.

A prompt counts as contaminated when it shares n words in a row with an evaluation prompt (13 as in GPT-3's report,
Brown et al. 2020, appendix C). Words are compared without case, punctuation and compatibility forms of letters;
in scripts without spaces between words, each character counts as a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.config.prompts import DecontaminationSettings
from eagle3.errors import Eagle3Error, RejectedError
from eagle3.files.find import find_files
from eagle3.prompts.conversations import detect_forms, to_conversation
from eagle3.prompts.sources import SourceRow, read_rows

if TYPE_CHECKING:
    import numpy as np

# Kana, ideographs and their extensions; Thai, Lao, Burmese and Khmer.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_QUOTED = 80


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Contamination:
    """The n-grams of all evaluation prompts, as 64-bit hashes.

    Words are numbered, and an n-gram's hash is the sum of its words' numbers times one random factor per place,
    modulo 2^64: two different n-grams have equal hashes with a probability of about 2^-60.

    Args:
        settings: the evaluation files and n.

    Raises:
        Eagle3Error: an evaluation file is missing, unreadable, or holds a row without a prompt.
    """

    def __init__(self, settings: DecontaminationSettings) -> None:
        import numpy as np

        self._ngram = settings.ngram
        self._factors = np.random.default_rng(0).integers(0, 2**64, settings.ngram, dtype=np.uint64) | np.uint64(1)
        self._numbers: dict[str, int] = {}
        self._short: dict[tuple[str, ...], str] = {}
        hashes, files = [], []
        self._files = [
            path for pattern in settings.paths for path in find_files(pattern, "prompts.decontaminate.paths")
        ]
        for number, path in enumerate(self._files):
            for text in _texts(path, settings.column):
                words = words_of(text)
                if len(words) < settings.ngram:
                    self._short.setdefault(tuple(words), path.name)
                    continue
                for word in words:
                    self._numbers.setdefault(word, len(self._numbers) + 1)
                hashes.append(self._hashes(words))
                files.append(np.full(len(hashes[-1]), number, dtype=np.int32))
        self._short.pop((), None)
        known, first = np.unique(np.concatenate([*hashes, np.empty(0, np.uint64)]), return_index=True)
        self._known: np.ndarray[Any, np.dtype[np.uint64]] = known
        self._file_of = np.concatenate([*files, np.empty(0, np.int32)])[first]

    def find(self, texts: Iterable[str]) -> str | None:
        """Return what the first contaminated text repeats, in words for the reject; None if all are clean."""
        return next((found for text in texts if (found := self._find(words_of(text)))), None)

    def _find(self, words: list[str]) -> str | None:
        import numpy as np

        if len(words) < self._ngram:
            file = self._short.get(tuple(words))
            return f"equals a prompt of {file}" if file else None
        if not len(self._known):
            return None
        hashes = self._hashes(words)
        places = np.searchsorted(self._known, hashes)
        hits = np.flatnonzero(self._known[np.minimum(places, len(self._known) - 1)] == hashes)
        if not len(hits):
            return None
        start = int(hits[0])
        quote = " ".join(words[start : start + self._ngram])[:_QUOTED]
        return f"{self._ngram} words of {self._files[self._file_of[places[start]]].name}: {quote}"

    def _hashes(self, words: list[str]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the hash of every n-gram: uint64 [len(words) - n + 1]. All unknown words have the number 0."""
        import numpy as np

        numbers = np.fromiter((self._numbers.get(word, 0) for word in words), np.uint64, len(words))
        return np.lib.stride_tricks.sliding_window_view(numbers, self._ngram) @ self._factors


def _texts(path: Path, column: str | None) -> Iterator[str]:
    """Yield the evaluation prompts of a file: the user's messages, or a column."""
    for row in read_rows(path):
        try:
            yield from _texts_of(row, column)
        except RejectedError as fault:
            raise Eagle3Error(
                "an evaluation prompt cannot be read",
                where=f"{path}, line {row.number}",
                found=fault,
                remedy="name the column that holds it under `prompts.decontaminate.column`",
            ) from None


def _texts_of(row: SourceRow, column: str | None) -> Iterator[str]:
    if row.fault:
        raise row.fault
    if not isinstance(row.value, Mapping):
        raise RejectedError("wrong_form", f"the row is a {type(row.value).__name__}")
    if column is not None:
        if not isinstance(row.value.get(column), str):
            raise RejectedError("wrong_form", f"no text under `{column}`")
        yield row.value[column]
        return
    if not (forms := detect_forms(row.value)):
        raise RejectedError("unknown_form", f"keys: {', '.join(map(str, row.value))}")
    # If a row can be read in several ways, every reading counts.
    for form in forms:
        messages = to_conversation(row.value, form).messages
        yield from (message["content"] for message in messages if message["role"] == "user")
