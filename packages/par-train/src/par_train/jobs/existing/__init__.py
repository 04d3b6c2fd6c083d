"""The Hugging Face Transformers model that a job trains: its folder, files of text, prompts and adapter.

`folder` and `sources` check paths before torch is imported; `data` makes rows; `model` is the trainer's `Recipe`.
"""
