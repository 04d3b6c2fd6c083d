"""Context parallelism of Hugging Face Transformers decoders, whose code stays unchanged.

decoders (which models are supported; changes nothing) -> transformers (their attention and batches become a context's).
"""
