"""Training that goes on in the same processes after a rank is lost.

`survivors` moves the state after a loss and runs the steps. `step` hands them to the caller. `reports` has what ranks
tell each other before a move. `options` checks what is supported.
"""
