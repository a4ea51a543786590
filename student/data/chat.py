"""Conversations to token ids, with a mark on the tokens that the assistant has to produce itself.

Two ways to find those tokens. A template with `{% generation %}` blocks says it. For any other, the conversation is
rendered several times: up to a turn with the generation prompt (there the assistant begins) and up to and including the
turn (there it ends); both must agree, token by token, with the beginning of the whole conversation. A template that
tells neither is refused: a guess would train the student on the user's words.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Messages = Sequence[Mapping[str, Any]]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# At the seam of two pieces of text the tokenizer may merge what it would keep apart in one of them alone.
_SEAM_TOKENS = 1
# What templates call to learn the date. They get a fixed one: the same file gives the same tokens on every day.
_DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_FIXED_DATE = dt.date(2025, 1, 1)


def _with_fixed_date(template: str) -> str:
    return _DATE_CALL.sub(lambda call: repr(_FIXED_DATE.strftime(call[2])), template)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def _without_nulls(value: Any) -> Any:
    """Drops empty fields at every depth: Parquet gives all structs the union of their fields."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


class ChatEncoder:
    """Turns conversations into ids and marks, with one tokenizer and its chat template.

    Raises ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template, which `messages` need")
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {token_id for token_id, token in added if token.special} | set(tokenizer.all_special_ids)
        self._turn_end_id = self._find_turn_end()

    def encode(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[list[int], BoolArray]:
        """The ids of a conversation and, of the same length, which of them are the assistant's.

        An assistant's tokens reach up to and including its end-of-turn token; what follows (a line break of the
        template) is not its own.

        Raises ValueError: messages that are no list of maps with a role, or assistant turns that can't be told apart.
        jinja2.TemplateError: the template refuses the conversation.
        """
        messages = [_without_nulls(message) for message in messages]
        if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
            raise ValueError("`messages` must be a list of maps with a `role`")
        tools = _without_nulls(tools) or None
        template = self._template(tools)
        # Only tokenizers with offsets can tell which tokens a marked block became.
        if self._tokenizer.is_fast and _GENERATION_BLOCK.search(template):
            return self._encode_marked(messages, tools)
        return self._encode_by_prefixes(messages, tools)

    def _encode_marked(self, messages: Messages, tools: Any) -> tuple[list[int], BoolArray]:
        encoded = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template(tools),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = list(encoded["input_ids"])
        mask = np.array(encoded["assistant_masks"], dtype=bool)
        # Some templates close the block before the end of the turn; a student must learn to end one.
        for place in range(1, len(ids)):
            if ids[place] == self._turn_end_id and mask[place - 1] and not mask[place]:
                mask[place] = ids[place - 1] != self._turn_end_id
        return ids, mask

    def _encode_by_prefixes(self, messages: Messages, tools: Any) -> tuple[list[int], BoolArray]:
        ids = self._ids(messages, tools)
        mask = np.zeros(len(ids), dtype=bool)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._turn_start(ids, messages[:turn], tools)
                mask[start : self._turn_stop(ids, start, messages[: turn + 1], tools)] = True
        return ids, mask

    def _turn_start(self, ids: list[int], before: Messages, tools: Any) -> int:
        """Where in `ids` the assistant takes over after the messages `before`."""
        if not before:
            raise ValueError(
                "the conversation begins with the assistant, and the chat template has no {% generation %} block to "
                "tell where its words begin"
            )
        plain = self._ids(before, tools)
        prompted = self._ids(before, tools, add_generation_prompt=True)
        start = _common_prefix(ids, prompted)
        if start < len(plain) - _SEAM_TOKENS:
            raise ValueError(
                f"turn {len(before)}: the chat template renders what comes before it differently in the whole "
                "conversation, and has no {% generation %} block: the assistant's tokens can't be told apart"
            )
        return start

    def _turn_stop(self, ids: list[int], start: int, upto: Messages, tools: Any) -> int:
        """Behind the last of the assistant's own tokens of a turn that begins at `start`."""
        rendered = self._ids(upto, tools)
        agree = _common_prefix(ids, rendered)
        if agree >= len(rendered) - _SEAM_TOKENS:
            ends = [place for place in range(start, agree) if ids[place] in self._special_ids]
            return ends[-1] + 1 if ends else agree
        # Templates that leave the thoughts of earlier turns out of the whole conversation come here.
        if self._turn_end_id is not None and self._turn_end_id in ids[start:]:
            return ids.index(self._turn_end_id, start) + 1
        raise ValueError(
            f"turn {len(upto) - 1}: the chat template has no {{% generation %}} block and no end-of-turn token: the "
            "assistant's tokens can't be told apart"
        )

    def _find_turn_end(self) -> int | None:
        """The token that ends an assistant's turn, from a conversation of one question and one answer."""
        import jinja2  # the chat templates' own language; transformers needs it for them as well

        question: Messages = [{"role": "user", "content": "1"}]
        try:
            prompt = self._ids(question, None, add_generation_prompt=True)
            whole = self._ids([*question, {"role": "assistant", "content": "2"}], None)
        except (jinja2.TemplateError, ValueError, TypeError):
            # A template that wants more than that (a system turn, tools): its end-of-text token is what is left.
            eos_id: int | None = self._tokenizer.eos_token_id
            return eos_id
        answer = whole[_common_prefix(prompt, whole) :]
        return next((token_id for token_id in reversed(answer) if token_id in self._special_ids), None)

    def _template(self, tools: Any) -> str:
        # Some tokenizers have one of their own for conversations with tools.
        return _with_fixed_date(self._tokenizer.get_chat_template(None, tools))

    def _ids(self, messages: Messages, tools: Any, *, add_generation_prompt: bool = False) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=self._template(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        # The template has written the special tokens already.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
