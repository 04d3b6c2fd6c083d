"""What `par-train run` trains: a byte-level GPT on a folder of text, or a model of transformers on a file of text.

Options and checks (options, checks, text, order) are pure and known before torch is imported. start.py starts the ranks
or joins them, rank.py is the life of one rank, begin.py agrees on where the run starts, and training.py takes the steps
that are alike in both jobs: trainer.py those of the byte GPT (gpt, gpt_stages), the room `existing` those of a model of
transformers. job_run.py is the run around them: `par_train.Run` with one checkpoint (checkpoint) and words of its own
(report).
"""
