"""The records of files and batches in a database (`database.py`).

Its parts are in `file_store.py`, `batch_store.py` and `worker_store.py`. A change that depends on what it has read
first holds a row (`hold`), because other threads and servers change the same rows. All methods block; the event loop
calls them on threads.
"""

from __future__ import annotations

from dataclasses import fields

from sqlalchemy import case, delete, func, select, update

from batchline.jobs.batch_store import BatchStore
from batchline.jobs.file_store import FileStore
from batchline.jobs.store_base import is_due
from batchline.jobs.tables import DueWebhook, WebhookRecord, batches, webhooks
from batchline.jobs.worker_store import WorkerStore

LONGEST_WEBHOOK_WAIT_S = 5 * 3600.0
"""How long a webhook waits at most for its next try. A longer wait means that the clock was set back."""


class Store(FileStore, BatchStore, WorkerStore):
    """Files and batches of all owners. An owner never learns of another one's objects."""

    def due_webhooks(self, now: float, limit: int, per_owner: int = 1000) -> list[DueWebhook]:
        """Those that are to be tried now, the one that has waited longest first.

        per_owner: at most so many of one owner's batches, and as many of the operator's.
        """
        owner = case((webhooks.c.url.is_(None), None), else_=batches.c.owner).label("owner")
        place = func.row_number().over(partition_by=owner, order_by=webhooks.c.next_at).label("place")
        due = (
            select(webhooks, owner, place)
            .join(batches, batches.c.id == webhooks.c.batch_id)
            .where(is_due(webhooks.c.next_at, now, LONGEST_WEBHOOK_WAIT_S))
            .subquery()
        )
        columns = [due.c[field.name] for field in fields(DueWebhook)]
        query = select(*columns).where(due.c.place <= per_owner).order_by(due.c.next_at).limit(limit)
        with self._engine.connect() as connection:
            return [DueWebhook(**row) for row in connection.execute(query).mappings()]

    def take_webhook(self, webhook: WebhookRecord, next_at: float) -> bool:
        """Begin a try. next_at: when the next one is due. Returns False if another process has begun it."""
        is_first = [webhooks.c.id == webhook.id, webhooks.c.attempts == webhook.attempts]
        change = update(webhooks).where(*is_first).values(attempts=webhook.attempts + 1, next_at=next_at)
        with self._engine.begin() as connection:
            return connection.execute(change).rowcount == 1

    def end_webhook(self, webhook_id: str) -> None:
        """It is delivered, or not tried again. Idempotent."""
        with self._engine.begin() as connection:
            connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))
