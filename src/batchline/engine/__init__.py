"""Continuous batching: token ids in, token ids out. No text, no HTTP.

It has five main classes: `Sequence` (one running request), `BlockPool` (who owns which cache block),
`Scheduler` (what the next step computes), `ModelRunner` (one packed forward pass), `Sampler` (the next tokens).
`core.Engine.step` calls them in that order; `async_engine.AsyncEngine` runs it on a separate thread.
"""
