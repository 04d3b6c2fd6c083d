"""The loss scale, what losses weigh, and skipped steps: what a run remembers besides its weights and moments.

scale (the factor of the loss) and loss_weights (exact means over items) -> scaling (both, and the counters; what is
saved). schedule is for the caller: an lr schedule that stands still where a step was skipped.
"""
