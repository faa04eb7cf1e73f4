"""Lossless speculative speculative decoding (SSD) for Hugging Face transformers.

```python
from transformers import AutoModelForCausalLM
from hf_ssd import SSDConfig, enable_ssd

enable_ssd(model, assistant_model=assistant, ssd_config=SSDConfig())
model.generate(**inputs)  # the same output, sooner
```

Importing this package imports nothing else: each public name brings its module with it when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import theory
    from .config import SSDConfig
    from .eagle3 import load_head
    from .generation import SSDGenerationMixin, custom_generate_path, disable_ssd, enable_ssd, make_custom_generate
    from .metrics import SSDStats
    from .pairs import embedded_pair, load_pair
    from .sampling import SaguaroLogitsProcessor
    from .streaming import RoundStreamer
    from .trace import measure_overlap
    from .types import Miss, Origin, RoundStats, Span

__version__ = "0.1.0"

_MODULE_OF = {
    "Miss": "types",
    "Origin": "types",
    "RoundStats": "types",
    "RoundStreamer": "streaming",
    "SSDConfig": "config",
    "SSDGenerationMixin": "generation",
    "SSDStats": "metrics",
    "SaguaroLogitsProcessor": "sampling",
    "Span": "types",
    "custom_generate_path": "generation",
    "disable_ssd": "generation",
    "embedded_pair": "pairs",
    "enable_ssd": "generation",
    "load_head": "eagle3",
    "load_pair": "pairs",
    "make_custom_generate": "generation",
    "measure_overlap": "trace",
}

_MODULES = ("theory",)  # public as a whole

__all__ = [
    "Miss",
    "Origin",
    "RoundStats",
    "RoundStreamer",
    "SSDConfig",
    "SSDGenerationMixin",
    "SSDStats",
    "SaguaroLogitsProcessor",
    "Span",
    "__version__",
    "custom_generate_path",
    "disable_ssd",
    "embedded_pair",
    "enable_ssd",
    "load_head",
    "load_pair",
    "make_custom_generate",
    "measure_overlap",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
