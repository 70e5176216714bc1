"""Settings of the prompts: their sources, what is taken of them, and what they must not repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from eagle3.config.base import Settings
from eagle3.files.find import find_files

Form = Literal["messages", "sharegpt", "prompt", "alpaca", "turns"]
Value = str | int | float | bool | None


class HubSettings(Settings):
    """A data set of the Hugging Face hub; needs the extra `hub`."""

    dataset: str
    """Its id, `owner/name`."""
    revision: str
    """The commit, so that the same rows come every time: 40 hexadecimal digits."""
    split: str = "train"
    """Which split."""
    subset: str | None = None
    """Which configuration of the data set, if it has several."""

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
    """File (JSONL, also .gz or .zst, JSON, Parquet), folder or glob, relative to the working directory."""
    synthetic: bool = Field(default=False, validation_alias=AliasChoices("synthetic", "self"))
    """The target writes the user turns, as the section `synthetic` says."""
    hub: HubSettings | None = None
    """A data set of the hub."""
    name: str | None = None
    """Name in counts and plots; by default each file's stem, the folder's or the data set's name, or `synthetic`."""
    form: Form | Literal["auto"] = "auto"
    """`messages`, `sharegpt` (`from` and `value`), `prompt` (and completion), `alpaca` (`instruction` and `input`)
    or `turns` (a list of user messages); `auto` looks at the rows of each file."""
    answers: Literal["regenerate", "as_is"] = "regenerate"
    """Whether the target answers anew, or the answers in the source are used as they are."""
    where: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Take only rows whose columns have these values: column -> value, or list of values."""
    limit: int | None = Field(default=None, ge=1)
    """Take at most so many, chosen by hash and therefore always the same ones."""
    weight: float = Field(default=1.0, gt=0, le=1)
    """Share of the source to keep."""

    @model_validator(mode="after")
    def _has_one_place(self) -> SourceSettings:
        if sum((self.path is not None, self.synthetic, self.hub is not None)) != 1:
            raise ValueError("exactly one of `path`, `synthetic: true` and `hub`")
        if self.synthetic and self.answers == "as_is":
            raise ValueError(
                "what the target writes itself has no answers: `synthetic: true` needs `answers: regenerate`"
            )
        return self


class DecontaminationSettings(Settings):
    """Evaluation prompts that must not be trained on."""

    paths: list[str] = Field(default_factory=list)
    """Files, folders or globs of evaluation prompts, in the forms that sources have."""
    column: str | None = None
    """Column with the evaluation prompt, for rows in none of those forms."""
    ngram: int = Field(default=13, ge=1)
    """So many words in a row in common reject a prompt; shorter evaluation prompts must be equal."""


class PromptsSettings(Settings):
    """Where prompts come from."""

    sources: list[SourceSettings] = Field(min_length=1)
    parts: int = Field(default=1, ge=1)
    """Jobs that the work is divided into: one engine's lifetime each."""
    max_chars: int = Field(default=200_000, ge=1)
    """Longer conversations are rejected."""
    duplicates: Literal["exact", "normalised"] = "normalised"
    """Which repeated prompts are rejected: equal ones, or also those equal but for case and blanks."""
    decontaminate: DecontaminationSettings = DecontaminationSettings()
    seed: int = 0

    @field_validator("sources")
    @classmethod
    def _one_self(cls, sources: list[SourceSettings]) -> list[SourceSettings]:
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
        """Whether the target is to write prompts itself."""
        return any(source.synthetic for source in self.sources)

    @property
    def regenerate(self) -> bool:
        """Whether the target is to answer anything."""
        return any(source.answers == "regenerate" for source in self.sources)
