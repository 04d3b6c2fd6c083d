"""The bytes of a sharded module, by memory tier.

`count` inspects the memory now, and reads the peak of a step from the meter that chunks and buffers update. It returns
the bytes as a `table`.
"""
