"""Durable Files and Batches: their states, their store, and the worker that runs batches.

A batch is a run of `batch/run.py` whose files, options and end are records of the store. Knows nothing about HTTP.
"""

import logging

logging.getLogger("alembic").setLevel(logging.WARNING)  # it reports each import of its plugins, and each start
