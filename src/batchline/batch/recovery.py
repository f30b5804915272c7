"""What an earlier process left of a run: its journal, read once, and the crash that may have ended it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from batchline.batch.check import CheckReport
from batchline.batch.crashes import LETHAL_CRASHES, Crash, Suspects, last_crash
from batchline.batch.fingerprint import refuse_other_run, run_identity
from batchline.batch.index import PositionSet
from batchline.batch.job_folder import JobFolder
from batchline.batch.journal import Disk, Journal, JournalEntry, Note, encode_note
from batchline.batch.options import RunOptions
from batchline.batch.progress import Reporter, Tally
from batchline.errors import RunFailed


@dataclass(frozen=True, slots=True)
class RunState:
    """What is durable: the journal, the positions in it and their sums, where results have arrived, who is suspect."""

    journal: Journal
    tally: Tally
    done: PositionSet = field(default_factory=PositionSet)
    delivered: set[str] = field(default_factory=set)
    suspects: Suspects = field(default_factory=Suspects)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it holds more than a new run can make in seconds."""
        return self.tally.answered > 0 or bool(self.suspects.tokens)

    def write_note(self, note: Note) -> None:
        """Put a note into the journal and count it. Raises: OSError."""
        self.journal.append(encode_note(note))
        self._count_note(note)

    def read_journal(self) -> None:
        """Count what the journal holds. Raises: OSError."""
        for record in self.journal.records():
            if isinstance(record, JournalEntry):
                if self.done.add(record.outcome.position):
                    self.tally.add(record.outcome, is_resumed=True)
            else:
                self._count_note(record)

    def _count_note(self, note: Note) -> None:
        if note.kind == "delivered":
            self.delivered.add(note.text)
        else:
            self.suspects.add(note)


def recover(
    options: RunOptions,
    report: CheckReport,
    job_folder: JobFolder,
    reporter: Reporter,
    open_files: ExitStack,
    disk: Disk | None = None,
) -> RunState:
    """Open the journal and count what it holds. open_files: closes it. Raises: ResumeRefused, RunFailed."""
    if not options.resume or not job_folder.journal_path.exists():
        job_folder.start_over()
    identity = run_identity(options, report)

    def open_state() -> RunState:
        journal = Journal.open(job_folder.journal_path, identity, disk)
        open_files.callback(journal.close)
        state = RunState(journal, Tally(report.num_lines))
        state.read_journal()
        return state

    try:
        state = open_state()
        if state.journal.run != identity and not state.tally.answered:
            reporter.phase("Starting over: the unfinished run found here differs and has no answers")
            job_folder.start_over()
            state = open_state()
        refuse_other_run(state.journal.run, identity, state.tally.done)
        _count_last_crash(state, last_crash(job_folder.path), reporter)
    except OSError as exc:
        raise RunFailed(f"The journal cannot be opened: {exc.strerror or exc}.") from exc
    if state.tally.done:
        reporter.phase(f"Resuming: {state.tally.done:,} of {state.tally.total:,} requests were done before")
    return state


def note_crash(state: RunState, crash: Crash) -> int:
    """Count a crash in the journal. Returns how many requests it makes suspects. Raises: OSError."""
    positions = tuple(p for p in crash.positions if p < state.tally.total and p not in state.done)
    if not positions or crash.token in state.suspects.tokens:
        return 0
    state.write_note(replace(crash, positions=positions).note())
    return len(positions)


def _count_last_crash(state: RunState, crash: Crash | None, reporter: Reporter) -> None:
    """Count the crash that ended the process before this one, and say what follows from it."""
    num_suspects = 0 if crash is None else note_crash(state, crash)
    if crash is None or not num_suspects:
        return
    requests = "1 request" if num_suspects == 1 else f"{num_suspects:,} requests"
    reporter.warn(
        f"The process that ran this before ended with a crash ({crash.fault}) while {requests} ran. "
        "They run again first, a few at a time. "
        f"A request that ends the process {LETHAL_CRASHES} times is answered with an error."
    )
