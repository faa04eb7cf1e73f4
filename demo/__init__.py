"""A page on which plain decoding, speculative decoding and SSD race each other.

It uses what any user of `hf_ssd` could: its public names, and gradio. An installation calls it `hf_ssd_demo`.
"""
