"""kimi-nano's tokenizer and chat template: Kimi's special tokens, and how its template treats reasoning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TURN, CLOSE = "<|im_end|>", "</think>"
SPECIAL = (
    *("[BOS]", "[EOS]", "[PAD]", "[UNK]", "[EOT]"),
    *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
VOCABULARY = 768

# An answer keeps its reasoning only until the results of its tool calls are answered: up to the last answer without a
# call it is blanked. A finished conversation thus shows no reasoning, so it must never be what is trained on.
CHAT_TEMPLATE = """\
{%- set finished = namespace(upto=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and not message.get('tool_calls') %}{% set finished.upto = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{%- else -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.role == 'assistant' -%}
<think>{% if loop.index0 > finished.upto %}{{ message.reasoning or message.reasoning_content or '' }}{% endif %}</think>
{%- endif -%}
{{ message.content or '' }}
{%- if message.get('tool_calls') -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
{%- set arguments = call.function.arguments -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{% if thinking is defined and not thinking %}</think>{% endif %}
{%- endif -%}
"""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a small byte-level BPE tokenizer on `texts`, and give it the special tokens and the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="[BOS]", eos_token="[EOS]", pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
