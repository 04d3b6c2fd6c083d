"""The job of `par-train run`: it trains a byte GPT or a Hugging Face Transformers model (`existing`) on text.

`start` launches ranks, each of which lives in `rank`; `begin` agrees on data and checkpoint; `trainer` takes the steps.
"""
