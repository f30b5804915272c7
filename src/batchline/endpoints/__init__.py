"""The endpoints, a file for each: they translate a request for the engine, and the engine's results into an answer.

Knows loaded models. Does not know which model serves a request, nor batch files or HTTP.
"""
