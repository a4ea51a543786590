"""Files to samples: formats, columns, long and empty documents, the cache, and bad input."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from ring.core.errors import ConfigError
from student.data import DataSettings, TokenDataset, load_data
from tests.student.conftest import Load, WriteLines
from tests.tiny_models import END_OF_TEXT, tiny_tokenizer

MakeDataset = Callable[..., TokenDataset]


def texts(dataset: TokenDataset) -> list[str]:
    tokenizer = tiny_tokenizer()
    return [tokenizer.decode(dataset.sample(i).token_ids.tolist()) for i in range(dataset.num_samples)]


def ids(dataset: TokenDataset) -> list[list[int]]:
    return [dataset.sample(i).token_ids.tolist() for i in range(dataset.num_samples)]


def ranges(dataset: TokenDataset) -> list[tuple[tuple[int, int], ...]]:
    return [dataset.sample(i).row_ranges for i in range(dataset.num_samples)]


# --- formats -------------------------------------------------------------------------------------


def test_every_format_in_one_call_keeps_the_order_of_files_and_records(
    tmp_path: Path, write_lines: WriteLines, load: Load
) -> None:
    lines = write_lines([{"text": "one"}, {"text": "two"}])
    datasets.Dataset.from_dict({"text": ["three", "four"]}).to_parquet(str(tmp_path / "p.parquet"))
    (tmp_path / "five.md").write_text("# five\n\nmore of five\n")
    (tmp_path / "six.py").write_text("six = 6\n")
    ready = write_lines([{"token_ids": tiny_tokenizer()("seven")["input_ids"]}], "ids.jsonl")
    names = [str(tmp_path / name) for name in ("p.parquet", "five.md", "six.py")]
    dataset = load(lines, *names, ready)
    ends = [text.removesuffix(END_OF_TEXT) for text in texts(dataset)]
    assert ends == ["one", "two", "three", "four", "# five\n\nmore of five\n", "six = 6\n", "seven"]
    assert dataset.report.num_documents == dataset.report.num_samples == 7
    assert dataset.report.num_tokens == sum(dataset.lengths)
    assert dataset.report.num_rows == sum(dataset.row_counts)


def test_plain_text_ends_with_end_of_text_and_every_later_token_is_a_target(
    write_lines: WriteLines, load: Load
) -> None:
    name = write_lines([{"text": "the slot"}, {"text": f"ends already{END_OF_TEXT}"}])
    dataset = load(name)
    assert texts(dataset) == [f"the slot{END_OF_TEXT}", f"ends already{END_OF_TEXT}"]
    assert ranges(dataset) == [((0, length - 1),) for length in dataset.lengths.tolist()]
    assert texts(load(name, append_eos=False))[0] == "the slot"


def test_patterns_and_names_with_pattern_characters_both_work(tmp_path: Path, load: Load) -> None:
    for name in ("b.txt", "a.txt", "c[1].txt"):
        (tmp_path / name).write_text(f"file {name}")
    dataset = load(str(tmp_path / "[ab].txt"), str(tmp_path / "c[1].txt"))
    assert [text.removesuffix(END_OF_TEXT) for text in texts(dataset)] == ["file a.txt", "file b.txt", "file c[1].txt"]


def test_gzipped_lines_and_json_arrays_are_read(tmp_path: Path, load: Load) -> None:
    import gzip

    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as stream:
        stream.write('{"text": "packed away"}\n')
    (tmp_path / "array.json").write_text(json.dumps([{"text": "in a list"}]))
    dataset = load(str(tmp_path / "z.jsonl.gz"), str(tmp_path / "array.json"))
    assert texts(dataset) == [f"packed away{END_OF_TEXT}", f"in a list{END_OF_TEXT}"]


# --- ready ids -----------------------------------------------------------------------------------


def test_labels_and_loss_masks_say_which_tokens_are_targets(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset(
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, 4, 5]},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 0, 1, 0, 1]},
        {"input_ids": [1, 2, 3, 4, 5]},
    )
    # Row i predicts token i + 1; a mark on the first token predicts nothing.
    assert ranges(dataset) == [((2, 4),), ((1, 2), (3, 4)), ((0, 4),)]
    assert dataset.row_counts.tolist() == [2, 2, 4]


def test_stored_padding_is_no_part_of_the_document(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset({"input_ids": [0, 0, 7, 8, 9, 0], "attention_mask": [0, 0, 1, 1, 1, 0]})
    assert ids(dataset) == [[7, 8, 9]]
    assert ranges(dataset) == [((0, 2),)]


def test_ready_ids_need_no_tokenizer(write_lines: WriteLines, tmp_path: Path) -> None:
    settings = DataSettings(files=(write_lines([{"input_ids": [1, 2]}]),), max_length=8, cache_dir=str(tmp_path / "c"))
    assert load_data(settings, None, vocab_size=3).num_samples == 1


# --- long, empty and targetless documents --------------------------------------------------------


def test_split_windows_count_every_target_of_the_document_exactly_once(ids_dataset: MakeDataset) -> None:
    for length in range(2, 25):
        document = list(range(1, length + 1))
        dataset = ids_dataset(document, max_length=5)
        targets = [
            int(sample.token_ids[row + 1])
            for sample in map(dataset.sample, range(dataset.num_samples))
            for start, end in sample.row_ranges
            for row in range(start, end)
        ]
        assert targets == document[1:], f"document of {length} tokens"
        assert dataset.lengths.max() <= 5


def test_split_keeps_marks_with_their_tokens_and_drops_windows_without_any(ids_dataset: MakeDataset) -> None:
    mask = [0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    dataset = ids_dataset({"input_ids": list(range(1, 13)), "loss_mask": mask}, max_length=5)
    assert ids(dataset) == [[1, 2, 3, 4, 5], [9, 10, 11, 12]]
    assert ranges(dataset) == [((0, 1),), ((0, 2),)]
    assert dataset.row_counts.tolist() == [1, 2]
    assert dataset.report.num_samples_without_target == 1


def test_truncation_keeps_the_beginning_and_counts_what_is_lost(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset(range(1, 13), [1, 2, 3], max_length=5, long_documents="truncate")
    assert ids(dataset) == [[1, 2, 3, 4, 5], [1, 2, 3]]
    assert dataset.report.num_truncated_documents == 1
    assert dataset.report.num_cut_tokens == 7
    assert dataset.report.num_split_documents == 0


def test_long_documents_are_an_error_where_that_is_asked_for(ids_dataset: MakeDataset) -> None:
    with pytest.raises(ConfigError, match=r"data.jsonl, record 2: 6 tokens; allowed: 5"):
        ids_dataset([1, 2], range(6), max_length=5, long_documents="error")


def test_messages_are_truncated_and_text_is_split_unless_said_otherwise(write_lines: WriteLines, load: Load) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer is long " * 5}]
    chat = write_lines([{"messages": turns}], "chat.jsonl")
    assert load(chat, max_length=32).report.num_truncated_documents == 1
    assert load(chat, max_length=32, long_documents="split").report.num_split_documents == 1
    assert load(write_lines([{"text": "the text is long " * 9}]), max_length=32).report.num_split_documents == 1


def test_empty_documents_are_dropped_and_counted(write_lines: WriteLines, load: Load) -> None:
    records: list[dict[str, Any]] = [{"text": ""}, {"text": "stays"}, {"text": None}, {"text": " \n"}]
    dataset = load(write_lines(records), write_lines([{"messages": []}, {"messages": None}], "m.jsonl"))
    assert texts(dataset) == [f"stays{END_OF_TEXT}"]
    assert dataset.report.num_empty_documents == 5
    assert "5 empty: dropped" in dataset.report.line()


def test_documents_without_a_target_are_dropped_and_counted(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset([5], {"input_ids": [1, 2, 3], "labels": [1, -100, -100]}, [1, 2])
    assert ids(dataset) == [[1, 2]]
    assert dataset.report.num_samples_without_target == 2


# --- cache ---------------------------------------------------------------------------------------


def test_a_second_load_tokenizes_nothing_again(write_lines: WriteLines, load: Load) -> None:
    name = write_lines([{"text": "once is enough"}])
    first = load(name)

    class Unusable:
        """Has everything that the cache key reads, but can't tokenize."""

        def __init__(self) -> None:
            self._real = tiny_tokenizer()

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._real, attribute)

    real, unusable = tiny_tokenizer(), Unusable()
    Unusable.__name__ = type(real).__name__
    again = load(name, tokenizer=unusable, max_length=5)
    assert texts(first) == [f"once is enough{END_OF_TEXT}"]
    assert "".join(texts(again)).startswith("once")


def test_a_changed_file_is_read_anew_even_with_the_same_size(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text('{"text": "aaaa"}\n')
    os.utime(path, (1, 1))
    assert texts(load(str(path))) == [f"aaaa{END_OF_TEXT}"]
    path.write_text('{"text": "bbbb"}\n')
    os.utime(path, (2, 2))
    assert texts(load(str(path))) == [f"bbbb{END_OF_TEXT}"]


def test_a_changed_chat_template_never_meets_cached_ids(write_lines: WriteLines, load: Load) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    name = write_lines([{"messages": turns}])
    before = ids(load(name))
    other = tiny_tokenizer()
    assert isinstance(other.chat_template, str)
    other.chat_template = other.chat_template.replace("{{ m['role'] }}\n", "{{ m['role'] | upper }}\n")
    assert ids(load(name, tokenizer=other)) != before


def test_the_same_files_give_the_same_samples(write_lines: WriteLines, tmp_path: Path) -> None:
    name = write_lines([{"text": f"number {i} " * (i + 1)} for i in range(40)])
    found = []
    for cache in ("first", "second"):
        settings = DataSettings(files=(name,), max_length=16, cache_dir=str(tmp_path / cache))
        dataset = load_data(settings, tiny_tokenizer(), vocab_size=320)
        found.append((ids(dataset), ranges(dataset)))
    assert found[0] == found[1]


def test_content_hash_tells_data_apart(ids_dataset: MakeDataset) -> None:
    documents = [[1, 2, 3], [4, 5], [6, 7, 8]]
    same = ids_dataset(*documents).content_hash()
    assert ids_dataset(*documents).content_hash() == same
    others = [
        ids_dataset([1, 2, 3], [4, 5], [6, 7, 9]),
        ids_dataset([1, 2], [3, 4, 5], [6, 7, 8]),
        ids_dataset({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, *documents[1:]),
        ids_dataset(documents[1], documents[0], documents[2]),
    ]
    assert len({same, *(other.content_hash() for other in others)}) == 5


def test_many_documents_are_found_in_their_chunks(ids_dataset: MakeDataset) -> None:
    # More than one writing batch of the library, hence several chunks of the column.
    documents = [[1 + i % 300, 2 + i % 300, i % 7] for i in range(2500)]
    dataset = ids_dataset(*documents)
    assert ids(dataset) == documents
    assert dataset.sample(2499).token_ids.dtype == np.uint32


# --- bad input -----------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "broken json": ("x.jsonl", b'{"text": "a"}\n{"text": broken\n', "can't be read as json"),
    "no parquet": ("x.parquet", b"zzz", "can't be read as parquet"),
    "no utf-8": ("x.txt", b"\xff\xfe\x00\x81", "x.txt: can't be read as text: 'utf-8'"),
    "no known column": ("x.jsonl", b'{"prompt": "a"}\n', "found columns prompt; allowed: text, messages"),
    "text is a number": ("x.jsonl", b'{"text": 1}\n', "record 1: `text` is int"),
    "no list of messages": ("x.jsonl", b'{"messages": "hi"}\n', "record 1: `messages` must be a list of maps"),
    "message without role": ("x.jsonl", b'{"messages": [{"content": "hi"}]}\n', "`messages` must be a list of maps"),
    "id past the vocabulary": ("x.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": [320]}\n', "record 2: token id 320"),
    "negative id": ("x.jsonl", b'{"input_ids": [1, -4]}\n', "record 1: token id -4"),
    "fractional id": ("x.jsonl", b'{"input_ids": [1.5]}\n', "`input_ids` must be a list of integers"),
    "foreign label": ("x.jsonl", b'{"input_ids": [1, 2], "labels": [1, 3]}\n', "label 3 stands at token 2"),
    "short mask": ("x.jsonl", b'{"input_ids": [1, 2], "loss_mask": [1]}\n', "2 input_ids but 1 loss_mask"),
    "nothing at all": ("x.jsonl", b"", "no data to train on"),
    "no target": ("x.jsonl", b'{"input_ids": [1]}\n', "no data to train on"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_one_clear_line(case: str, tmp_path: Path, load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / name))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_the_unreadable_one_of_several_text_files_is_named(tmp_path: Path, load: Load) -> None:
    (tmp_path / "good.txt").write_text("fine")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"bad\.txt: can't be read"):
        load(str(tmp_path / "good.txt"), str(tmp_path / "bad.txt"))


def test_missing_files_and_directories_are_refused(tmp_path: Path, load: Load) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="no such file"):
        load(str(tmp_path / "*.absent"))
    with pytest.raises(ConfigError, match="not a file"):
        load(str(tmp_path))


def test_text_without_a_tokenizer_is_refused(write_lines: WriteLines, tmp_path: Path) -> None:
    settings = DataSettings(files=(write_lines([{"text": "a"}]),), max_length=8, cache_dir=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="need a tokenizer"):
        load_data(settings, None, vocab_size=320)


@pytest.mark.parametrize(
    "settings", [{"files": ()}, {"max_length": 1}, {"long_documents": "shorten"}], ids=lambda value: str(value)
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DataSettings(**({"files": ("a",), "max_length": 8} | settings))


def test_a_cache_that_has_no_room_is_not_blamed_on_the_data(tmp_path: Path, load: Load) -> None:
    """The disk takes no file beyond 4 KiB: when the file is read, and, with what was read in the cache, tokenized."""
    (tmp_path / "text.txt").write_text("The ring turns, and slot by slot the states come in. " * 400)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def with_a_full_disk(**settings: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(ConfigError, match=r"the cache of tokenized data can't be written: .*--cache-dir"):
                load(str(tmp_path / "text.txt"), **settings)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with_a_full_disk()
    load(str(tmp_path / "text.txt"))
    with_a_full_disk(append_eos=False)


def test_a_cache_that_can_not_be_written_is_not_blamed_on_the_data(
    write_lines: Callable[..., str], tmp_path: Path
) -> None:
    name = write_lines([{"input_ids": [1, 2, 3]}])
    (tmp_path / "file").touch()
    settings = DataSettings(files=(name,), max_length=8, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"the cache of tokenized data can't be written: .*--cache-dir"):
        load_data(settings, None, vocab_size=320)
