"""Loss scale, loss weights and skipped steps: the state of a run in addition to weights and moments.

`scaling` combines `scale` (factor of the loss), `loss_weights` (exact means over items) and counters, and is saved.
Callers use `schedule`: an lr schedule that does not advance when a step was skipped.
"""
