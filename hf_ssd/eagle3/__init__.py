"""EAGLE-3 heads (arXiv 2503.01840): assistants of one decoder layer that read the target's hidden states."""

from .backlog import FeatureBacklog
from .checkpoints import load_head, read_config
from .config import Eagle3Config, default_layer_ids
from .features import (
    FeatureGetter,
    FeatureWatch,
    TargetFeatures,
    capture_features,
    check_head,
    decoder_layers,
    feature_layers,
)
from .head import Eagle3Head, Eagle3Output

__all__ = [
    "Eagle3Config",
    "Eagle3Head",
    "Eagle3Output",
    "FeatureBacklog",
    "FeatureGetter",
    "FeatureWatch",
    "TargetFeatures",
    "capture_features",
    "check_head",
    "decoder_layers",
    "default_layer_ids",
    "feature_layers",
    "load_head",
    "read_config",
]
