"""The command line: turns options into calls of the library, and results into messages and exit codes.

`main` maps errors to exit codes; a file per command holds its options; `model_options` are those that commands share.
Nothing here imports torch or transformers before a model is needed, so that `--help` and refusals are instant.
"""
