"""A Hugging Face causal LM to train, from a directory or the hub, checked: a `LoadedStudent`, or one clear ConfigError.

transformers fills what a checkpoint lacks with random numbers and goes on; here that is an error. Starting from random
weights is possible, but only where it is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from planner.head_spec import HeadSpec, head_spec_of, max_positions_of
from planner.hub import is_only_cached
from planner.token_map import num_tokens_of
from ring.core.errors import ConfigError
from student.probe import check_head

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = ("tokenizer*.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedStudent:
    """`model`: the causal LM, in training mode. `tokenizer`: None where the source has none.

    `num_ids`: token ids below it can be read and predicted. `max_positions`: the longest sequence that the model has
    positions for; None = no bound.
    """

    source: str
    model: Any
    tokenizer: Any | None
    head_spec: HeadSpec
    num_ids: int
    max_positions: int | None


def load_student(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    from_config: bool = False,
    seed: int = 0,
    attn_implementation: str | None = None,
    device: str | torch.device = "cpu",
) -> LoadedStudent:
    """The student in `source`: a checkpoint directory or a hub id.

    `dtype`: of the weights that are trained (float32 also under bf16 autocast). `from_config`: random weights from
    `seed` instead of the checkpoint's; config.json and a tokenizer are enough then. `attn_implementation`: as
    transformers takes it; None = its choice. `device`: where it will train, and is checked: kernels differ.

    Raises ConfigError, in one line: nothing there, a part missing or broken, a model that can't be trained this way.
    """
    source = os.path.expanduser(source)
    _check_source(source, from_config=from_config)
    options: dict[str, Any] = {"trust_remote_code": False}
    fetching = options | {"local_files_only": _is_only_cached(source)}
    with quiet_transformers():
        with _refusal(source, "config.json", "the config of a model of transformers' own"):
            config = transformers.AutoConfig.from_pretrained(source, **fetching)
        tokenizer = None
        if _has_tokenizer(source):
            with _refusal(source, "tokenizer", "a whole and readable tokenizer, or none"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(source, **fetching)
        if attn_implementation is not None:
            options["attn_implementation"] = fetching["attn_implementation"] = attn_implementation
        if from_config:
            with _refusal(source, "config.json", "the config of a causal LM"):
                model = init_student_from_config(config, dtype=dtype, seed=seed, **options)
                _keep_generation_config(source, model)
        else:
            model = _load_weights(source, config, dtype, fetching)
        with _refusal(source, f"moving it to {device}", "a device with room for it"):
            model.to(device)
        return prepare_student(model, tokenizer, source=source)


def init_student_from_config(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A causal LM with random weights; the same seed gives the same ones, whatever `dtype`. The global RNG stays."""
    with torch.random.fork_rng(devices=[]):
        # Of the CPU alone, where it is made: `torch.manual_seed` seeds CUDA's generators too, which nothing puts back.
        torch.default_generator.manual_seed(seed)
        auto_model: Any = transformers.AutoModelForCausalLM
        model = auto_model.from_config(config, dtype=torch.float32, **options)
    return model.to(dtype)


def _keep_generation_config(source: str, model: Any) -> None:
    """As `from_pretrained` does it. Left to itself a model made of its config alone would generate by defaults."""
    if (Path(source) / "generation_config.json").is_file():
        generation: Any = transformers.GenerationConfig
        model.generation_config = generation.from_pretrained(source)


def prepare_student(model: Any, tokenizer: Any | None, *, source: str) -> LoadedStudent:
    """Describes and checks a causal LM that is in memory already; it is used as it is, not copied.

    Raises ConfigError: it does not come apart into body and head, or the two don't give its own logits.
    """
    name = type(model).__name__
    body = body_of(model)
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if body is None or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        raise ConfigError(f"student {source}: {name} is not a body with one head on top; allowed: a causal LM")
    if weight.dtype not in _DTYPE_NAMES:
        raise ConfigError(
            f"student {source}: weights of {weight.dtype}; allowed: {', '.join(_DTYPE_NAMES.values())}, not quantized"
        )
    if weight.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        # The grouped kernel that experts use by default has no float64.
        model.set_experts_implementation("eager")
    try:
        num_tokens = None if tokenizer is None else num_tokens_of(tokenizer.get_vocab())
        spec = head_spec_of(
            model.config,
            name,
            hidden_size=weight.shape[1],
            vocab_size=weight.shape[0],
            has_bias=getattr(head, "bias", None) is not None,
            dtype=_DTYPE_NAMES[weight.dtype],
            num_tokens=num_tokens,
        )
    except ValueError as error:
        raise ConfigError(f"student {source}: {error}") from error
    model.eval()
    with torch.no_grad():
        check_head(model, spec, lambda ids_BS, positions_BS: states_of(model, ids_BS, positions_BS))
    model.train()
    return LoadedStudent(
        source=source,
        model=model,
        tokenizer=tokenizer,
        head_spec=spec,
        num_ids=min(spec.real_vocab, int(model.get_input_embeddings().weight.shape[0])),
        max_positions=max_positions_of(model.config),
    )


def body_of(model: Any) -> Any | None:
    """The part of a causal LM that ends with the final norm; None where it has no such part."""
    body = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    return body if isinstance(body, torch.nn.Module) else None


def states_of(model: Any, ids_BS: torch.Tensor, positions_BS: torch.Tensor | None) -> torch.Tensor:
    """Final-normed states [B, S, H] of right-padded sequences.

    Position ids, given only where documents are packed, tell the documents apart. There is no attention mask:
    a causal model never looks at the padding behind it, and with a mask transformers would not look at the positions.
    """
    packed = {} if positions_BS is None else {"position_ids": positions_BS}
    body: Any = body_of(model)
    states_BSH: torch.Tensor = body(input_ids=ids_BS, use_cache=False, **packed).last_hidden_state
    return states_BSH


def _load_weights(source: str, config: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    auto_model: Any = transformers.AutoModelForCausalLM
    with _refusal(source, "weights", "a whole checkpoint of a causal LM"):
        # Tensors of other shapes are refused below, by name; left to itself transformers only says that there are some.
        model, report = auto_model.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    # Keys that the class does not know are fine (vision towers, next-token heads); those it lacks are not.
    for problem in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        entries = sorted(_shown(entry) for entry in report.get(problem, ()))
        if entries:
            shown = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
            raise ConfigError(
                f"student {source}: {len(entries)} {problem.replace('_', ' ')} in its weights ({shown}); allowed: "
                f"every tensor of {type(model).__name__}, in the shape that config.json says"
            )
    return model


def _shown(entry: Any) -> str:
    """A name, or what comes with one: name, shape in the checkpoint, shape in the model."""
    if isinstance(entry, tuple) and len(entry) == 3:
        name, found, expected = entry
        return f"{name} is {list(found)}, config.json makes it {list(expected)}"
    return str(entry)


def _check_source(source: str, *, from_config: bool) -> None:
    path = Path(source)
    if not path.is_dir():
        if path.exists() or not _HUB_ID.fullmatch(source):
            found = "it is a file" if path.exists() else "no such directory"
            raise ConfigError(f"student {source}: {found}; allowed: a checkpoint directory or a hub id (owner/name)")
        return
    if not (path / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty directory"
        raise ConfigError(f"student {source}: no config.json; found {found}; allowed: a Hugging Face checkpoint")
    if not from_config and not _has_any(path, _WEIGHT_FILES):
        raise ConfigError(f"student {source}: no weights ({_WEIGHT_FILES[0]}); --from-config starts from random ones")


def _is_only_cached(source: str) -> bool:
    """Whether the hub must not be asked. Raises ConfigError: it can't be, and the cache does not have the model."""
    try:
        return not Path(source).is_dir() and is_only_cached(source)
    except ValueError as error:
        raise ConfigError(f"student {source}: {error}") from error


def _has_tokenizer(source: str) -> bool:
    """Asked before loading: out of a directory without one transformers makes an empty tokenizer."""
    path = Path(source)
    return not path.is_dir() or _has_any(path, _TOKENIZER_FILES)


def _has_any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(path.glob(pattern), None) for pattern in patterns)


@contextlib.contextmanager
def _refusal(source: str, part: str, allowed: str) -> Iterator[None]:
    """Whatever transformers raises for a bad checkpoint, as one line that names the part."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ConfigError(f"student {source}: {part}: {lines[0][:300]}; allowed: {allowed}") from error


@dataclass(frozen=True)
class _Loudness:
    verbosity: int
    bars_shown: bool

    @classmethod
    def of_now(cls) -> _Loudness:
        library: Any = transformers.utils.logging
        return cls(library.get_verbosity(), library.is_progress_bar_enabled())

    def apply(self) -> None:
        library: Any = transformers.utils.logging
        library.set_verbosity(self.verbosity)
        (library.enable_progress_bar if self.bars_shown else library.disable_progress_bar)()


#: What was there when each thread came; the first is what there was before all of them.
_quiet: list[_Loudness] = []
_quiet_lock = threading.Lock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load reports and bars of transformers: what they say is checked, and errors are one line of ours.

    The settings are the process's: several threads may be in here at a time, and the last one out puts them back."""
    with _quiet_lock:
        _quiet.append(_Loudness.of_now())
        _Loudness(logging.CRITICAL, bars_shown=False).apply()
    try:
        yield
    finally:
        with _quiet_lock:
            if len(_quiet) == 1:
                _quiet[0].apply()
                _quiet.clear()
            else:
                _quiet.pop()
