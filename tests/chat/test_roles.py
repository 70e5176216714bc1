"""Who wrote which token, for chat templates of several families."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagle3.chat.roles import Roles
from eagle3.chat.template import Chat, load_chat
from eagle3.cli.show import coloured
from eagle3.target.pin import Target
from tests.engines import targets

TEMPLATES = {
    "chatml": None,
    "default-system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "headers": (
        "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n{{ m.content | trim }}<|endoftext|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
    ),
    "no-system": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% elif m.role == 'user' %}<|im_start|> {{ m.content }}<|endoftext|>"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    ),
}
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|[]\0"), min_size=1, max_size=20).filter(str.strip)


@pytest.fixture(scope="module", params=[*TEMPLATES, "thinking"])
def chat(request: pytest.FixtureRequest, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = targets.make_tokenizer() if request.param == "thinking" else AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.chat_template = TEMPLATES.get(request.param) or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    eos = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return load_chat(Target(folder, "x", {"eagle3_eos_token_ids": eos}, trust_remote_code=False))


@given(texts=st.lists(WORDS, min_size=5, max_size=5), system=st.booleans())
def test_text_has_the_role_of_its_message(chat: Chat, texts: list[str], system: bool) -> None:
    names = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(names, texts, strict=False)]
    if not system or "no system" in chat.tokenizer.chat_template:
        del messages[0]
    prompt = chat.render(messages)
    closes = chat.reasoning_ids is not None
    answer = chat.encode([f"some apples</think>{texts[4]}" if closes else texts[4]])[0] + [min(chat.stop_ids)]
    sample = {"input_ids": prompt + answer, "spans": [[len(prompt), len(prompt) + len(answer)]]}
    segments = Roles(chat).segments(sample)

    assert sum(segment.tokens for segment in segments) == len(prompt + answer)
    written = {role: "".join(s.text for s in segments if s.role == role) for role in {s.role for s in segments}}
    for message in messages:
        assert message["content"].strip() in written[{"assistant": "history"}.get(message["role"], message["role"])]
    assert written["answer"] == texts[4]
    assert written.get("reasoning") == ("some apples" if closes else None)
    assert [s.generated for s in segments] == sorted(s.generated for s in segments)
    assert sum(s.tokens for s in segments if s.generated) == len(answer)
    assert all(s.role != "special" or s.text.startswith("<") for s in segments)


def test_colours_in_the_terminal(chat: Chat) -> None:
    prompt = chat.render([{"role": "user", "content": "the moon"}])
    answer = chat.encode(["the sea"])[0] + [min(chat.stop_ids)]
    sample = {"input_ids": prompt + answer, "spans": [[len(prompt), len(prompt) + len(answer)]]}
    text = coloured(sample, Roles(chat))
    assert text.plain == chat.tokenizer.decode(sample["input_ids"])
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert any("the moon" in part and style == "cyan" for part, style in styles.items())
    role = "yellow" if chat.reasoning_ids else "green"
    assert styles["the sea"] == f"bold underline {role}"
