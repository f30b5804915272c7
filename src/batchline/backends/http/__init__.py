"""The HTTP backend: OpenAI-compatible servers that run elsewhere answer the requests."""
