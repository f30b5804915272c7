"""Speech recognition with Whisper models: a window of sound to tokens, many windows at once.

An encoder-decoder needs no paged cache: a window's prompt and text have a few hundred tokens at most.
"""
