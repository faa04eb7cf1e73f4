"""Ten thousand tokens of eight rows: memory is that of the caches, on both sides, and ends with the call."""

from __future__ import annotations

import gc
import math
import os

import psutil
import pytest
from tiny_models import make_noisy, make_target, padded_batch, prompt

from hf_ssd import SSDConfig
from hf_ssd.batch_decoding import COPY_READS, BatchDecoder
from hf_ssd.generation import generate_with_ssd
from hf_ssd.runtime import pool

NUM_ROWS, NUM_TOKENS, DEPTH = 8, 1250, 4
MEGABYTE = 2**20


def resident_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / MEGABYTE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_that_of_the_caches(monkeypatch) -> None:
    target, assistant = (make(max_position_embeddings=4096) for make in (make_target, make_noisy))
    batch = padded_batch([prompt(2 + row, seed=row) for row in range(NUM_ROWS)])
    config = SSDConfig(backend="process", num_assistant_tokens=DEPTH)
    num_slots: list[int] = []
    longest: list[int] = []
    keep = BatchDecoder._keep

    def note(self, num_kept) -> None:
        keep(self, num_kept)
        if len(self._active) < NUM_ROWS:  # the longest is gone, and what it had in slots the others have as holes
            return
        num_slots.append(self._cache.get_seq_length())
        longest.append(int(self._mask.sum(dim=1).max()))

    monkeypatch.setattr(BatchDecoder, "_keep", note)

    def generate(num_tokens: int) -> int:
        ids = generate_with_ssd(
            target,
            inputs=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            assistant_model=assistant,
            ssd_config=config,
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        gc.collect()
        return ids.shape[1] - batch["input_ids"].shape[1]

    pids = [os.getpid()]
    generate(NUM_TOKENS)
    pids.append(pool._WORKERS[assistant].pid)
    before = [resident_mb(pid) for pid in pids]
    assert generate(NUM_TOKENS) == NUM_TOKENS
    after = [resident_mb(pid) for pid in pids]
    pool.close_worker(assistant)
    # Holes: each round makes at most DEPTH of them and reads all there are, until reads come to COPY_READS copies.
    holes = [slots - row for slots, row in zip(num_slots, longest, strict=True)]
    bounds = [math.sqrt(2 * COPY_READS * slots * DEPTH) + 2 * DEPTH for slots in num_slots]
    assert max(holes) > 2 * DEPTH
    over = [(number, bound) for number, bound in zip(holes, bounds, strict=True) if number > bound]
    assert not over, over
    # Ten thousand tokens more, and both processes are as large as they were.
    assert all(new - old < 25 for new, old in zip(after, before, strict=True)), (before, after)
