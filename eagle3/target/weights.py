"""The tensors of the target that later stages read: embedding, final norm and lm_head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json
from eagle3.target.pin import Target

if TYPE_CHECKING:
    import torch

# Where the text model's tensors live: plain causal models, `kimi_k25`, and other multimodal models.
_MODEL_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")


_HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")


@dataclass(frozen=True)
class HeadWeights:
    """The target's input and output tensors, for the teacher and to initialize the draft. In the checkpoint's dtype."""

    embedding: torch.Tensor
    """[V, H]"""
    norm: torch.Tensor
    """[H], the final norm's weight"""
    lm_head: torch.Tensor
    """[V, H]; the embedding if the model ties them"""
    rms_norm_eps: float


def head_weights(target: Target) -> HeadWeights:
    """Read embedding, final norm and lm_head from the target's safetensors files, and nothing else.

    Raises:
        Eagle3Error: a tensor is missing, has another shape than the config says, or is quantised.
    """
    files = tensor_files(target.path)
    V, H = target.vocab_size, target.hidden_size
    embedding = _read(files, [prefix + "embed_tokens.weight" for prefix in _MODEL_PREFIXES], (V, H), target.path)
    norm = _read(files, [prefix + "norm.weight" for prefix in _MODEL_PREFIXES], (H,), target.path)
    head_names = [prefix + "lm_head.weight" for prefix in _HEAD_PREFIXES]
    # Configs without the key belong to models whose class ties by default, or that store a head.
    tied = target.config.get("tie_word_embeddings", not any(name in files for name in head_names))
    lm_head = embedding if tied else _read(files, head_names, (V, H), target.path)
    return HeadWeights(embedding, norm, lm_head, float(target.config["rms_norm_eps"]))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file for a folder of safetensors, sharded or not.

    Raises:
        Eagle3Error: there are no safetensors, or the index names a missing file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in read_json(index)["weight_map"].items()}
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise Eagle3Error(
                    "a weight file of the target is missing",
                    where=path,
                    expected=f"every file that {index.name} names",
                    remedy="complete the download of the model",
                )
        return files
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise Eagle3Error(
            "the target has no safetensors weights",
            where=folder,
            found=", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "no weights",
            remedy="convert it: load it with transformers and call save_pretrained()",
        )
    names: dict[str, Path] = {}
    for path in paths:
        # Only names are read here, so PyTorch, which takes seconds to import, is not needed.
        with _opened(path, "numpy") as file:
            names.update(dict.fromkeys(file.keys(), path))
    return names


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        Eagle3Error: it is truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise Eagle3Error(
            "a weight file of the target is truncated or damaged",
            where=path,
            found=error,
            remedy="download it again",
        ) from None


def _read(files: dict[str, Path], names: Sequence[str], shape: tuple[int, ...], folder: Path) -> torch.Tensor:
    """Read the first of `names` that exists; check its shape and dtype."""
    import torch

    name = next((name for name in names if name in files), None)
    if name is None:
        raise Eagle3Error(
            f"the target has no {names[0]}",
            where=folder,
            expected=f"one of {', '.join(names)}",
            remedy="use a causal language model with its lm_head, as published",
        )
    with _opened(files[name], "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    if tuple(tensor.shape) != shape or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Eagle3Error(
            f"the target's {name} is not what its config says, or it is quantised",
            where=files[name],
            found=f"{list(tensor.shape)} {tensor.dtype}",
            expected=f"{list(shape)} in bfloat16, float16 or float32",
            remedy="use a checkpoint whose embedding, final norm and lm_head are not quantised",
        )
    return tensor
