"""The OpenAI-compatible wire format of requests and responses, a file per resource.

Request bodies are untrusted. This package checks them with pydantic; it knows nothing about models or engines.
"""
