from __future__ import annotations

from pathlib import Path

import pytest

from hf_ssd.distill.settings import DistillSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depth": 4}, r"`depth` must be left out for kind='model', but got 4\. It is for kind='eagle3'"),
        ({"draft_vocab_size": 9}, "`draft_vocab_size` must be left out for kind='model', but got 9"),
        ({"kind": "eagle3", "layers": 2}, "`layers` must be left out for kind='eagle3', but got 2"),
        ({"kind": "eagle3", "vocabulary": "full"}, "`vocabulary` must be left out for kind='eagle3', but got 'full'"),
        ({"init_from": "a", "width": 8}, "`init_from` decides the assistant's size, but got width=8 too"),
        (
            {"kind": "eagle3", "init_from": "a", "draft_vocab_size": 9},
            "`init_from` decides the assistant's size, but got draft_vocab_size=9 too",
        ),
        ({"kind": "eagle3", "depth": 31, "max_length": 32}, "`depth` must be at most 30, .* but got 31"),
        ({"kind": "eagle3", "depth": 0}, "`depth` must be at least 1, but got 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        DistillSettings(out=tmp_path, **values)


def test_the_deepest_draft_that_a_text_has_room_for(tmp_path: Path) -> None:
    assert DistillSettings(out=tmp_path, kind="eagle3", depth=30, max_length=32).depth == 30
