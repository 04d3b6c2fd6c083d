"""What `par-train run` trains: a byte-level GPT on a folder of text.

Options and checks (options, checks, text, order) are pure and known before torch is imported. start.py starts the ranks
or joins them, rank.py is the life of one rank, begin.py agrees on where the run starts, trainer.py takes steps of the
model (gpt, gpt_stages), and gpt_run.py is the run around them: `par_train.Run` with one checkpoint (checkpoint) and
words of its own (report).
"""
