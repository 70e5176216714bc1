"""Hub data sets, through the library `datasets` (the extra `hub`)."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.config.prompts import HubSettings
from eagle3.errors import Eagle3Error
from eagle3.prompts.sources import SourceRow

_ROWS = 1000


def read_hub(settings: HubSettings) -> Iterator[SourceRow]:
    """Yield the rows of a data set at its pinned commit, downloading it unless it is in the hub's cache.

    Rows are read from Arrow as they are: images and sounds stay bytes and are not decoded.

    Raises:
        Eagle3Error: the extra is not installed, the hub cannot be reached, or there is no such data set or split.
    """
    try:
        import datasets
    except ImportError:
        raise Eagle3Error(
            "hub data sets need the library `datasets`",
            where=f"`prompts.sources`, hub data set {settings.dataset}",
            remedy='pip install -e ".[hub]"',
        ) from None
    try:
        builder = datasets.load_dataset_builder(settings.dataset, settings.subset, revision=settings.revision)
        # Without a network the library takes any commit in its cache, and it prefers a local folder of that name.
        if builder.hash != settings.revision:
            raise LookupError(f"the cache, or a folder of that name, holds another version: {builder.hash}")
        builder.download_and_prepare()
        table = builder.as_dataset(split=settings.split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, LookupError) as error:
        raise Eagle3Error(
            "a hub data set cannot be read",
            where=f"`prompts.sources`, {settings.dataset} at {settings.revision}, split {settings.split}",
            found=error,
            remedy="check id, subset, split and commit (HF_TOKEN is for private ones); without a network, download the"
            " files elsewhere and use `path`",
        ) from None
    number = 0
    for batch in table.with_format("arrow").iter(_ROWS):
        for value in batch.to_pylist():
            number += 1
            yield SourceRow(number, value)
