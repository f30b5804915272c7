"""The command line: turns options into calls of the library, and results into messages and exit codes.

`main` maps errors to exit codes. Each command has a file with its options; `model_options` has those that they share.
Nothing here imports torch or transformers before a model is needed, so that `--help` and refusals are instant.
"""
