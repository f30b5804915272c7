"""Lines that are recognized by their form give the same results as lines that are parsed in Python."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchline.batch import check as check_module
from batchline.batch import line_forms as forms_module
from batchline.batch import lines as lines_module
from batchline.batch.check import CheckReport, check_file
from batchline.batch.index import LineIndex
from batchline.batch.lines import around_messages, check_fields
from batchline.batch.plan import Planner
from batchline.batch.request_traits import PREFIX_LENGTHS, prefix_hashes, prompt_bytes, request_hash, request_text
from batchline.errors import RunInterrupted
from batchline.native.batch_lines import FormText, NativeForms, load_batch_lines

LIBRARY = load_batch_lines()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library was not built")

URL = "/v1/chat/completions"


def line(custom_id: str, messages: Any, *, url: str = URL, **body: Any) -> dict[str, Any]:
    """before: fields of the body that come before the messages."""
    before = body.pop("before", {})
    body = {"model": "m", **before, "messages": messages, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief. " * 9}, {"role": "user", "content": text}]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "MIN_BYTES_FOR_FORMS", 0)
    monkeypatch.setattr(check_module, "_FIRST_BLOCK_BYTES", 512)


def checked(data: bytes, folder: Path, **options: Any) -> tuple[CheckReport, bytes, bytes]:
    """The report, the index and the plan."""
    path = folder / "in.jsonl"
    path.write_bytes(data)
    with closing(LineIndex(folder / "index")) as index, closing(Planner(folder)) as planner:
        report = check_file(path, index, scratch=folder, planner=planner, **options)
        plan = planner.plan(skip=report.bad)
        return report, (folder / "index").read_bytes(), plan.path.read_bytes()


def shown(report: CheckReport) -> Any:
    """What a report says."""
    fields = {name: getattr(report, name) for name in report.__slots__ if not name.startswith("_")}
    sets = {name: sorted(fields.pop(name)) for name in ("bad", "duplicates")}
    return fields | sets | {"unknown_fields": report.unknown_fields.warnings(), "order": list(report.groups)}


def assert_same_without_forms(data: bytes, folder: Path, **options: Any) -> None:
    report, index, plan = checked(data, folder, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms_module, "load_batch_lines", lambda: None)
        expected, expected_index, expected_plan = checked(data, folder, **options)
    assert shown(report) == shown(expected)
    assert index == expected_index
    assert plan == expected_plan


@pytest.fixture
def num_parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many lines were parsed in Python."""
    parsed: list[object] = []

    def counting_check(value: object, default_model: str | None = None) -> Any:
        parsed.append(value)
        return check_fields(value, default_model)

    monkeypatch.setattr(lines_module, "check_fields", counting_check)
    return lambda: len(parsed)


def joined(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else orjson.dumps(one)) + b"\n" for one in lines)


def test_only_the_first_lines_of_a_form_are_parsed_in_python(tmp_path: Path, num_parsed: Callable[[], int]) -> None:
    lines = [line(f"r{n}", chat(f'Frage "{n}"\n größer'), max_tokens=10 + n % 3, temperature=0) for n in range(3000)]
    report, _, _ = checked(joined(lines), tmp_path)
    assert (report.num_requests, report.num_faults) == (3000, 0)
    assert num_parsed() < 20


def test_every_kind_of_line_gives_the_same_results_as_without_forms(tmp_path: Path) -> None:
    rng = random.Random(1)
    lines: list[Any] = []
    for n in range(1500):
        messages: Any = chat(rng.choice(["a", 'a "quote"', "ü\u2028\U0001f600", "\0\x1f\x7f/\\", "x" * 5000, f"{n}"]))
        one = line(f"r{n % 1400}", messages, max_tokens=rng.choice([5, 500]), temperature=rng.choice([0, 1]))
        body = one["body"]
        change = rng.randrange(14)
        if change == 0:
            body["messages"] = rng.choice(
                ["text", {}, [], None, 5, [[[{"b": 1, "a": [True, {}, None]}]]], [1.5], [-0.0]]
            )
        elif change == 1:
            body["temprature"] = rng.choice([1, None])
        elif change == 2:
            one["url"] = rng.choice(
                ["/v1/embeddings", "/v2/rerank", "/invocations", "https://host/v1/chat/completions"]
            )
        elif change == 3:
            one = {"body": body, **one}
        elif change == 4:
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
        elif change == 5:
            lines.append(rng.choice([b"", b" \t\r", b"bad", b"\x0b\x0c", b"[]", b'{"custom_id": "x"}', b"\xff"]))
        elif change == 6:
            lines.append(json.dumps(one, ensure_ascii=rng.random() < 0.5).encode() + rng.choice([b"", b" ", b"\r"]))
            continue
        elif change == 7:
            body["stream"] = rng.random() < 0.5
        elif change == 8:
            body["model"] = rng.choice(["n", "", None])
        lines.append(one)
    assert_same_without_forms(joined(lines), tmp_path, default_model="default")
    assert_same_without_forms(joined(lines)[:-1], tmp_path)
    assert_same_without_forms(b"\xef\xbb\xbf" + joined(lines), tmp_path)


TEXTS = st.text(st.sampled_from('ab"\\/\n\té€😀\x00\x7f \u2028'), max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**16), 10**16)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def spaced_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(" ,", ":  "))


WRITERS: st.SearchStrategy[Callable[[Any], str]] = st.sampled_from([json.dumps, spaced_json])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A line, which may have a few bytes changed."""
    one = line(draw(st.sampled_from(["a", "b", "ü", 'q"'])), draw(st.lists(VALUES, max_size=3)))
    data = bytearray(draw(WRITERS)(one).encode())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(
            st.binary(max_size=2) | st.sampled_from([b'"', b"\\", b",", b"]"])
        )
    return bytes(data)


@given(st.lists(damaged(), max_size=12))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=25
)
def test_damaged_lines_give_the_same_results_as_without_forms(tmp_path: Path, lines: list[bytes]) -> None:
    known = line("first", chat("hi"))
    assert_same_without_forms(joined([known, json.dumps(known).encode(), b" " * 600, *lines, b""]), tmp_path)


def scan(messages: bytes) -> tuple[list[int], list[int], bytes] | None:
    """The prefix hashes, the prompt's size and the request hash of a line with such messages; None if it is refused."""
    assert LIBRARY is not None
    known = orjson.dumps(line("a", []))
    around = around_messages(known)
    assert around is not None
    marked = line("a", orjson.Fragment(b'"?"'))["body"]
    request = (request_text(URL, marked) or b"").split(b'"?"')
    with closing(NativeForms(LIBRARY, PREFIX_LENGTHS, 4)) as forms:
        forms.add(FormText(around, (b"", b""), (request[0], request[1])))
        scanned = forms.scan(around[0] + b"new" + around[1] + messages + around[2])
        if scanned.forms.tolist() != [0]:
            return None
        prompt_size = int(scanned.prompt_sizes[0])
        return scanned.prefix_hashes[0].tolist(), [prompt_size], scanned.request_hashes[0].tobytes()


def expected_scan(messages: bytes) -> tuple[list[int], list[int], bytes]:
    body = orjson.loads(orjson.dumps(line("a", None)["body"]).replace(b"null", messages))
    prompt = prompt_bytes(body)
    return prefix_hashes(prompt), [len(prompt)], request_hash(URL, body)


@given(st.lists(VALUES, max_size=4), WRITERS)
@settings(deadline=None)
def test_messages_are_hashed_as_python_hashes_them(messages: list[Any], writer: Callable[[Any], str]) -> None:
    text = writer(messages).encode()
    found = scan(text)
    assert found is None or found == expected_scan(text)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**14), 10**14) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(PLAIN, max_size=4), WRITERS)
@settings(deadline=None)
def test_usual_messages_are_recognized(messages: list[Any], writer: Callable[[Any], str]) -> None:
    text = writer(messages).encode()
    assert scan(text) == expected_scan(text)


@pytest.mark.parametrize(
    "messages",
    [
        *(b"[1,]", b"[,1]", b"[", b"[1 2]", b"[]]", b"[}", b'[{"a"}]', b'[{"a":}]', b'[{"a":1,}]', b"[01]", b"[-]"),
        *(b"[+1]", b"[1.]", b"[nul]", b"[truee]", b"[NaN]", b'["\\x"]', b'["\\u12"]', b'["\\ud800"]', b'["\\udc00"]'),
        *(b'["\\ud800\\u0041"]', b'["\t"]', b'["\xff"]', b'["\xc0\x80"]', b'["\xed\xa0\x80"]', b'["\xf4\x90\x80\x80"]'),
        *(b'["\xe2\x82"]', b'["unclosed]', b'["\\"]', b"{}", b"null", b'"text"', b"", b"[[" * 200, b'[{"a":1 "b":2}]'),
    ],
)
def test_invalid_messages_are_refused(messages: bytes) -> None:
    assert scan(messages) is None


@pytest.mark.parametrize("messages", [b'[{"a":1,"a":2}]', b"[1.5]", b"[-0]", b"[1e5]", b"[12345678901234567890]"])
def test_rare_but_valid_messages_are_left_to_python(messages: bytes) -> None:
    assert scan(messages) is None
    assert expected_scan(messages)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 4095, 4096, 4097, 9000])
def test_texts_of_every_length_are_hashed_as_python_hashes_them(size: int) -> None:
    text = orjson.dumps(["x" * size])
    assert scan(text) == expected_scan(text)


def test_a_file_whose_lines_have_little_in_common_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms_module, "MAX_FORMS", 3)
    lines = [line(f"r{n}", chat("hi"), seed=n % 20, before={"top_p": n % 7 / 7}) for n in range(300)]
    assert_same_without_forms(joined(lines), tmp_path)


def test_a_stop_interrupts_a_file_whose_lines_are_all_recognized(tmp_path: Path) -> None:
    asked: Iterator[bool] = iter([False] * 8 + [True] * 9)
    with pytest.raises(RunInterrupted):
        checked(joined([line(f"r{n}", chat("hi")) for n in range(9000)]), tmp_path, should_stop=lambda: next(asked))


def test_an_observer_gets_every_line(tmp_path: Path) -> None:
    seen: list[int] = []
    lines = [line(f"r{n}", chat("hi")) for n in range(200)]
    checked(joined(lines), tmp_path, observer=lambda position, _url, _body: seen.append(position))
    assert seen == list(range(200))


def test_the_lines_after_the_last_observed_one_are_recognized_by_their_forms(
    tmp_path: Path, num_parsed: Callable[[], int]
) -> None:
    """A batch that was cancelled while its file was checked had every further line parsed and judged: 2,000,000 lines
    took minutes, and none of them was going to run."""
    lines = joined([line(f"r{n % 2999}", chat(str(n)), temperature=0) for n in range(3000)])
    seen: list[int] = []

    def observe(position: int, _url: str, _body: dict[str, Any]) -> None:
        seen.append(position)

    report, index, plan = checked(lines, tmp_path, observer=observe, needs_observer=lambda: len(seen) < 5)
    assert seen == [0, 1, 2, 3, 4]
    assert num_parsed() < 20
    expected, expected_index, expected_plan = checked(lines, tmp_path)
    assert (shown(report), index, plan) == (shown(expected), expected_index, expected_plan)
