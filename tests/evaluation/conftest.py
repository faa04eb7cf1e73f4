from __future__ import annotations

from collections.abc import Iterator

import evaluate
import pytest


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`evaluate` copies modules to a cache before it imports them: here, not to the user's.

    One for the whole session: once imported from a cache, they are not looked for in another.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("evaluate")
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        # Before the user's, which transformers may have put there for code of its own, and which may hold some of them.
        patch.syspath_prepend(folder / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        yield
