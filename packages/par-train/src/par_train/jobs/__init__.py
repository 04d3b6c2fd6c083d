"""The job of `par-train run`: it trains a byte GPT or a Hugging Face Transformers model (`existing`) on text.

`start` launches ranks, each of which lives in `rank`; `job_run` is its program: the loop of `Run` around a `trainer`,
with the `hooks` of a command. `begin` compares data between ranks; `recipe` is what the trainer needs of a model.
"""
