"""A mixture of experts over ranks: each token is routed to a few experts, whichever rank holds them.

entrance (tokens of a tensor group) -> router -> dispatch (all-to-all) -> experts -> combine; moe is the layer of these,
and lanes has experts whose bits do not depend on the ranks.
selection, rows and cost are pure arithmetic; balance, step and replay belong to the router.
"""
