"""Embeddings and cross-encoder scores: token ids in, vectors and scores out. No HTTP.

`sentence-transformers` loads a model (modules, pooling, normalisation, prompts, activation). The forward pass runs in
our own batches: `batching` picks sequences of similar length, `features` makes tensors of them, and `worker` runs them
on one thread for all callers. `tokenizing` turns text into token ids as the model expects.
Importing the package, `batching`, `worker` or `detection` loads neither torch nor transformers.
"""
