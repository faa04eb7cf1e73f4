from __future__ import annotations

from pathlib import Path

import pytest

from hf_ssd.evaluation.records import RecordFile
from hf_ssd.jsonl import whole_lines


@pytest.mark.parametrize(
    ("content", "lines", "left"),
    [
        (b"", [], b""),
        (b'{"a": 1}\n{"b": 2}\n', [b'{"a": 1}', b'{"b": 2}'], b'{"a": 1}\n{"b": 2}\n'),
        (b'{"a": 1}\n{"b": ', [b'{"a": 1}'], b'{"a": 1}\n'),
        (b'{"a": 1', [], b""),
    ],
)
def test_a_line_that_was_not_finished_is_cut_off(tmp_path: Path, content: bytes, lines: list, left: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    assert list(whole_lines(path)) == lines
    assert path.read_bytes() == left


def test_without_a_file_there_are_no_lines(tmp_path: Path) -> None:
    assert list(whole_lines(tmp_path / "none.jsonl")) == []
    assert not (tmp_path / "none.jsonl").exists()


def test_a_file_that_is_refused_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"not a record\nnor is this")
    with pytest.raises(ValueError, match="must hold records of an earlier run, but line 1"):
        RecordFile(path)
    assert path.read_bytes() == b"not a record\nnor is this"
