"""Lets `model.generate(..., custom_generate=hf_ssd.custom_generate_path(), trust_remote_code=True)` decode by SSD."""

from hf_ssd.generation import generate_with_ssd


def generate(model, **kwargs):
    """`model.generate()` with `assistant_model` and `ssd_config`."""
    return generate_with_ssd(model, **kwargs)
