"""Between text and token ids: tokenizers, chat templates, message contents, detokenizing, stop strings, and parsers for
tool calls and reasoning.

Knows no HTTP, no wire schema and no engine.
"""
