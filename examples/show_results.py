"""Print a batch file's questions beside the answers in its result file: `show_results.py INPUT OUTPUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def read(path: str) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def content_of(message: dict[str, Any]) -> str:
    """A message's text, with a word in place of each image."""
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "(image)") for part in content)


def answer_of(result: dict[str, Any]) -> str:
    """The text of a chat result line, or its error."""
    if result["response"] is None:
        return f"[red]{result['error']['code']}: {result['error']['message']}"
    body = result["response"]["body"]
    if "error" in body:
        return f"[red]{result['response']['status_code']}: {body['error']['message']}"
    return str(body["choices"][0]["message"]["content"])


def main() -> None:
    """Show every line of the batch file with its answer."""
    questions, results = read(sys.argv[1]), read(sys.argv[2])
    table = Table("custom_id", "messages", "answer")
    for question, result in zip(questions, results, strict=True):
        messages = "\n".join(f"[dim]{m['role']}:[/] {content_of(m)}" for m in question["body"]["messages"])
        table.add_row(result["custom_id"], messages, answer_of(result))
    Console().print(table)


if __name__ == "__main__":
    main()
