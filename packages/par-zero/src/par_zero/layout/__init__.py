"""How parameters, gradients and what the optimizer holds lie in flat buffers, called chunks.

`units` says which parameters belong together, `sharers` who shares them, `packing` where each lies in a buffer (pure
arithmetic), `build` makes the chunks, and `records` writes on every tensor what it holds; `sizes` counts chunks before
any is made. A step works with a `chunk`, whose memory for gradients comes out of `buffers`; `packed` notices parameters
that were replaced. `fill` makes real what was on the meta device, and `unwritten` notices what has no values yet.
Nothing here takes part in a collective.
"""
