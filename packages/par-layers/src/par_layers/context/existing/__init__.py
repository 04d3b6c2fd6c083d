"""Context parallelism of Hugging Face Transformers decoders, whose code stays unchanged.

decoders and trial (which models are supported; both change nothing) -> transformers (attention and batches become a
context's) and recurrent (recurrent layers continue from the states of the rank on the left) -> states, handover.
"""
