"""What Alembic runs for each migration; see its documentation."""

from __future__ import annotations

from alembic import context

from batchline.jobs.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
