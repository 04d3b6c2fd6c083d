"""The job that trains a model of transformers, as it is, on a file of text.

folder.py reads what describes the model, and is pure; data.py has the tokens. trainer.py takes the steps, over any
ranks, on top of `jobs.training`.
"""
