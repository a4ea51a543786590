"""Students from disk: whole checkpoints, fresh ones on request, and one clear line for anything else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ring.core.errors import ConfigError
from student.load import init_student_from_config, load_student, prepare_student, quiet_transformers, states_of
from student.probe import check_head
from tests.tiny_models import FAMILIES, TOKENIZER_VOCAB, build_tiny_checkpoint, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("first_out", [0, 1])
def test_transformers_speaks_again_once_the_last_thread_is_done_with_it(first_out: int) -> None:
    """A checkpoint in the background begins while the model is loaded or exported, and ends before or after that."""
    library = transformers.utils.logging
    before = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(logging.INFO)
    library.enable_progress_bar()
    try:
        inside = [quiet_transformers(), quiet_transformers()]
        for one in inside:
            one.__enter__()
        inside[first_out].__exit__(None, None, None)
        assert (library.get_verbosity(), library.is_progress_bar_enabled()) == (logging.CRITICAL, False)
        inside[1 - first_out].__exit__(None, None, None)
        assert (library.get_verbosity(), library.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        library.set_verbosity(before[0])
        (library.enable_progress_bar if before[1] else library.disable_progress_bar)()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_with_the_weights_of_its_checkpoint(family: str, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, family)
    loaded = load_student(str(tmp_path))
    for name, parameter in tiny_model(family).named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter), name
    assert loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.num_ids == loaded.head_spec.real_vocab == TOKENIZER_VOCAB
    assert loaded.max_positions == 128


def test_weights_are_held_in_the_dtype_that_is_trained(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert load_student(str(tmp_path)).model.dtype == torch.float32
    assert load_student(str(tmp_path), dtype=torch.float64).model.dtype == torch.float64


def test_padded_columns_are_known_from_the_tokenizer(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, vocab_size=384)
    spec = load_student(str(tmp_path)).head_spec
    assert (spec.vocab_size, spec.real_vocab) == (384, TOKENIZER_VOCAB)


def test_a_student_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    loaded = load_student(str(tmp_path))
    assert loaded.tokenizer is None
    assert loaded.num_ids == TOKENIZER_VOCAB


def test_random_weights_come_from_the_seed_alone_and_leave_the_global_generator(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    before = torch.get_rng_state()
    first, again, other = (load_student(str(tmp_path), from_config=True, seed=seed) for seed in (5, 5, 6))
    double = load_student(str(tmp_path), from_config=True, seed=5, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [dict(loaded.model.named_parameters()) for loaded in (first, again, other, double)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert torch.equal(weights[0][name].double(), weights[3][name])


def test_random_weights_leave_the_generators_of_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are none torch notes the seeds, for when there are."""
    config, seeds = tiny_model().config, list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(torch.initial_seed())
    assert len(seeds) == 1, "what torch seeds them with"
    init_student_from_config(config, seed=5)
    assert len(seeds) == 1


def test_a_home_directory_that_no_shell_has_written_out_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `--student=~/model`, say, or in a file of settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    build_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    for from_config in (False, True):
        loaded = load_student("~/model", from_config=from_config)
        assert loaded.tokenizer is not None
        assert loaded.model.generation_config.eos_token_id == 5
    with pytest.raises(ConfigError, match=f"student {tmp_path}/other: no such directory"):
        load_student("~/other")


def test_a_model_of_its_config_alone_still_generates_as_its_checkpoint_says(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path)
    settings = {"do_sample": True, "temperature": 0.7, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    found = load_student(str(tmp_path), from_config=True).model.generation_config
    assert {name: getattr(found, name) for name in settings} == settings


# --- bad input -----------------------------------------------------------------------------------


def _drop_a_tensor(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def _reshape_a_tensor(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, file, metadata={"format": "pt"})


def _cut_the_weights(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _become_an_encoder(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "vit", "architectures": ["ViTModel"]}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "broken config": (lambda path: (path / "config.json").write_text("{"), "config.json"),
    "unknown model": (lambda path: (path / "config.json").write_text('{"model_type": "nonesuch"}'), "nonesuch"),
    "no causal LM": (_become_an_encoder, "allowed"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "--from-config starts from random ones"),
    "missing tensor": (_drop_a_tensor, "missing keys in its weights (model.layers.1.mlp.up_proj.weight)"),
    "wrong shape": (
        _reshape_a_tensor,
        "1 mismatched keys in its weights (model.norm.weight is [7], config.json makes it [32])",
    ),
    "cut weights": (_cut_the_weights, "weights"),
    "broken tokenizer": (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_one_clear_line(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_tiny_checkpoint(tmp_path)
    capfd.readouterr()
    break_it, message = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_student(str(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_student(str(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        load_student(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"no config.json; found file"):
        load_student(str(tmp_path))


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="moving it to cuda:99"):
        load_student(str(tmp_path), device="cuda:99")


def test_a_model_whose_logits_need_more_than_its_head_is_refused() -> None:
    model = tiny_model("gemma3")
    spec = prepare_student(model, tiny_tokenizer(), source="x").head_spec
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"Gemma3ForCausalLM: head\(states\) differs .* softcap None"),
    ):
        check_head(model, replace(spec, logit_softcap=None), lambda ids, positions: states_of(model, ids, positions))


def test_a_quiet_softcap_is_not_overlooked() -> None:
    # Logits of fresh weights stay so far below a cap of 30 that only the turned-up probe can see it.
    model = tiny_model("gemma3", final_logit_softcapping=30.0, initializer_range=0.01)
    spec = prepare_student(model, tiny_tokenizer(), source="x").head_spec
    with torch.no_grad(), pytest.raises(ConfigError, match="softcap None"):
        check_head(model, replace(spec, logit_softcap=None), lambda ids, positions: states_of(model, ids, positions))
