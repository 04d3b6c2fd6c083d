"""Training that goes on in the same processes after a rank is lost.

`survivors` runs the steps and moves the state after a loss, `reports` has what ranks tell each other before a move, and
`options` checks what is supported.
"""
