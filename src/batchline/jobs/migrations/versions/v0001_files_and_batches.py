"""The first tables: files, uploads, batches and stored responses."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _time(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger)


def _number() -> sa.Column[int]:
    return sa.Column("number", _NUMBER, primary_key=True, autoincrement=True)


def _id() -> sa.Column[str]:
    return sa.Column("id", sa.String(64), nullable=False, unique=True)


def _owned_object() -> list[sa.Column[Any]]:
    return [_number(), _id(), sa.Column("owner", sa.String(64), nullable=False)]


def upgrade() -> None:
    """Create them."""
    _create_files()
    _create_batches()
    _create_uploads()
    _create_upload_parts()
    _create_idempotency()
    _create_responses()
    _create_response_items()
    _create_webhooks()
    _create_facts()


def _create_files() -> None:
    op.create_table(
        "files",
        *_owned_object(),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(64), nullable=False),
        _count("bytes"),
        _count("created_at"),
        _time("expires_at"),
        sa.Column("content", sa.String(128)),
    )
    op.create_index("files_by_owner", "files", ["owner", "number"])
    op.create_index("files_by_purpose", "files", ["owner", "purpose", "number"])
    op.create_index("files_by_expiry", "files", ["expires_at"])


def _create_batches() -> None:
    op.create_table(
        "batches",
        *_owned_object(),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("completion_window", sa.String(32), nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("metadata", sa.JSON),
        sa.Column("errors", sa.JSON),
        _count("num_errors"),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("output_expires_after", sa.BigInteger),
        *map(_count, ("total", "completed", "failed", "prompt_tokens", "cached_tokens", "output_tokens")),
        _count("reasoning_tokens"),
        sa.Column("failures_by_code", sa.JSON),
        sa.Column("estimated_input_tokens", sa.BigInteger),
        sa.Column("estimated_output_tokens", sa.BigInteger),
        sa.Column("estimated_s", sa.Float),
        sa.Column("expected_at", sa.Float),
        *map(_count, ("created_at", "expires_at")),
        *map(_time, ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at")),
        *map(_time, ("cancelling_at", "cancelled_at")),
        sa.Column("worker", sa.String(64)),
        sa.Column("retry_of", sa.String(64)),
        sa.Column("webhook", sa.JSON),
        _count("fence"),
        sa.Column("lease_ends_at", sa.Float, nullable=False),
        sa.Column("retry_at", sa.Float, nullable=False),
    )
    op.create_index("batches_by_owner", "batches", ["owner", "number"])
    op.create_index("batches_by_status", "batches", ["status", "number"])
    op.create_index("batches_by_input", "batches", ["input_file_id"])
    op.create_index("batches_by_output", "batches", ["output_file_id"])
    op.create_index("batches_by_errors", "batches", ["error_file_id"])


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        *_owned_object(),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(64), nullable=False),
        _count("bytes"),
        sa.Column("status", sa.String(16), nullable=False),
        _count("created_at"),
        _count("expires_at"),
        _time("file_expires_after"),
        sa.Column("file_id", sa.String(64)),
    )
    op.create_index("uploads_by_status", "uploads", ["status", "expires_at"])


def _create_upload_parts() -> None:
    op.create_table(
        "upload_parts",
        _number(),
        _id(),
        sa.Column("upload_id", sa.String(64), nullable=False),
        _count("bytes"),
        _count("created_at"),
    )
    op.create_index("upload_parts_by_upload", "upload_parts", ["upload_id"])


def _create_idempotency() -> None:
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("request", sa.String(64), nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        _count("created_at"),
    )
    op.create_index("idempotency_by_age", "idempotency", ["created_at"])


def _create_responses() -> None:
    op.create_table(
        "responses",
        *_owned_object(),
        sa.Column("is_background", sa.Boolean, nullable=False),
        _count("num_bytes"),
        sa.Column("stored_at", sa.Float, nullable=False),
        sa.Column("running_until", sa.Float),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("input_items", sa.LargeBinary, nullable=False),
    )


def _create_response_items() -> None:
    op.create_table(
        "response_items",
        _number(),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("response_id", sa.String(64), nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
    )
    op.create_index("response_items_by_id", "response_items", ["id"])
    op.create_index("response_items_by_response", "response_items", ["response_id"])


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        _number(),
        _id(),
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("url", sa.Text),
        sa.Column("secret", sa.Text),
        _count("created_at"),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_at", sa.Float, nullable=False),
    )
    op.create_index("webhooks_by_time", "webhooks", ["next_at"])


def _create_facts() -> None:
    op.create_table(
        "facts",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop them."""
    tables = ("webhooks", "response_items", "responses", "idempotency", "upload_parts", "uploads", "batches", "files")
    for name in ("facts", *tables):
        op.drop_table(name)
