"""A Hugging Face causal LM from a directory or the hub, checked and frozen: a `TeacherModel`, or one clear ConfigError.

transformers invents what it does not find: it fills missing weights with random numbers and makes an empty tokenizer
out of an empty directory. A teacher must not, so everything is looked at before it is used, and code from a checkpoint
is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import huggingface_hub
import torch
import transformers

from planner.head_spec import max_positions_of
from planner.hub import is_only_cached
from planner.token_map import num_tokens_of, token_map_hash
from ring.core.errors import ConfigError
from ring.core.messages import WireDtype
from ring.devices import find_device
from ring.dtypes import TORCH_DTYPES
from teacher.body import SplitModel
from teacher.fingerprint import fingerprint, head_sha256
from teacher.forward import TeacherModel
from teacher.probe import check_model

DtypeName = Literal["auto", "bf16", "fp16", "fp32", "fp64"]

__all__ = ["DtypeName", "TeacherModel", "check_source", "load_teacher", "prepare"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)


def load_teacher(source: str, *, dtype: DtypeName = "auto", device: str | torch.device = "cpu") -> TeacherModel:
    """The model in `source`, a local directory or a hub id (HF_HUB_OFFLINE and the HF cache are respected).

    `dtype`: of weights and states, which live on `device`; "auto" keeps the checkpoint's. `device`: "auto" is CUDA
    where there is one.
    Raises ConfigError, one line: nothing there, a part missing or broken, a model that can't be served (`prepare`)."""
    torch_dtype = _torch_dtype(dtype)
    torch_device = find_device(device, flag="teacher --device")
    name, location = check_source(source)
    common = {"trust_remote_code": False, "local_files_only": _is_only_cached(location)}
    auto_model: Any = transformers.AutoModelForCausalLM
    with _quiet():
        with _refusal(source, "config.json", "a model of transformers' own"):
            config = transformers.AutoConfig.from_pretrained(location, **common)
        with _refusal(source, "tokenizer", f"one of {', '.join(_TOKENIZER_FILES)}, whole and readable"):
            token_ids = transformers.AutoTokenizer.from_pretrained(location, **common).get_vocab()
        _check_cached_tokenizer(location)
        with _refusal(source, "weights", "a whole checkpoint of a causal LM"):
            # Tensors of other shapes are refused below, by name; transformers itself only says that there are some.
            model, report = auto_model.from_pretrained(
                location,
                config=config,
                dtype=torch_dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **common,
            )
        _check_report(source, type(model).__name__, report)
        with _refusal(source, f"moving it to {torch_device}", "a device with room for it"):
            model.to(torch_device)
        with _refusal(source, type(model).__name__, "a causal LM of text"):
            return prepare(model, token_ids, name=name)


def prepare(model: Any, token_ids: Mapping[str, int], *, name: str) -> TeacherModel:
    """Freeze a causal LM that is in memory already, probe it, and describe it.

    `token_ids`: the tokenizer's get_vocab(). The model is used as it is, not copied: it stays frozen.
    Raises ConfigError: head(states) is not the model's logits, or the model looks at tokens to the right."""
    split = SplitModel(model)
    split.freeze()
    if split.weight_VH.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        # The grouped kernel that experts use by default has no float64.
        model.set_experts_implementation("eager")
    try:
        num_tokens, map_hash = num_tokens_of(token_ids), token_map_hash(token_ids)
    except ValueError as error:
        raise ConfigError(f"teacher {name}: {error}") from error
    spec = split.spec(num_tokens)
    check_model(split, spec)
    head_digest = head_sha256(split.weight_VH, split.bias_V)
    return TeacherModel(
        name=name,
        split=split,
        head_spec=spec,
        token_map_hash=map_hash,
        fingerprint=fingerprint(split, head_digest=head_digest),
        head_sha256=head_digest,
        max_positions=max_positions_of(split.config),
        num_ids=split.num_embeddings,
        length_thresholds=_length_thresholds(split.config),
    )


def _torch_dtype(dtype: str) -> torch.dtype | Literal["auto"]:
    if dtype == "auto":
        return "auto"
    if dtype not in get_args(DtypeName):
        raise ConfigError(f"teacher dtype {dtype!r}; allowed: {', '.join(get_args(DtypeName))}")
    return TORCH_DTYPES[WireDtype(dtype)]


def check_source(source: str) -> tuple[str, str]:
    """The name to show, and where to load from: a directory with config, weights and tokenizer, or what looks like a
    hub id. Raises ConfigError: it is neither."""
    path = Path(source).expanduser()
    if source and path.is_dir():
        _check_files(source, path)
        return path.resolve().name, str(path)
    if source and path.exists():
        raise ConfigError(f"teacher {source}: it is a file; allowed: a checkpoint directory or a hub id")
    if not _HUB_ID.fullmatch(source):
        raise ConfigError(
            f"teacher {source!r}: no such directory; allowed: a checkpoint directory or a hub id (owner/name)"
        )
    return source, source


def _is_only_cached(location: str) -> bool:
    """Whether the hub must not be asked. Raises ConfigError: it can't be, and the cache does not have the model."""
    try:
        return not Path(location).is_dir() and is_only_cached(location)
    except ValueError as error:
        raise ConfigError(f"teacher {location}: {error}") from error


def _check_files(source: str, path: Path) -> None:
    wanted = {"config.json": ("config.json",), "weights": _WEIGHT_FILES, "tokenizer": _TOKENIZER_FILES}
    for part, patterns in wanted.items():
        if not any(next(path.glob(pattern), None) for pattern in patterns):
            found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty directory"
            raise ConfigError(f"teacher {source}: no {part}; found {found}; allowed: {' or '.join(patterns)}")


def _check_cached_tokenizer(location: str) -> None:
    """The same for a hub id, once its tokenizer has been fetched: some classes make up a vocabulary without a file."""
    if Path(location).is_dir():
        return
    found = [huggingface_hub.try_to_load_from_cache(location, name) for name in _TOKENIZER_FILES]
    if not any(isinstance(path, str) for path in found):
        raise ConfigError(f"teacher {location}: no tokenizer; allowed: one of {', '.join(_TOKENIZER_FILES)}")


def _check_report(source: str, class_name: str, report: Mapping[str, Any]) -> None:
    """Keys that the class does not know are fine (vision towers, next-token heads); those it lacks are not."""
    for problem in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        entries = sorted(_shown(entry) for entry in report.get(problem, ()))
        if entries:
            shown = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
            raise ConfigError(
                f"teacher {source}: {len(entries)} {problem.replace('_', ' ')} in its weights ({shown}); "
                f"allowed: every tensor of {class_name}, in the shape that config.json says"
            )


def _shown(entry: Any) -> str:
    """A name, or what comes with one: name, shape in the checkpoint, shape in the model."""
    if isinstance(entry, tuple) and len(entry) == 3:
        name, found, expected = entry
        return f"{name} is {list(found)}, config.json makes it {list(expected)}"
    return str(entry)


def _length_thresholds(config: Any) -> tuple[int, ...]:
    """Lengths at which a longrope model changes its frequencies (one, or one for each type of layer).

    Dynamic scaling needs none: it starts past `max_positions`, where documents are refused."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    candidates = [parameters, *(inner for inner in parameters.values() if isinstance(inner, Mapping))]
    found = {
        int(candidate["original_max_position_embeddings"])
        for candidate in candidates
        if candidate.get("rope_type") == "longrope" and candidate.get("original_max_position_embeddings")
    }
    return tuple(sorted(found))


@contextmanager
def _refusal(source: str, part: str, allowed: str) -> Iterator[None]:
    """transformers raises nearly anything for a bad checkpoint: say in one line which part of which model it was."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"teacher {source}: {part}: {type(error).__name__}: {reason[:300]}; allowed: {allowed}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no load reports: what matters in them is checked, and errors are one line."""
    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
