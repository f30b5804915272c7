"""One batch file in, one result file out, with nothing lost.

The path of a batch line: `source` (plain bytes on disk) -> `check` (every line parsed, counted, indexed) -> `plan`
(order and duplicates) -> `runner` (bounded in flight, through a backend) -> `journal` (durable) -> `sink` (in input
order, renamed into place or uploaded). `run` calls them in that order. Knows backends only through `backends.base`.
Prints nothing, except for the progress bar of the Python API (`progress_bar`).
"""
