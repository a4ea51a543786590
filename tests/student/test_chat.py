"""Conversations: only what the assistant has to say itself counts, whatever the chat template looks like."""

from __future__ import annotations

from typing import Any

import pytest

from ring.core.errors import ConfigError
from student.data.chat import ChatEncoder
from tests.student.conftest import Load, WriteLines
from tests.tiny_models import tiny_tokenizer

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
PLAIN = [
    {"role": SYSTEM, "content": "be brief"},
    {"role": USER, "content": "first question"},
    {"role": ASSISTANT, "content": "first answer"},
    {"role": USER, "content": "second question"},
    {"role": ASSISTANT, "content": "second answer"},
]

# The shapes of the templates that common families use, written down anew for the markers of each.
CHAT_ML = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# The end-of-turn token stands outside of the marked block.
MARKED_WITHOUT_END = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# No generation prompt at all, and the end-of-text token ends a turn.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}<|endoftext|>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
# No special token anywhere.
SCRIPT = (
    "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Thoughts are kept in the last turn only, and the prompt opens them.
THINKING = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n<think>{% endif %}"
)
# What comes before a turn depends on how many turns there are: no prefix of anything.
UNSTABLE = "{{ messages | length }} turns {% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def spans(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The text of each run of counted tokens."""
    ids, mask = ChatEncoder(tokenizer).encode(messages, **options)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for place, token_id in enumerate(ids):
        if mask[place]:
            if place == 0 or not mask[place - 1]:
                runs.append([])
            runs[-1].append(token_id)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, "<|end|>"),
        (CHAT_ML, "<|end|>"),
        (MARKED_WITHOUT_END, "<|end|>"),
        (BRACKETS, "<|endoftext|>"),
        (SCRIPT, "\n\n"),
    ],
    ids=["marked", "chat-ml", "marked-without-end", "brackets", "script"],
)
def test_assistant_tokens_up_to_and_including_the_end_of_turn_count(template: str | None, end: str) -> None:
    tokenizer = tiny_tokenizer() if template is None else tokenizer_with(template)
    assert [span.lstrip() for span in spans(tokenizer, PLAIN)] == [f"first answer{end}", f"second answer{end}"]


def test_whole_conversation_is_what_the_template_renders() -> None:
    for template in (CHAT_ML, MARKED_WITHOUT_END, SCRIPT):
        tokenizer = tokenizer_with(template)
        ids, _ = ChatEncoder(tokenizer).encode(PLAIN)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(PLAIN, tokenize=False)


def test_both_ways_to_find_the_assistant_agree() -> None:
    marked = tiny_tokenizer()
    template = marked.chat_template
    assert isinstance(template, str)
    unmarked = tokenizer_with(template.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    ids, mask = ChatEncoder(marked).encode(PLAIN)
    other_ids, other_mask = ChatEncoder(unmarked).encode(PLAIN)
    assert ids == other_ids
    assert mask.tolist() == other_mask.tolist()


def test_thoughts_that_later_turns_drop_are_left_out_and_the_answers_count() -> None:
    messages = [
        {"role": USER, "content": "q1"},
        {"role": ASSISTANT, "content": "<think>hidden</think>a1"},
        {"role": USER, "content": "q2"},
        {"role": ASSISTANT, "content": "<think>shown</think>a2"},
    ]
    first, second = spans(tokenizer_with(THINKING), messages)
    assert first == "a1<|end|>"
    # The prompt gave "<think>" already: the student has to go on from there.
    assert second == "shown</think>a2<|end|>"


def test_turns_in_a_row_and_tools_are_told_apart() -> None:
    messages = [
        {"role": USER, "content": "weather?"},
        {"role": ASSISTANT, "content": "call weather"},
        {"role": TOOL, "content": "sun"},
        {"role": ASSISTANT, "content": "it is sunny"},
        {"role": ASSISTANT, "content": "enjoy"},
    ]
    assert spans(tokenizer_with(CHAT_ML), messages) == ["call weather<|end|>", "it is sunny<|end|>", "enjoy<|end|>"]


def test_nulls_of_the_table_format_never_reach_the_template() -> None:
    template = "{% for m in messages %}{{ m | tojson }}<|end|>{% endfor %}"
    messages = [
        {"role": USER, "content": "q", "tool_calls": None},
        {"role": ASSISTANT, "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": None}}]},
    ]
    tokenizer = tokenizer_with(template)
    ids, _ = ChatEncoder(tokenizer).encode(messages)
    text = tokenizer.decode(ids)
    assert "null" not in text
    assert '"x": 1' in text


def test_tools_are_given_to_the_template(write_lines: WriteLines, load: Load) -> None:
    template = "{% if tools %}TOOLS {{ tools[0]['name'] }}<|end|>{% endif %}" + CHAT_ML
    turns = [{"role": USER, "content": "q"}, {"role": ASSISTANT, "content": "a"}]
    records = [{"messages": turns, "tools": [{"name": "clock"}]}, {"messages": turns, "tools": None}]
    tokenizer = tokenizer_with(template)
    dataset = load(write_lines(records), tokenizer=tokenizer)
    first, second = (tokenizer.decode(dataset.sample(i).token_ids.tolist()) for i in (0, 1))
    assert first.startswith("TOOLS clock<|end|>")
    assert not second.startswith("TOOLS")


def test_a_template_that_asks_for_the_date_gives_the_same_ids_on_every_day() -> None:
    tokenizer = tokenizer_with("{{ strftime_now('%Y-%m-%d') }} " + CHAT_ML)
    ids, _ = ChatEncoder(tokenizer).encode(PLAIN)
    assert tokenizer.decode(ids).startswith("2025-01-01 ")


def test_prompt_of_three_and_completion_of_two_give_exactly_rows_two_and_three(
    write_lines: WriteLines, load: Load
) -> None:
    # The system turn is one token, the question another; see case "first completion token skipped".
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    messages = [{"role": USER, "content": "<|turn|><|turn|><|turn|>"}, {"role": ASSISTANT, "content": "x<|end|>"}]
    sample = load(write_lines([{"messages": messages}]), tokenizer=tokenizer_with(template)).sample(0)
    assert len(sample.token_ids) == 5
    assert sample.row_ranges == ((2, 4),)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (UNSTABLE, PLAIN, "can't be told apart"),
        (CHAT_ML, PLAIN[2:], "begins with the assistant"),
        ("{{ raise_exception('roles must alternate') }}", PLAIN, "roles must alternate"),
        ("", PLAIN, "no chat template"),
    ],
    ids=["unstable", "assistant-first", "template-refuses", "no-template"],
)
def test_what_can_not_be_told_apart_is_refused_in_one_line(
    template: str, messages: list[dict[str, Any]], reason: str, write_lines: WriteLines, load: Load
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write_lines([{"messages": messages}]), tokenizer=tokenizer_with(template))
    assert reason in str(caught.value)
    assert "record 1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_conversation_without_an_assistant_is_dropped(write_lines: WriteLines, load: Load) -> None:
    dataset = load(write_lines([{"messages": PLAIN[:2]}, {"messages": PLAIN}]))
    assert dataset.num_samples == 1
    assert dataset.report.num_samples_without_target == 1
