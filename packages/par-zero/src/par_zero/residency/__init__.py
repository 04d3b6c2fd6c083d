"""Where the bytes of a sharded module lie.

`table` is what is said of them; `count` looks at what there is now, and takes what was there at the fullest moment of a
step from the meter that the chunks and buffers have kept.
"""
