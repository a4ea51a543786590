"""A teacher from a directory: whole and known, or one line that says what is missing; and its fingerprint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import teacher.fingerprint
from planner.token_map import token_map_hash
from ring.core.errors import ConfigError
from ring.core.messages import WireDtype
from teacher.load import DtypeName, TeacherModel, load_teacher
from teacher.serve import ServeConfig
from tests.tiny_models import FAMILIES, TOKENIZER_VOCAB, build_tiny_checkpoint, tiny_model, tiny_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_tiny_checkpoint(tmp_path / "tiny", "qwen3")


def states_of(model: TeacherModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.split.states(torch.tensor([[5, 9, 300, 7]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_teacher_gives_the_states_of_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    loaded = load_teacher(str(build_tiny_checkpoint(tmp_path / family, family, seed=3)))
    model = tiny_model(family, seed=3)
    with torch.no_grad():
        expected = getattr(model, model.base_model_prefix)(torch.tensor([[5, 9, 300, 7]])).last_hidden_state
    assert torch.equal(states_of(loaded), expected)
    assert loaded.name == family
    assert (loaded.max_positions, loaded.num_ids) == (128, TOKENIZER_VOCAB)
    assert loaded.token_map_hash == token_map_hash(tiny_tokenizer().get_vocab())


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt2"])
def test_weights_and_states_have_the_dtype_that_was_asked_for(family: str, dtype: DtypeName, tmp_path: Path) -> None:
    directory = build_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    loaded = load_teacher(str(directory), dtype=dtype)
    expected = WireDtype.BF16 if dtype == "auto" else WireDtype(dtype)
    assert loaded.dtype is loaded.head_info().dtype is expected
    info = loaded.head_info()
    assert info.num_bytes == TOKENIZER_VOCAB * 32 * expected.itemsize_bytes
    assert states_of(loaded).element_size() == expected.itemsize_bytes


def truncate_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def drop_a_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def widen_the_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["intermediate_size"] += 8
    (directory / "config.json").write_text(json.dumps(config))


def set_config(**values: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | values))

    return change


def remove(*names: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda directory: shutil.rmtree(directory), "no such directory"),
        (lambda directory: [entry.unlink() for entry in directory.iterdir()], "found an empty directory"),
        (remove("config.json"), "no config.json"),
        (remove("model.safetensors"), "no weights; found chat_template.jinja, config.json"),
        (remove("tokenizer.json"), "no tokenizer; found"),
        (truncate_weights, "weights: SafetensorError"),
        (drop_a_tensor, "1 missing keys in its weights (model.layers.1.mlp.up_proj.weight)"),
        (
            widen_the_config,
            "6 mismatched keys in its weights (model.layers.0.mlp.down_proj.weight is [32, 64], config.json makes it "
            "[32, 72], model.layers.0.mlp.gate_proj.weight is [64, 32], config.json makes it [72, 32], ",
        ),
        (write("config.json", "{not json"), "config.json: "),
        (write("tokenizer.json", "{}"), "tokenizer: "),
        (set_config(model_type="not_a_model"), "config.json: ValueError"),
        (set_config(model_type="t5"), "weights: "),
        (set_config(auto_map={"AutoConfig": "evil.Evil"}, model_type="evil"), "config.json: ValueError"),
    ],
)
def test_a_bad_directory_is_one_line_that_names_it(
    checkpoint: Path, damage: Callable[[Path], object], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint)
    capfd.readouterr()
    with pytest.raises(ConfigError) as refusal:
        load_teacher(str(checkpoint))
    message = str(refusal.value)
    assert said in message
    assert message.startswith("teacher ")
    assert str(checkpoint) in message
    assert "allowed: " in message
    assert "\n" not in message
    assert capfd.readouterr() == ("", ""), "transformers wrote reports or bars of its own"


def test_a_file_is_no_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="it is a file"):
        load_teacher(str(checkpoint / "model.safetensors"))


@pytest.mark.parametrize("source", ["", "./nowhere", "~/no-such-model", "a/b/c", "../x", "owner/name/"])
def test_what_is_neither_directory_nor_hub_id_never_reaches_the_hub(source: str) -> None:
    with pytest.raises(ConfigError, match="no such directory; allowed: a checkpoint directory or a hub id"):
        load_teacher(source)


LOAD_THREE = """
from ring.core.errors import ConfigError
from teacher.load import load_teacher

for source in ("owner/absent", "owner/whole", "owner/tokenless"):
    try:
        print(load_teacher(source).fingerprint)
    except ConfigError as error:
        print(error)
"""


def test_hub_ids_come_from_the_cache_when_offline(tmp_path: Path) -> None:
    for name, family in (("whole", "qwen3"), ("tokenless", "llama")):
        repo, revision = tmp_path / "hub" / f"models--owner--{name}", "0" * 40
        build_tiny_checkpoint(repo / "snapshots" / revision, family)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(revision)
    # Without its file the Llama tokenizer invents a vocabulary of three tokens.
    (repo / "snapshots" / revision / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "LlamaTokenizer"}
    (repo / "snapshots" / revision / "tokenizer_config.json").write_text(json.dumps(settings))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD_THREE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    absent, whole, tokenless = result.stdout.splitlines()
    assert absent.startswith("teacher owner/absent: no such directory, and no such model in the cache, ")
    assert whole == load_teacher(str(build_tiny_checkpoint(tmp_path / "local", "qwen3"))).fingerprint
    assert tokenless.startswith("teacher owner/tokenless: no tokenizer; ")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "teacher dtype 'int8'; allowed: auto, bf16, fp16, fp32, fp64"),
        ({"device": "gpu"}, "teacher --device gpu: .*; allowed: auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:99"}, "teacher --device cuda:99: .*; allowed: auto, cpu, cuda, cuda:N"),
        ({"device": "meta"}, "teacher --device meta: .*; allowed: auto, cpu, cuda, cuda:N"),
    ],
)
def test_impossible_options_are_refused(checkpoint: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_teacher(str(checkpoint), **options)  # type: ignore[arg-type]


def test_auto_is_the_gpu_where_there_is_one(checkpoint: Path) -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert load_teacher(str(checkpoint), device="auto").device.type == wanted
    assert ServeConfig().device == "auto"


VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_vision_checkpoint_is_served(family: str, tmp_path: Path) -> None:
    text = tiny_model(family).config.to_dict()
    wrapped = {
        "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
        "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
    }
    config_class, model_class = wrapped[family]
    vision = VISION | {"num_position_embeddings": 16, "patch_size": 4}
    model = model_class(
        config_class(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])
    )
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_teacher(str(tmp_path))
    assert loaded.split.class_name.endswith("ForCausalLM")
    assert loaded.max_positions == 128
    with torch.inference_mode():
        own = model.eval()(input_ids=torch.tensor([[5, 9, 300, 7]])).logits
        ours = states_of(loaded) @ loaded.head_columns(0, TOKENIZER_VOCAB)[0].T
    torch.testing.assert_close(ours, own, atol=1e-6, rtol=1e-5)


def test_tensors_that_the_text_model_does_not_know_are_no_error(checkpoint: Path) -> None:
    # Vision towers and next-token heads live in the same files.
    before = load_teacher(str(checkpoint))
    tensors = load_file(checkpoint / "model.safetensors") | {"visual.patch.weight": torch.ones(3)}
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    assert load_teacher(str(checkpoint)).fingerprint == before.fingerprint


def test_loading_leaves_the_settings_of_transformers_alone(checkpoint: Path) -> None:
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load_teacher(str(checkpoint))
    with pytest.raises(ConfigError):
        load_teacher(str(checkpoint / "nowhere"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_replicas_of_one_checkpoint_share_the_fingerprint(tmp_path: Path) -> None:
    one = load_teacher(str(build_tiny_checkpoint(tmp_path / "one", "qwen3_5_moe")))
    other = load_teacher(str(build_tiny_checkpoint(tmp_path / "other", "qwen3_5_moe", output_router_logits=False)))
    assert one.fingerprint == other.fingerprint
    assert one.head_sha256 == other.head_sha256


def edit_tensor(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    return change


def edit_one_head_element(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][201, 13] += 1e-3
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        set_config(rms_norm_eps=1e-5),
        edit_tensor("model.embed_tokens.weight"),
        edit_tensor("model.layers.0.self_attn.q_proj.weight"),
        edit_one_head_element,
    ],
    ids=["config", "head", "body with the head as it was", "one element of the head"],
)
def test_another_model_has_another_fingerprint(checkpoint: Path, change: Callable[[Path], None]) -> None:
    before = load_teacher(str(checkpoint)).fingerprint
    change(checkpoint)
    assert load_teacher(str(checkpoint)).fingerprint != before


def test_dtype_and_engine_version_are_part_of_the_fingerprint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {load_teacher(str(checkpoint)).fingerprint, load_teacher(str(checkpoint), dtype="bf16").fingerprint}
    monkeypatch.setattr(teacher.fingerprint, "ENGINE_VERSION", "another")
    found.add(load_teacher(str(checkpoint)).fingerprint)
    assert len(found) == 3
