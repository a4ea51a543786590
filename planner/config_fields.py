"""Reading a Hugging Face config by name: numbers that are checked, and complaints that say which one."""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import PlanError

#: Larger numbers in a config are a mistake; they would only make a page of digits.
MAX_SIZE = 10**9
#: Layers are counted one by one.
MAX_LAYERS = 10_000


class Fields:
    """A config that is read by name, and complains by name."""

    def __init__(self, raw: Mapping[str, object], defaults: Mapping[str, object], *, name: str) -> None:
        # A null in the file is a value: it replaces the default.
        self._values = {**defaults, **raw}
        self._name = name

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        return self._number(key, default, least=1)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0."""
        return self._number(key, default, least=0)

    @property
    def num_layers(self) -> int:
        return self._number("num_hidden_layers", None, least=1, most=MAX_LAYERS)

    def _number(self, key: str, default: int | None, *, least: int, most: int = MAX_SIZE) -> int:
        found = self._values.get(key)
        value = default if found is None else found
        if value is None:
            raise PlanError(f"{self._name}: its config has no {key}, which the parameters follow from")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise PlanError(f"{self._name}: config.{key} is {value!r}; allowed: a whole number, {least} to {most}")
        return value

    def optional_size(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.size(key)

    def flag(self, key: str) -> bool:
        return bool(self._values.get(key))

    def names(self, key: str) -> list[str] | None:
        """A list, one entry a layer."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise PlanError(f"{self._name}: config.{key} is {value!r}; allowed: a list")
        return [str(item) for item in value]

    @property
    def name(self) -> str:
        return self._name

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def head_dim(self) -> int:
        heads = self.size("num_attention_heads")
        if self.optional_size("head_dim") is None and self.hidden % heads:
            raise PlanError(f"{self._name}: hidden_size {self.hidden} is not a multiple of {heads} attention heads")
        return self.size("head_dim", self.hidden // heads)


def text_config(raw: Mapping[str, object], *, name: str) -> Mapping[str, object]:
    """The language model's part of a config that also holds a vision tower."""
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, Mapping):
        raise PlanError(f"{name}: config.text_config is {nested!r}; allowed: an object")
    outer = raw.get("model_type")
    inherited = {"model_type": f"{outer}_text"} if "model_type" not in nested else {}
    if "tie_word_embeddings" in raw and "tie_word_embeddings" not in nested:
        inherited["tie_word_embeddings"] = raw["tie_word_embeddings"]  # type: ignore[assignment]
    return {**nested, **inherited}
