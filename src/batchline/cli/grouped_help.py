"""`--help` in groups of options, readable at any width.

Typer's own tables are as wide as the terminal and shorten the names of options to fit: at 80 columns several of them
are unreadable. Here a long name is on a separate line, with its text below.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`, in the order of their definition."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and each group of options as a section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(group_of(parameter), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


def group_of(parameter: Any) -> str:
    """The name of an option's group; those without one are `Options`."""
    default = "Arguments" if parameter.param_type_name == "argument" else "Options"
    return str(parameter.rich_help_panel or default)
