"""`prompts`: where prompts come from, which of them are used, and what they must not repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from eagle3.config.base import Settings
from eagle3.files.find import find_files

Form = Literal["messages", "sharegpt", "prompt", "alpaca", "turns"]
Value = str | int | float | bool | None


class HubSettings(Settings):
    """A data set on the Hugging Face hub; needs the extra `hub`."""

    dataset: str
    """Id of the data set, `owner/name`."""
    revision: str
    """Full commit, 40 hexadecimal digits ("History" on the data set's page), so that the rows are always the same."""
    split: str = "train"
    """Which split; `train[:10000]` takes its first rows."""
    subset: str | None = None
    """Configuration of the data set, if it has several."""

    @field_validator("dataset")
    @classmethod
    def _is_an_id(cls, value: str) -> str:
        owner, slash, name = value.partition("/")
        if not (owner and slash and name) or "/" in name or value.startswith("."):
            raise ValueError("the id of a data set, `owner/name`; files on disk go under `path`")
        return value

    @field_validator("revision")
    @classmethod
    def _is_a_commit(cls, value: str) -> str:
        if len(value) != 40 or not set(value) <= set("0123456789abcdef"):
            raise ValueError("a full commit (40 hexadecimal digits) from the data set's history on the hub")
        return value


class SourceSettings(Settings):
    """One source of prompts: exactly one of `path`, `synthetic` and `hub`."""

    path: str | None = None
    """File (JSONL, also `.gz` or `.zst`, JSON, Parquet), folder or glob, relative to the working directory. Content is
    hashed: an edited file reruns this stage, a touched one does not."""
    synthetic: bool = Field(default=False, validation_alias=AliasChoices("synthetic", "self"))
    """The target writes the user turns itself (section `synthetic`).

    Set it if you have no prompts."""
    hub: HubSettings | None = None
    """A data set on the Hugging Face hub, with the settings below. Needs `pip install -e ".[hub]"`.

    Without network access, download its files elsewhere and use `path`."""
    name: str | None = None
    """Name in counts and plots; null takes each file's stem, the name of the folder or data set, or `synthetic`."""
    form: Form | Literal["auto"] = "auto"
    """How a row holds a conversation: `messages`, `sharegpt`, `prompt`, `alpaca` or `turns` (examples below). `auto`
    looks at the rows of each file.

    Set it if the rows are ambiguous."""
    answers: Literal["regenerate", "as_is"] = "regenerate"
    """`regenerate`: the target answers every user message. `as_is`: the source's own answers are used and marked as
    off-policy; the target generates nothing.

    `as_is` for answers that the target gave elsewhere, or if generating costs too much. A draft trained on another
    model's answers is accepted less."""
    where: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Use only rows whose columns have these values: `{language: English, turn: [1, 2]}`. Others are counted as
    `filtered`. A missing column counts as null."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of prompts to use. Chosen by hash: always the same ones, and a larger limit keeps those of a
    smaller one."""
    weight: float = Field(default=1.0, gt=0, le=1)
    """Share of the source to keep, at most 1.

    Set it for a mix that resembles your traffic. A prompt left out here may still come from another source; one
    left out by `limit` may not."""

    @model_validator(mode="after")
    def _has_one_place(self) -> SourceSettings:
        if sum((self.path is not None, self.synthetic, self.hub is not None)) != 1:
            raise ValueError("exactly one of `path`, `synthetic: true` and `hub`")
        if self.synthetic and self.answers == "as_is":
            raise ValueError("synthetic prompts have no answers: `synthetic: true` needs `answers: regenerate`")
        return self


class DecontaminationSettings(Settings):
    """Evaluation prompts that the draft must not be trained on."""

    paths: list[str] = Field(default_factory=list)
    """Files, folders or globs of evaluation prompts, in the forms of sources. Prompts that repeat one are rejected as
    `contaminated`.

    Set it to the benchmarks that you evaluate on."""
    column: str | None = None
    """Column with the evaluation prompt, for files in none of those forms, e.g. `question`."""
    ngram: int = Field(default=13, ge=1)
    """Number of consecutive words in common that rejects a prompt; case and punctuation are ignored. A shorter
    evaluation prompt rejects only prompts equal to it.

    Lower values reject more, also by chance."""


class PromptsSettings(Settings):
    """Where prompts come from."""

    sources: list[SourceSettings] = Field(min_length=1)
    """List of sources, each with the settings below and exactly one of `path`, `synthetic` and `hub`."""
    parts: int = Field(default=1, ge=1)
    """Jobs that generation and capture are divided into. Each starts the engine once.

    One per node, or more if a job must fit a time limit. A change moves every prompt to another part."""
    max_chars: int = Field(default=200_000, ge=1)
    """Maximum number of characters in a conversation. Longer ones are rejected."""
    duplicates: Literal["exact", "normalised"] = "normalised"
    """Which repeated prompts are rejected: `exact` duplicates only, or also those that differ only in case and
    whitespace.

    `exact` for code, if case matters."""
    decontaminate: DecontaminationSettings = DecontaminationSettings()
    seed: int = 0
    """Seed of which prompts a `limit` or `weight` picks. Follows the top-level `seed` unless set."""

    @field_validator("sources")
    @classmethod
    def _one_synthetic(cls, sources: list[SourceSettings]) -> list[SourceSettings]:
        if sum(source.synthetic for source in sources) > 1:
            raise ValueError("at most one source with `synthetic: true`; its `synthetic.count` says how many turns")
        return sources

    def outside_files(self) -> list[Path]:
        """Return the files of the sources, then those of the evaluations: in their order, sorted within each.

        Raises:
            Eagle3Error: a path or glob matches no file.
        """
        patterns = [(source.path, "prompts.sources") for source in self.sources if source.path is not None]
        patterns += [(path, "prompts.decontaminate.paths") for path in self.decontaminate.paths]
        return [path for pattern, setting in patterns for path in find_files(pattern, setting)]

    @property
    def synthetic(self) -> bool:
        """Whether the target writes prompts itself."""
        return any(source.synthetic for source in self.sources)

    @property
    def regenerate(self) -> bool:
        """Whether the target answers any of the prompts."""
        return any(source.answers == "regenerate" for source in self.sources)
