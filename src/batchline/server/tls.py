"""Checks the certificate and its key before the server starts.

OpenSSL's errors say little, and it would ask for a password on the terminal. Here, each mistake gets a sentence that
names the option.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from batchline.errors import UsageError


def check_certificate(certfile: str, keyfile: str | None, password: str | None) -> None:
    """keyfile: None if the certificate's file also holds the key. Raises: UsageError."""
    certificate = _read("--ssl-certfile", certfile)
    key = certificate if keyfile is None else _read("--ssl-keyfile", keyfile)
    is_encrypted = b"ENCRYPTED" in key  # in both of PEM's ways to say so
    if is_encrypted and not password:
        raise UsageError("The key is encrypted: give its password with --ssl-keyfile-password")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password or "")
    except ssl.SSLError as exc:
        raise UsageError(_explain(exc, is_encrypted)) from exc


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise UsageError(f"{option}: cannot read {path!r}: {exc.strerror}") from exc


def _explain(exc: ssl.SSLError, is_encrypted: bool) -> str:
    if exc.reason == "KEY_VALUES_MISMATCH":
        return "--ssl-keyfile: the key is not that of the certificate in --ssl-certfile"
    if is_encrypted:
        return "--ssl-keyfile-password: this password does not decrypt the key"
    return "--ssl-certfile and --ssl-keyfile: the files do not contain a certificate and its key in PEM format"
