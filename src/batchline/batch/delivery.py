"""Brings the results of a complete journal to the places where the user wants them, each once.

A remote file that has arrived is noted in the journal, so that a process that dies before it has removed its workspace
does not upload the file again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from batchline.batch import sink
from batchline.batch.journal import Note
from batchline.batch.options import RunOptions
from batchline.batch.progress import Reporter
from batchline.batch.recovery import RunState
from batchline.batch.stopping import Stop, unless_stopped
from batchline.batch.workspace import Workspace


async def deliver_results(
    state: RunState, options: RunOptions, workspace: Workspace, reporter: Reporter, stop: Stop
) -> None:
    """Write the result files and bring those to their places that are not there yet.

    Raises: OutputUnwritable, RunFailed, RunInterrupted.
    """
    output = sink.StagedFile.for_location(options.output, workspace.path)
    error_file = sink.StagedFile.for_location(options.error_output, workspace.path) if options.error_output else None
    notes = {output: _delivery_note(output, "all results" if error_file is None else "succeeded", options)}
    if error_file is not None:
        notes[error_file] = _delivery_note(error_file, "failed", options)
    missing = [file for file, note in notes.items() if note.text not in state.delivered]
    if not missing:
        return
    reporter.phase(f"Writing {' and '.join(file.location.display for file in missing)}")
    await asyncio.to_thread(
        sink.write_results,
        state.journal,
        num_lines=state.tally.total,
        order=options.output_order,
        output=output,
        error_file=error_file,
        scratch=workspace.scratch,
        should_stop=stop.shutdown.is_set,
    )
    for file in missing:
        await unless_stopped(sink.deliver(file), stop.shutdown, options.grace_period_s)
        if file.location.is_remote:
            with suppress(OSError):  # on a full disk: no reason to fail, because the results have arrived
                await asyncio.to_thread(state.write_note, notes[file])


def _delivery_note(file: sink.StagedFile, content: str, options: RunOptions) -> Note:
    """Names what decides the bytes of the file besides the journal: another command may send other lines there."""
    return Note("delivered", f"{file.location.tag} {content} in {options.output_order} order")
