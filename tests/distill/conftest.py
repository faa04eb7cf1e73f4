from __future__ import annotations

from pathlib import Path

import pytest
from datasets import disable_progress_bars
from tiny_models import tiny_llama
from tiny_pair import byte_tokenizer


@pytest.fixture(autouse=True)
def _without_bars() -> None:
    disable_progress_bars()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of three layers with a tokenizer of bytes. It has learnt nothing, so its texts have no end."""
    folder = tmp_path_factory.mktemp("models") / "target"
    tokenizer = byte_tokenizer()
    tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=3, eos_token_id=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
