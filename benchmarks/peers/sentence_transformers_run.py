"""The peer of pooling models: `SentenceTransformer.encode` or `CrossEncoder.predict` on a file of texts.

    python sentence_transformers_run.py embed|score MODEL TEXTS [--dtype float32 bfloat16] [--batch-size 8 16 ...]

TEXTS holds a JSON string (or a list of two, for a pair) per line. Every combination of dtype and batch size is timed
once, after a warm-up, with the library's own sorting by length; `--save` keeps the rows of the first. The last line is
JSON: seconds for imports and loading, and for each combination.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

STARTED = time.perf_counter()

import numpy as np  # noqa: E402 - the imports are part of what is timed
import torch  # noqa: E402
from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: E402

NUM_WARM_UP = 32


def main() -> None:
    """Load, warm up, and time each combination."""
    options = _parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    with open(options.texts, encoding="utf-8") as lines:
        inputs = [json.loads(line) for line in lines]
    loaded_s, runs = None, []
    for dtype in options.dtype:
        model = _load(options.kind, options.model, dtype)
        loaded_s = loaded_s or time.perf_counter() - STARTED
        if len(options.dtype) * len(options.batch_size) > 1:
            _run(model, inputs[:NUM_WARM_UP], NUM_WARM_UP)  # a sweep compares; a single run pays for all of its own
        for batch_size in options.batch_size:
            start = time.perf_counter()
            rows = _run(model, inputs, batch_size)
            runs.append({"dtype": dtype, "batch_size": batch_size, "run_s": time.perf_counter() - start})
            if options.save and len(runs) == 1:
                np.save(options.save, np.asarray(rows, dtype=np.float32))
    print(json.dumps({"loaded_s": loaded_s, "runs": runs}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="sentence-transformers on a file of texts.")
    parser.add_argument("kind", choices=["embed", "score"])
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[32])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save", metavar="FILE", help="for the first combination's rows, as float32")
    return parser.parse_args()


def _load(kind: str, model: str, dtype: str) -> Any:
    loader = SentenceTransformer if kind == "embed" else CrossEncoder
    return loader(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})


def _run(model: Any, inputs: list[Any], batch_size: int) -> Any:
    if isinstance(model, SentenceTransformer):
        return model.encode(inputs, batch_size=batch_size, show_progress_bar=False)
    return model.predict([tuple(pair) for pair in inputs], batch_size=batch_size, show_progress_bar=False)


if __name__ == "__main__":
    main()
