"""Chat: messages become prompt ids, generated ids become a message, as the target's own chat template defines.

A finished conversation is never rendered for training: templates drop earlier reasoning. What is trained on is
the prompt as rendered for generation, followed by the ids that the engine produced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import orjson

from eagle3.errors import Eagle3Error, RejectedError
from eagle3.records import Message
from eagle3.target.pin import Target

# Tokens between which models of several families put their reasoning.
_REASONING_MARKERS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Chat:
    """The target's tokenizer and what its chat template means.

    Attributes:
        tokenizer: the transformers tokenizer.
        stop_ids: ids that end a generation: the end-of-text ids of the target and the end of a turn.
        control: id -> text of the tokens that steer the model: special tokens, and whatever else of the added
            vocabulary the template writes (such as `<think>`). Text from a user must never become one of them.
        turn_ids: the control tokens that open, divide and close turns. None belongs inside an answer.
        reasoning_ids: the ids that open and close reasoning, if the tokenizer has such tokens.
    """

    tokenizer: Any
    stop_ids: frozenset[int]
    control: Mapping[int, str]
    turn_ids: frozenset[int]
    reasoning_ids: tuple[int, int] | None

    @property
    def answer_ids(self) -> frozenset[int]:
        """Control tokens that the target writes itself: ends, marks of reasoning, marks of tool calls."""
        written = {id for id, text in self.control.items() if text in self.tokenizer.chat_template}
        return frozenset(self.stop_ids | (written - self.turn_ids))

    @cached_property
    def marks(self) -> frozenset[str]:
        """Control tokens that the target writes inside its answers, except around reasoning: marks of tool calls."""
        ids = self.answer_ids - self.stop_ids - set(self.reasoning_ids or ())
        return frozenset(self.control[id] for id in ids)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt ids that ask the target for the next assistant message.

        Args:
            messages: ends in a user (or tool) message; reasoning of earlier answers under `reasoning`.
            tools: JSON schemas, as the template wants them.
            template_kwargs: arguments of the template, e.g. `enable_thinking`.

        Raises:
            RejectedError: `special_token_in_text` if text would turn into a control token,
                `template_error` if the template refuses the conversation.
        """
        return self.encode([self.render_text(messages, tools=tools, template_kwargs=template_kwargs)])[0]

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Like `render`, before tokenising."""
        for message in messages:
            texts = (message["content"], message.get("name") or "", message.get("tool_call_id") or "")
            if message["role"] != "assistant" and (found := [mark for text in texts for mark in self.control_in(text)]):
                raise RejectedError("special_token_in_text", f"{found[0]!r} in a {message['role']} message")
        if tools and (found := self.control_in(orjson.dumps(tools).decode())):
            raise RejectedError("special_token_in_text", f"{found[0]!r} in the schema of a tool")
        return self.write(messages, None, tools, template_kwargs or {})

    def write(
        self,
        history: Sequence[Message],
        answer: Message | None,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Return what the template writes for a conversation: to ask for an answer (None), or with that answer.

        Arguments of tool calls in the history become mappings, as in engines and as most templates expect.

        Raises:
            RejectedError: `template_error`.
        """
        last = [] if answer is None else [answer]
        parsed = [_with_mappings(message) for message in history]
        try:
            return self.apply([*parsed, *last], tools, template_kwargs, generate=answer is None)
        except RejectedError:
            if parsed == list(history):
                raise
            return self.apply([*history, *last], tools, template_kwargs, generate=answer is None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts unchanged, control tokens as single ids; fast tokenizers use all cores for many texts."""
        if (fast := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            return [found.ids for found in fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def control_in(self, text: str) -> list[str]:
        """Return the control tokens that the tokenizer finds in `text`."""
        if self._control_pattern is not None and not self._control_pattern.search(text):
            return []
        return [self.control[id] for id in self.encode([text])[0] if id in self.control]

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Message:
        """Return generated ids as an assistant message, for the history of later turns."""
        reasoning, content = self.split_reasoning(prompt_ids, token_ids)
        message: Message = {"role": "assistant", "content": self._decode(content)}
        if reasoning is not None:
            message["reasoning"] = self._decode(reasoning)
        return message

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside reasoning: its last reasoning mark is an opening one."""
        if self.reasoning_ids is None:
            return False
        return next((id == self.reasoning_ids[0] for id in reversed(prompt_ids) if id in self.reasoning_ids), False)

    def split_reasoning(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[list[int] | None, list[int]]:
        """Divide generated ids into reasoning (None if none was begun) and content, without marks and end.

        Reasoning may be opened by the prompt (the template ends in `<think>`) or by the first generated
        token. If it was never closed, everything is reasoning.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        if self.reasoning_ids is None:
            return None, ids
        opening, closing = self.reasoning_ids
        begun = self.opens_reasoning(prompt_ids)
        if ids and ids[0] == opening:
            begun, ids = True, ids[1:]
        if not begun:
            return None, ids
        end = ids.index(closing) if closing in ids else len(ids)
        return ids[:end], ids[end + 1 :]

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        """Matches text that may contain a control token; None if a normaliser could turn other text into one."""
        normalizer = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "normalizer", self)
        added = self.tokenizer.added_tokens_decoder
        if normalizer is not None and any(added[id].normalized for id in self.control):
            return None
        return re.compile("|".join(map(re.escape, self.control.values())))

    def apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        *,
        generate: bool,
    ) -> str:
        """Return what the template writes.

        Raises:
            RejectedError: `template_error`.
        """
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generate,
                tokenize=False,
                **template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RejectedError("template_error", str(error)) from None
        return str(text)


def load_chat(target: Target) -> Chat:
    """Load the target's tokenizer and find out what its chat template does.

    Raises:
        Eagle3Error: there is no tokenizer, no chat template, or nothing that ends a generation.
    """
    tokenizer = _load_tokenizer(target)
    eos_ids = {*target.eos_token_ids, *_ids(tokenizer.eos_token_id)}
    if not eos_ids:
        raise Eagle3Error(
            "the target has no end-of-text token, so its answers would never end",
            where=target.path,
            expected="`eos_token_id` in generation_config.json or config.json, or a tokenizer's `eos_token`",
        )
    control = _control_tokens(tokenizer)
    reasoning = _reasoning_ids(tokenizer)
    probe = Chat(tokenizer, frozenset(), control, frozenset(), reasoning)
    asking, finished = (_probe(probe, target, answered=answered) for answered in (False, True))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asking, finished, strict=False)))
    turn_ids = {id for id in (*asking, *finished) if id in control} - set(reasoning or ())
    # After the answer, the last control token closes the turn.
    stop_ids = eos_ids | set([id for id in finished[shared:] if id in turn_ids][-1:])
    never = {*_ids(tokenizer.bos_token_id), *_ids(tokenizer.pad_token_id), *_ids(tokenizer.unk_token_id)}
    return Chat(tokenizer, frozenset(stop_ids), control, frozenset(turn_ids | stop_ids | never), reasoning)


def _load_tokenizer(target: Target) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.path, trust_remote_code=target.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise Eagle3Error(
            "the target's tokenizer cannot be loaded",
            where=target.path,
            found=error,
            remedy="if it needs the model's own Python code, read that code and set `target.trust_remote_code`",
        ) from None
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # Some tokenizer files contain truncation and padding settings.
        fast.no_truncation()
        fast.no_padding()
    if not isinstance(tokenizer.chat_template, str):
        raise Eagle3Error(
            "the target has no chat template",
            where=target.path,
            found=type(tokenizer.chat_template).__name__,
            expected="chat_template.jinja, or `chat_template` in tokenizer_config.json",
            remedy="use an instruction-tuned target, or add the template that it is served with",
        )
    return tokenizer


def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return id -> text of the special tokens, and of the added tokens that the template writes.

    Other added tokens are plain text (runs of spaces, HTML tags), and the unknown token comes from plain text.
    """
    unknown = set(_ids(tokenizer.unk_token_id))
    return {
        id: token.content
        for id, token in sorted(tokenizer.added_tokens_decoder.items())
        if id not in unknown and (token.special or (token.content.strip() and token.content in tokenizer.chat_template))
    }


def _reasoning_ids(tokenizer: Any) -> tuple[int, int] | None:
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    pairs = (pair for pair in _REASONING_MARKERS if all(mark in added for mark in pair))
    return next(((added[opening], added[closing]) for opening, closing in pairs), None)


def _probe(chat: Chat, target: Target, *, answered: bool) -> list[int]:
    """Render a tiny conversation; without a system message if the template does not support one."""
    system: Message = {"role": "system", "content": "a"}
    rest: list[Message] = [{"role": "user", "content": "b"}]
    if answered:
        rest.append({"role": "assistant", "content": "c"})
    try:
        return chat.encode([chat.apply([system, *rest], None, {}, generate=not answered)])[0]
    except RejectedError:
        pass
    try:
        return chat.encode([chat.apply(rest, None, {}, generate=not answered)])[0]
    except RejectedError as error:
        raise Eagle3Error(
            "the target's chat template cannot render a plain conversation",
            where=target.path,
            found=error.detail,
            expected="a template for messages with `role` and `content`",
        ) from None


def _for_template(message: Message) -> dict[str, Any]:
    """Copy reasoning to `reasoning_content`: most templates read it there, some under `reasoning`."""
    value = dict(message)
    if reasoning := value.get("reasoning"):
        value["reasoning_content"] = reasoning
    return value


def _with_mappings(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [with_mapping(call) for call in calls]} if calls else message


def with_mapping(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as a mapping, if they are one."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        with suppress(orjson.JSONDecodeError):
            function["arguments"] = orjson.loads(function["arguments"])
    return {**call, "function": function}


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
