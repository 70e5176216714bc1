"""Chat completions: the request to an OpenAI-compatible server, and what is kept of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.engines.base import GenerationRequest, Sampling
from eagle3.records import Message


def body_of(request: GenerationRequest, sampling: Sampling, model: str) -> dict[str, Any]:
    """Return the body of `POST /chat/completions`, with the fields that every server knows.

    With `prompt_ids` it is the body of `POST /completions`.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.seed,
    }
    if request.prompt_ids is not None:
        return body | {"prompt": request.prompt_ids}
    body["messages"] = [_for_server(message) for message in request.messages]
    if request.tools:
        body["tools"] = request.tools
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    return body


def _for_server(message: Message) -> Mapping[str, object]:
    """Return a message of the history with its reasoning in both fields: vLLM reads `reasoning`, SGLang the other."""
    if reasoning := message.get("reasoning"):
        return {**message, "reasoning_content": reasoning}
    return message


def read_message(choice: dict[str, Any]) -> Message:
    """Return the assistant message of an answer, for the next turn's history."""
    answer = choice.get("message") or {"content": choice["text"]}
    message: Message = {"role": "assistant", "content": answer.get("content") or ""}
    if reasoning := answer.get("reasoning") or answer.get("reasoning_content"):
        message["reasoning"] = reasoning
    if calls := answer.get("tool_calls"):
        message["tool_calls"] = calls
    return message


# Token ids are stored next to the raw answer; the others differ from run to run.
_DROPPED = frozenset({"prompt_token_ids", "token_ids", "id", "created", "system_fingerprint"})


def read_raw(answer: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the answer without token ids (stored elsewhere) and nulls, with the seconds it took."""
    raw = {key: value for key, value in answer.items() if key not in _DROPPED}
    raw["choices"] = [{k: v for k, v in choice.items() if k not in _DROPPED} for choice in answer["choices"]]
    kept: dict[str, Any] = _without_nulls(raw)
    return kept | {"seconds": round(seconds, 4)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
