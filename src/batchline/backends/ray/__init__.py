"""Replicas as actors of a Ray cluster. Nothing else imports Ray."""
