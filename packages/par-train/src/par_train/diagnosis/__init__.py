"""Why a job hangs: what each rank is doing, told by a thread that looks on, and one line that says who keeps whom.

`watch` (`Diagnosis`, the public door) notices a timeout, SIGQUIT or an error; `capture` makes this rank's `dump`, and
in `meeting` the ranks exchange theirs over the store. `explain` turns dumps into words, with `history` for what ranks
have done differently; these and `dump` are pure and need no torch, so that `par-train diagnose` reads a dead job's.
"""
