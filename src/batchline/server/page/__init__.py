"""The web page: batches, their details and the engine's load, for people with a browser.

Rendered here, with a small script that only refreshes what is shown; everything works without it. Calls `jobs/` as the
REST API does, with the owner of the visitor's session.
"""
