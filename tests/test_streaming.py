from __future__ import annotations

import pytest
import torch

from hf_ssd import Origin, RoundStats, RoundStreamer, SSDConfig, enable_ssd

GREEDY = {"do_sample": False, "max_new_tokens": 40}


class Listener(RoundStreamer):
    """Notes how many tokens each round put."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rounds: list[tuple[int, RoundStats]] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def put_round(self, stats: RoundStats) -> None:
        self.rounds.append((len(self.tokens), stats))

    def end(self) -> None:
        pass


@pytest.mark.parametrize("tree", ["auto", None])
@pytest.mark.parametrize("mode", ["ssd", "sd"])
def test_each_round_is_told_after_its_tokens(target, noisy, prompt_ids, mode, tree):
    enable_ssd(target, assistant_model=noisy, ssd_config=SSDConfig(mode=mode, backend="inline", draft_tree_size=tree))
    listener = Listener()
    ids = target.generate(prompt_ids, streamer=listener, **GREEDY)
    assert listener.tokens == ids[0].tolist()
    assert tuple(stats for _, stats in listener.rounds) == target.ssd_stats.rounds
    known = prompt_ids.shape[1] + 1  # the first token comes from the prefill
    for num_tokens, stats in listener.rounds:
        known += stats.num_emitted
        assert num_tokens == known
    assert known == len(listener.tokens)


def test_the_path_is_what_was_accepted(target, noisy, prompt_ids):
    enable_ssd(target, assistant_model=noisy, ssd_config=SSDConfig(mode="sd", backend="inline"))
    target.generate(prompt_ids, **GREEDY)
    rounds = target.ssd_stats.rounds
    for stats in rounds:
        assert len(stats.path) == stats.num_accepted
        assert list(stats.path) == sorted(set(stats.path))
        assert all(0 <= index < stats.num_draft_tokens for index in stats.path)
    # In trees of several branches the right one is not always the first.
    assert any(stats.path != tuple(range(stats.num_accepted)) for stats in rounds)
    assert {stats.origin for stats in rounds} >= {Origin.JUST_IN_TIME}


def test_plain_decoding_has_no_rounds(target, noisy, prompt_ids):
    enable_ssd(target, assistant_model=noisy, ssd_config=SSDConfig(mode="ar"))
    listener = Listener()
    ids = target.generate(prompt_ids, streamer=listener, **GREEDY)
    assert listener.tokens == ids[0].tolist()
    assert listener.rounds == []
