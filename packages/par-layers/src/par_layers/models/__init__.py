"""Whole models that were not written against a layer set, cut in place, their code unchanged.

plans (what the user or the model says) -> survey (what that means for every parameter and region; pure) -> parallelize
(which does it, with the linears, embeddings, regions, counts and loss of the other modules).
"""
