"""`target`: the model to serve faster."""

from __future__ import annotations

from eagle3.config.base import Settings


class TargetSettings(Settings):
    """The model to serve faster."""

    model: str = "smollm2-135m-instruct"
    """A local folder with safetensors, a hub id such as `org/name`, or `smollm2-135m-instruct`, the demo target (built
    from a pinned package; needs no hub).

    Use a local folder for large models."""
    revision: str | None = None
    """Commit of a hub id; null takes the newest. Ignored for folders, whose content is hashed.

    Set it to make the run reproducible."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model.

    Set it only if the model does not load otherwise, and you have read that code."""
