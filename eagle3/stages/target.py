"""Target: a model's name or folder in, `target.json` out: where the model is, and exactly which one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.config.target import TargetSettings
from eagle3.files.records import write_json
from eagle3.target import demo
from eagle3.target.model_folder import locate, read_text_config, revision
from eagle3.target.pin import load_target
from eagle3.target.weights import head_weights, tensor_files

PIN = "target.json"


def make(settings: TargetSettings, *, folder: Path) -> dict[str, Any]:
    """Write `target.json` into `folder`, and for the demo the model's files into `model/` next to it.

    Returns:
        counts for the manifest and the console.

    Raises:
        Eagle3Error: the model cannot be found, downloaded or used.
    """
    if settings.model == demo.NAME:
        demo.make(folder)
        model, path = folder / demo.MODEL, demo.MODEL
    else:
        model = locate(settings)
        path = str(model)
    config = read_text_config(model, settings.trust_remote_code)
    write_json(
        folder / PIN,
        {
            "path": path,
            "revision": revision(model),
            "config": config,
            "trust_remote_code": settings.trust_remote_code,
        },
    )
    target = load_target(folder / PIN)
    head_weights(target)
    return {
        "model": settings.model,
        "revision": target.revision,
        "type": config.get("model_type", "unknown"),
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "weights (GB)": sum(file.stat().st_size for file in set(tensor_files(model).values())) / 1e9,
    }
