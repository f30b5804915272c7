"""Streamed chats at a steady rate, for the time to their first token.

    python benchmarks/chat_client.py URL BODIES_FILE CHATS_PER_SECOND SECONDS

Run by `interactive_first.py` in a process of its own, which imports nothing large. Prints the seconds from each request
to its first content as a JSON list.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import httpx


def main() -> None:
    """Send the chats, wait for them, print."""
    url, bodies_file, rate, seconds = sys.argv[1:]
    bodies = Path(bodies_file).read_text().splitlines()
    print(json.dumps(asyncio.run(_chat_for(url, bodies, float(rate), float(seconds)))))


async def _chat_for(url: str, bodies: list[str], rate: float, seconds: float) -> list[float]:
    """Chats at even distances, each a little early or late."""
    rng = random.Random(seconds)
    times: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=httpx.Limits(max_connections=1000)) as client:
        start = time.perf_counter()
        tasks = []
        for number in range(max(4, round(seconds * rate))):
            due = (number + rng.random()) / rate
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(asyncio.create_task(_chat(client, json.loads(bodies[number % len(bodies)]), times)))
        await asyncio.gather(*tasks)
    return times


async def _chat(client: httpx.AsyncClient, body: dict[str, object], times: list[float]) -> None:
    began_at = time.perf_counter()
    is_first = True
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if is_first and '"content":"' in line.replace('"content":""', ""):
                is_first = False
                times.append(time.perf_counter() - began_at)


if __name__ == "__main__":
    main()
